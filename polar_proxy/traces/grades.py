"""Which calls are trained (`excluded_calls`), and grades: how far a trace can be trusted, and for which reasons.

exact        the engine rendered every prompt, and every log-probability was reported at sampling
continued    Polar continued some prompts from exact tokens
approximate  the reasons name what differs from sampling. Exported and trained only on request
rejected     an audit found the log-probabilities wrong. No builder gives this grade

Reasons, each with the best grade that it allows:

continued         continued    Polar made a prompt from the earlier call's exact tokens and the new messages
off_distribution  approximate  raw log-probabilities were recorded, and sampling was from another distribution
weights_changed   approximate  the weights changed during an answer, and the engine did not report at which token
canonical         approximate  the context before sampled tokens differs from the recorded prompt
rescored          approximate  an engine computed the log-probabilities later
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from polar_proxy.sequences import all_reported
from polar_proxy.types import CallRecord, Choice, Json

Grade = Literal["exact", "continued", "approximate", "rejected"]
GRADES: tuple[Grade, ...] = get_args(Grade)
"""From the best to the worst."""
TRAINABLE = frozenset({"exact", "continued"})
REJECTED = "rejected"

Reason = Literal["continued", "off_distribution", "weights_changed", "canonical", "rescored"]
_GRADE_BY_REASON: Mapping[str, Grade] = {
    "continued": "continued",
    "off_distribution": "approximate",
    "weights_changed": "approximate",
    "canonical": "approximate",
    "rescored": "approximate",
}

_OFF_AT_ZERO = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")


def grade_of(reasons: Iterable[str]) -> Grade:
    """Return the best grade that these reasons allow. Raise KeyError for an unknown reason."""
    return max((_GRADE_BY_REASON[reason] for reason in reasons), key=GRADES.index, default="exact")


def grade_reasons(call: CallRecord, choice: Choice) -> set[Reason]:
    """Return why one answer by itself is not `exact`."""
    found: set[Reason] = set()
    if call.prompt_mode == "continue":
        found.add("continued")
    if is_off_distribution(call):
        found.add("off_distribution")
    if weights_changed(policy_versions(call, choice)):
        found.add("weights_changed")
    return found


def is_off_distribution(call: CallRecord) -> bool:
    """Return whether the recorded log-probabilities are of another distribution than the sampled one."""
    return call.logprob_mode == "raw" and bool(sampling_overrides(call))


def sampling_overrides(call: CallRecord) -> Json:
    """Return the sampling settings that change the model's own distribution."""
    sampling = call.sampling
    found: Json = {name: value for name in ("temperature", "top_p") if (value := sampling.get(name)) not in (None, 1.0)}
    return found | {name: value for name in _OFF_AT_ZERO if (value := sampling.get(name))}


def weights_changed(versions: Sequence[tuple[int, str | None]]) -> bool:
    """Return whether the weights changed at an unknown token of an answer with these `policy_versions`.

    The version is then "A..B": A was loaded before the answer and B after it.
    """
    return len(versions) == 1 and ".." in (versions[0][1] or "")


def policy_versions(call: CallRecord, choice: Choice) -> tuple[tuple[int, str | None], ...]:
    """Return (first position within the answer, policy version) of each run of its tokens, from position 0 on."""
    if not choice.versions:
        return ((0, call.weight_version),)
    if choice.versions[0][0] > 0:
        return ((0, call.weight_version), *choice.versions)
    return choice.versions


# ---------------------------------------------------------------- calls that are not trained


def excluded_calls(calls: Sequence[CallRecord]) -> dict[str, str]:
    """Return call id -> reason for all calls of a session that cannot be trained on."""
    excluded = {call.call_id: reason for call in calls if (reason := exclusion_reason(call)) is not None}
    for call_id in _superseded_attempts(calls, excluded):
        excluded[call_id] = "retry_of"
    return excluded


def exclusion_reason(call: CallRecord) -> str | None:
    """Return why this call by itself cannot be trained on, or None."""
    if call.status != "ok":
        return call.status
    if call.edge == "side_call":
        return "side_call"
    sampled = [(len(choice.token_ids), len(choice.logprobs)) for choice in call.choices]
    if call.prompt_ids is None or not sampled or any(tokens == 0 or tokens != values for tokens, values in sampled):
        return "no_tokens"
    if not all(all_reported(choice.logprobs) for choice in call.choices):
        return "no_logprobs"
    if call.sampling.get("constrained"):
        return "constrained"  # a grammar limited the sampling: the tokens were not the policy's own choice
    return None


def in_start_order(calls: Sequence[CallRecord]) -> list[CallRecord]:
    return sorted(calls, key=lambda call: (call.started_at, call.call_id))


def _superseded_attempts(calls: Sequence[CallRecord], excluded: Mapping[str, str]) -> list[str]:
    """Return the answered attempts at a request that the agent did not continue.

    The agent used one attempt at each request: the attempt to which later calls refer, or else the last one.
    """
    first: dict[str, str] = {}
    attempts: dict[str, list[str]] = {}
    referred = {call.parent_call_id for call in calls if call.edge != "retries"}
    for call in in_start_order(calls):
        parent = call.parent_call_id if call.edge == "retries" else None
        origin = first.get(parent, parent) if parent is not None else call.call_id
        first[call.call_id] = origin
        attempts.setdefault(origin, []).append(call.call_id)
    superseded: list[str] = []
    for group in attempts.values():
        usable = [call_id for call_id in group if call_id not in excluded]
        kept = {call_id for call_id in usable if call_id in referred} or set(usable[-1:])
        superseded += [call_id for call_id in usable if call_id not in kept]
    return superseded
