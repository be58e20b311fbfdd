"""Drift: a prompt that should go on with an earlier call's tokens and does not begin with them.

A call drifts when it extends, by meaning, the answer of a call that is trained (its base, `history/base.py`), the
base's tokens are known, the call's own prompt does not begin with them, and nothing was changed on purpose. What the
harness re-serialised, reordered or dropped shows here, with the place where the tokens part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from polar_proxy.traces.exclusions import excluded_calls, in_start_order
from polar_proxy.traces.tokens import common_prefix_length
from polar_proxy.types import CallRecord, Choice, Json

INTENTIONAL_REASONS = frozenset(
    {
        *("no_base", "raw_prompt", "tools_changed", "template_options_changed"),
        *("images", "constrained", "reasoning_by_template", "context_full"),
    }
)
"""Values of `prompt_reason` under which another beginning of the prompt is meant."""

DriftOutcome = Literal["split", "canonical", "excluded"]
"""What the builder did: opened another trace; joined the call all the same; left the call out for another reason."""


@dataclass(frozen=True, slots=True)
class DriftEvent:
    """Where the prompt of a drifted call parts from its base's tokens."""

    call_id: str
    base_call_id: str
    base_choice: int
    position: int
    """The first token that differs: an index into the prompt, and into the base's prompt followed by its answer."""
    expected: int | None
    actual: int | None
    """The token ids there; `actual` is None where the prompt ends before."""
    prompt_reason: str | None
    """Why the prompt was not continued from the base's tokens."""
    outcome: DriftOutcome = "split"
    split_reason: str | None = None
    """Why the call was not joined although `on_drift` asked for it."""

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in self.__slots__}


def find_drift(call: CallRecord, base: CallRecord | None, *, base_trained: bool) -> DriftEvent | None:
    """The drift of one call from its base (the call that `base_call_id` names), or None."""
    prompt = call.prompt_ids
    if base is None or not base_trained or prompt is None or call.prompt_reason in INTENTIONAL_REASONS:
        return None
    choice = base_choice(call, base)
    if choice is None or base.prompt_ids is None or not len(choice.token_ids):
        return None
    before = len(base.prompt_ids)
    position = common_prefix_length(prompt, base.prompt_ids)
    if position == before:
        position += common_prefix_length(prompt[before:], choice.token_ids)
    if position == before + len(choice.token_ids):
        return None
    expected = base.prompt_ids[position] if position < before else choice.token_ids[position - before]
    return DriftEvent(
        call_id=call.call_id,
        base_call_id=base.call_id,
        base_choice=choice.index,
        position=position,
        expected=int(expected),
        actual=int(prompt[position]) if position < len(prompt) else None,
        prompt_reason=call.prompt_reason,
    )


def drift_events(calls: Sequence[CallRecord], excluded: Mapping[str, str] | None = None) -> tuple[DriftEvent, ...]:
    """The drift of every call of a session, in the order of the calls. `excluded`: the calls that are not trained."""
    left_out = excluded_calls(calls) if excluded is None else excluded
    by_id = {call.call_id: call for call in calls}
    found = []
    for call in in_start_order(calls):
        base = by_id.get(call.base_call_id) if call.base_call_id is not None else None
        one = find_drift(call, base, base_trained=call.base_call_id not in left_out)
        if one is not None:
            found.append(one)
    return tuple(found)


def base_choice(call: CallRecord, base: CallRecord) -> Choice | None:
    """The answer of the base that the call extends."""
    wanted = call.base_choice or 0
    return next((choice for choice in base.choices if choice.index == wanted), None)
