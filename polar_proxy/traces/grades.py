"""Calls that cannot be trained on (`excluded_calls`), and grades: how far a trace can be trusted, and why.

exact        the engine rendered every prompt, and every log-probability was reported at sampling
continued    Polar continued some prompts from exact tokens
approximate  the reasons name what differs from sampling. Exported only on request; Polar's trainer skips it
rejected     an audit found the log-probabilities wrong. No builder gives this grade

Reasons, each with the best grade that it allows:

continued         continued    Polar made a prompt from the earlier call's exact tokens and the new messages
off_distribution  approximate  the log-probabilities are not those of softmax(logits / temperature), which a trainer
                               computes: top_p, a penalty, ... changed the distribution, or raw log-probabilities were
                               recorded at another temperature than 1
weights_changed   approximate  the weights changed during an answer, and the engine did not report at which token
canonical         approximate  the context before sampled tokens differs from the recorded prompt
rescored          approximate  an engine computed the log-probabilities later
summarised        approximate  the reasoning is the summary that a provider shows, not what its model sampled
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from polar_proxy.sequences import all_reported, answer_sampling
from polar_proxy.types import AnswerSampling, CallRecord

Grade = Literal["exact", "continued", "approximate", "rejected"]
GRADES: tuple[Grade, ...] = get_args(Grade)
"""All grades, from the best to the worst."""
TRAINABLE = frozenset({"exact", "continued"})
REJECTED = "rejected"

Reason = Literal["continued", "off_distribution", "weights_changed", "canonical", "rescored", "summarised"]
_GRADE_BY_REASON: Mapping[str, Grade] = {
    "continued": "continued",
    "off_distribution": "approximate",
    "weights_changed": "approximate",
    "canonical": "approximate",
    "rescored": "approximate",
    "summarised": "approximate",
}
SUMMARISING_ENGINES = frozenset({"anthropic", "google", "passthrough"})
"""Engines whose answers contain a summary of the reasoning. `passthrough` is one of them, because most providers that
it calls send summaries."""


_NOTES = 20
"""Maximum number of different notes that `DistributionNotes` passes on. A note contains values that clients send, so
the number of different notes has no other limit."""


def grade_of(reasons: Iterable[str]) -> Grade:
    """Return the best grade that these reasons allow. Raise KeyError for an unknown reason."""
    return max((_GRADE_BY_REASON[reason] for reason in reasons), key=GRADES.index, default="exact")


def grade_reasons(call: CallRecord, sampling: AnswerSampling) -> set[Reason]:
    """Return why a call's answer is not `exact`, as far as the call itself shows. `sampling`: how it was sampled."""
    found: set[Reason] = set()
    if call.prompt_mode == "continue":
        found.add("continued")
    if is_off_distribution(sampling):
        found.add("off_distribution")
    if weights_changed(sampling.versions):
        found.add("weights_changed")
    return found


def is_off_distribution(sampling: AnswerSampling) -> bool:
    """Return whether the recorded log-probabilities are not those of softmax(logits / temperature).

    True also if the temperature is unknown.
    """
    if sampling.temperature is None or sampling.changes:
        return True
    return sampling.logprob_mode == "raw" and sampling.temperature != 1.0


def off_distribution_note(call: CallRecord) -> str | None:
    """Return a note for the user if a call's log-probabilities are `off_distribution`, otherwise None.

    The note names the sampling parameters that changed the distribution, and the option that prevents this.
    """
    for choice in call.choices:
        sampling = answer_sampling(call, choice)
        if not choice.token_ids.size or not is_off_distribution(sampling):
            continue
        changes = dict(sampling.changes)
        if sampling.temperature is not None and sampling.logprob_mode == "raw" and sampling.temperature != 1.0:
            changes = {"temperature": sampling.temperature, **changes}
        named = (
            ", ".join(
                f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in changes.items()
            )
            or "no known temperature"
        )
        return (
            f"answers are sampled with {named}, so their traces are approximate, and polar export leaves them out. "
            "With --temperature 1, polar serve, run and session new sample from the model's own distribution instead."
        )
    return None


class DistributionNotes:
    """An observer of calls. Passes the `off_distribution_note` of each call to `note`, but each text only once, and at
    most `_NOTES` texts in all."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._noted: set[str] = set()

    def __call__(self, call: CallRecord) -> None:
        text = off_distribution_note(call)
        if text is not None and text not in self._noted and len(self._noted) < _NOTES:
            self._noted.add(text)
            self._note(text)


def weights_changed(versions: Sequence[tuple[int, str | None]]) -> bool:
    """Return whether the weights changed at an unknown token of an answer.

    `versions`: the policy versions that sampled the answer, each with its first token position. If the place of the
    change is unknown, there is one entry, with the version "A..B": A was loaded before the answer, and B after it.
    """
    return len(versions) == 1 and ".." in (versions[0][1] or "")


# ---------------------------------------------------------------- calls that are not trained


def excluded_calls(calls: Sequence[CallRecord]) -> dict[str, str]:
    """Return the calls of a session that cannot be trained on: call id -> reason."""
    excluded = {call.call_id: reason for call in calls if (reason := exclusion_reason(call)) is not None}
    for call_id in _superseded_attempts(calls, excluded):
        excluded[call_id] = "retry_of"
    return excluded


def exclusion_reason(call: CallRecord) -> str | None:
    """Return why this call by itself cannot be trained on, or None."""
    if has_provider_tools(call):
        return "provider_tools"
    if call.sampling.get("missing_history"):
        return "missing_history"  # its prompt is not what the model saw
    if call.status != "ok":
        return call.status
    if call.edge == "side_call":
        return "side_call"
    sampled = [(len(choice.token_ids), len(choice.logprobs)) for choice in call.choices]
    if call.prompt_ids is None or not sampled or any(tokens == 0 or tokens != values for tokens, values in sampled):
        return "no_tokens"
    if not all(all_reported(choice.logprobs) for choice in call.choices):
        return "no_logprobs"
    if call.prompt_reason == "images":
        return "images"  # the recorded token ids do not contain the images that the answer was sampled from
    if call.sampling.get("constrained"):
        return "constrained"  # a grammar limited the sampling: the tokens were not the policy's own choice
    if "answer" in (call.hooks or {}):
        return "hook"  # its tokens are not the answer that the agent got
    if call.sampling.get("hidden_call"):
        return "hidden_call"  # its tokens have a second tool call, which the agent was not shown
    return None


def has_provider_tools(call: CallRecord) -> bool:
    """Return whether the provider may have run a tool within the answer."""
    return bool(call.sampling.get("provider_tools", {}).get("action") == "allowed")


def in_start_order(calls: Sequence[CallRecord]) -> list[CallRecord]:
    return sorted(calls, key=lambda call: (call.started_at, call.call_id))


def _superseded_attempts(calls: Sequence[CallRecord], excluded: Mapping[str, str]) -> list[str]:
    """Return the ids of answered calls that the agent discarded when it retried their request.

    Calls in `excluded` do not count as attempts. An attempt is kept if it is the parent of a call that is not a retry.
    If a request has no such attempt, its last attempt is kept.
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
