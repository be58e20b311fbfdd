"""Grades: how far a trace can be trusted, and for which reasons.

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

from collections.abc import Iterable
from typing import Literal, get_args

from polar_proxy.types import CallRecord, Choice, Json

Grade = Literal["exact", "continued", "approximate", "rejected"]
GRADES: tuple[Grade, ...] = get_args(Grade)
"""From the best to the worst."""
TRAINABLE = frozenset({"exact", "continued"})
REJECTED = "rejected"

Reason = Literal["continued", "off_distribution", "weights_changed", "canonical", "rescored"]
CONTINUED: Reason = "continued"
OFF_DISTRIBUTION: Reason = "off_distribution"
WEIGHTS_CHANGED: Reason = "weights_changed"
CANONICAL: Reason = "canonical"
RESCORED: Reason = "rescored"
GRADE_BY_REASON: dict[str, Grade] = {
    CONTINUED: "continued",
    OFF_DISTRIBUTION: "approximate",
    WEIGHTS_CHANGED: "approximate",
    CANONICAL: "approximate",
    RESCORED: "approximate",
}

_OFF_AT_ZERO = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")


def grade_of(reasons: Iterable[str]) -> Grade:
    """Return the best grade that these reasons allow. Raise KeyError for an unknown reason."""
    return max((GRADE_BY_REASON[reason] for reason in reasons), key=GRADES.index, default="exact")


def grade_reasons(call: CallRecord, choice: Choice) -> set[Reason]:
    """Return why one answer by itself is not `exact`."""
    found: set[Reason] = set()
    if call.prompt_mode == "continue":
        found.add(CONTINUED)
    if is_off_distribution(call):
        found.add(OFF_DISTRIBUTION)
    if weights_changed(call, choice):
        found.add(WEIGHTS_CHANGED)
    return found


def is_off_distribution(call: CallRecord) -> bool:
    """Return whether the recorded log-probabilities are of another distribution than the sampled one."""
    return call.logprob_mode == "raw" and bool(sampling_overrides(call))


def sampling_overrides(call: CallRecord) -> Json:
    """Return the sampling settings that change the model's own distribution."""
    sampling = call.sampling
    found: Json = {name: value for name in ("temperature", "top_p") if (value := sampling.get(name)) not in (None, 1.0)}
    return found | {name: value for name in _OFF_AT_ZERO if (value := sampling.get(name))}


def weights_changed(call: CallRecord, choice: Choice) -> bool:
    """Return whether the weights changed at an unknown token of the answer.

    The version is then "A..B": A was loaded before the answer and B after it.
    """
    runs = policy_versions(call, choice)
    return len(runs) == 1 and ".." in (runs[0][1] or "")


def policy_versions(call: CallRecord, choice: Choice) -> tuple[tuple[int, str | None], ...]:
    """Return (first position within the answer, policy version) of each run of its tokens, from position 0 on."""
    if not choice.versions:
        return ((0, call.weight_version),)
    if choice.versions[0][0] > 0:
        return ((0, call.weight_version), *choice.versions)
    return choice.versions
