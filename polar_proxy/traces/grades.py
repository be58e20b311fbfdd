"""Grades: how far a trace can be trusted, and why.

`exact`    every prompt was rendered by the engine and every log-probability is the one told at sampling
`spliced`  some prompts were continued by Polar from exact tokens
`marked`   something is not as it was sampled; the reasons say what. Not exported and not trained unless asked for
`refused`  an audit found the log-probabilities wrong. No builder gives this grade
"""

from __future__ import annotations

from collections.abc import Iterable

from polar_proxy.types import CallRecord, Choice, Json

GRADES = ("exact", "spliced", "marked", "refused")
"""From the best to the worst."""
TRAINABLE = frozenset({"exact", "spliced"})

CONTINUED = "continued"
OFF_DISTRIBUTION = "warped"
WEIGHTS_CHANGED = "weights_changed"
CANONICAL = "canonical"
RESCORED = "rescored"
GRADE_BY_REASON = {
    CONTINUED: "spliced",
    OFF_DISTRIBUTION: "marked",
    WEIGHTS_CHANGED: "marked",
    CANONICAL: "marked",
    RESCORED: "marked",
}
"""Each reason with the grade that a trace has at best because of it:

continued        Polar made a prompt from the earlier call's exact tokens and what was new
warped           raw log-probabilities were recorded where another distribution was sampled from
weights_changed  the weights changed while an answer was sampled, and the engine did not tell at which token
canonical        context stands before sampled tokens that differs from what the model was given
rescored         the log-probabilities are an engine's later ones
"""
_OFF_AT_ZERO = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")


def grade_of(why: Iterable[str]) -> str:
    """The grade that these reasons leave. Raises KeyError for a reason that is none."""
    return max((GRADE_BY_REASON[reason] for reason in why), key=GRADES.index, default="exact")


def grade_reasons(call: CallRecord, choice: Choice) -> set[str]:
    """What speaks against `exact` in one answer by itself."""
    found = set()
    if call.prompt_mode == "continue":
        found.add(CONTINUED)
    if is_off_distribution(call):
        found.add(OFF_DISTRIBUTION)
    if weights_changed(call, choice):
        found.add(WEIGHTS_CHANGED)
    return found


def is_off_distribution(call: CallRecord) -> bool:
    """The recorded log-probabilities are of another distribution than the one that was sampled from."""
    return call.logprob_mode == "raw" and bool(sampling_overrides(call))


def sampling_overrides(call: CallRecord) -> Json:
    """What was asked of the engine that makes the distribution sampled from another than the model's own."""
    sampling = call.sampling
    found: Json = {name: value for name in ("temperature", "top_p") if (value := sampling.get(name)) not in (None, 1.0)}
    return found | {name: value for name in _OFF_AT_ZERO if (value := sampling.get(name))}


def weights_changed(call: CallRecord, choice: Choice) -> bool:
    """The version is "A..B": it was A before and B behind the answer, and nobody told where it changed."""
    runs = versions(call, choice)
    return len(runs) == 1 and ".." in (runs[0][1] or "")


def versions(call: CallRecord, choice: Choice) -> tuple[tuple[int, str | None], ...]:
    """(first position within the answer, policy version) of each run of its tokens; begins at 0."""
    if not choice.versions:
        return ((0, call.weight_version),)
    if choice.versions[0][0] > 0:
        return ((0, call.weight_version), *choice.versions)
    return choice.versions
