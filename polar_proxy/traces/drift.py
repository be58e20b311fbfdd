"""Drift: a prompt that should continue an earlier call's tokens but does not begin with them.

A call drifts when it continues the answer of a trained call (its base), the base's tokens are known, its own prompt
does not begin with them, and its `prompt_reason` is not one of `INTENTIONAL_REASONS`. The position at which the tokens
differ shows what a harness serialised differently, reordered or dropped.

With `on_drift = canonical` a drifted call is joined to the trace of its base anyway: the sampled tokens so far are
kept, and the context between them and the new answer is taken from the drifted call's own prompt
(`find_context_start`). So the trace's tokens before the new answer may differ from the prompt that the engine saw, and
the trace is graded `approximate`. Polar's paper joins calls in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from polar_proxy.sequences import begins_with, common_prefix_length, find_choice, is_any
from polar_proxy.traces.grades import excluded_calls, in_start_order
from polar_proxy.types import CallRecord, Choice, Span, TokenIds

DriftPolicy = Literal["split", "canonical", "rescore"]
DriftOutcome = Literal["split", "canonical", "excluded"]
"""split: the builder opened another trace; canonical: it joined the call; excluded: the call is not trained."""

INTENTIONAL_REASONS = frozenset(
    {
        *("no_base", "raw_prompt", "other_engine", "hook", "tools_changed", "template_options_changed"),
        *("constrained", "reasoning_by_template", "context_full"),
    }
)
"""Values of `prompt_reason` for which a prompt is meant to differ from the base's tokens."""

_Position = Annotated[int, Field(strict=True, ge=0)]
_TokenId = Annotated[int, Field(strict=True)]


class DriftEvent(BaseModel):
    """The first difference between a drifted call's prompt and the tokens of its base, the call that it continues."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    call_id: str
    base_call_id: str
    base_choice: _Position
    position: _Position
    """Index at which the call's prompt first differs from the base's tokens (the base's prompt, then its answer)."""
    expected: _TokenId | None
    """The base's token id at this position."""
    actual: _TokenId | None
    """The prompt's token id at this position; None if the prompt ends before it."""
    prompt_reason: str | None
    """Why the prompt was not continued from the base's tokens."""
    outcome: DriftOutcome = "split"
    split_reason: str | None = None
    """Why the call was not joined although `on_drift` is `canonical` or `rescore`."""


def drift_events(calls: Sequence[CallRecord], excluded: Mapping[str, str] | None = None) -> tuple[DriftEvent, ...]:
    """Return an event for each drifted call of a session, in the order in which the calls started.

    `excluded`: call id -> reason, of the calls that are not trained; computed if not given.
    """
    not_trained = excluded_calls(calls) if excluded is None else excluded
    trained = {call.call_id: call for call in calls if call.call_id not in not_trained}
    events = []
    for call in in_start_order(calls):
        base = trained.get(call.base_call_id or "")
        if base is not None and (event := find_drift(call, base)) is not None:
            excludes = call.call_id in not_trained
            events.append(event.model_copy(update={"outcome": "excluded"}) if excludes else event)
    return tuple(events)


def find_drift(call: CallRecord, base: CallRecord) -> DriftEvent | None:
    """Return the drift of a call from `base` (the trained call that its `base_call_id` names); None without drift."""
    prompt = call.prompt_ids
    if prompt is None or call.prompt_reason in INTENTIONAL_REASONS:
        return None
    choice = base_choice(call, base)
    if choice is None or base.prompt_ids is None:
        return None
    base_length = len(base.prompt_ids)
    position = common_prefix_length(prompt, base.prompt_ids)
    if position == base_length:
        position += common_prefix_length(prompt[base_length:], choice.token_ids)
    if position == base_length + len(choice.token_ids):
        return None
    expected = base.prompt_ids[position] if position < base_length else choice.token_ids[position - base_length]
    return DriftEvent(
        call_id=call.call_id,
        base_call_id=base.call_id,
        base_choice=choice.index,
        position=position,
        expected=int(expected),
        actual=int(prompt[position]) if position < len(prompt) else None,
        prompt_reason=call.prompt_reason,
    )


def base_choice(call: CallRecord, base: CallRecord) -> Choice | None:
    """Return the answer of the base that the call continues."""
    return find_choice(base, call.base_choice or 0)


def find_context_start(
    before: TokenIds, spans: Sequence[Span], call: CallRecord, base: CallRecord, *, drifted: bool
) -> int | str:
    """Return the position in the call's prompt at which the context after the base's answer begins.

    If there is no such position, return the reason. `before` (int32 [n]) and `spans` are the trace so far, which ends
    with the base's answer. If the call did not drift, the context begins after the base's tokens.

    If it drifted, the position is found by counting end-of-turn tokens. They are special tokens, so text that was
    tokenised differently does not change their number. Let `before` have k end-of-turn tokens. If `before` ends with
    one of them, the context begins after the k-th end-of-turn token of the prompt. Otherwise the base's answer was cut,
    and the context begins with the prompt's next end-of-turn token, which ends that answer.
    """
    prompt, choice = call.prompt_ids, base_choice(call, base)
    if prompt is None or base.prompt_ids is None or choice is None:
        return "no_tokens"
    if not drifted:
        continued = np.concatenate([base.prompt_ids, choice.token_ids])
        return len(continued) if begins_with(prompt, continued) else "not_drift"
    end_tokens = call.engine.eos_token_ids if call.engine is not None else ()
    if not end_tokens:
        return "no_end_of_turn_ids"
    turn_ends = is_any(before, end_tokens)
    if _turn_ends_within_answer(turn_ends, spans):
        return "end_of_turn_within_answer"
    count = int(turn_ends.sum())
    positions = np.flatnonzero(is_any(prompt, end_tokens))
    closed = bool(turn_ends[-1])
    if len(positions) < count + (not closed):
        return "too_few_turns"
    if closed:
        start = int(positions[count - 1]) + 1
        return start if start < len(prompt) else "nothing_new"
    return int(positions[count])


def _turn_ends_within_answer(turn_ends: np.ndarray, spans: Sequence[Span]) -> bool:
    """Return whether an answer has tokens after an end of turn. A rendering of its text would not have such tokens."""
    position = 0
    for span in spans:
        size = span.end - span.start
        if span.kind == "sampled" and turn_ends[position : position + size - 1].any():
            return True
        position += size
    return False


# ---------------------------------------------------------------- causes
#
# A cause is found from two texts: the base's prompt and answer (expected), and the prompt that the engine rendered for
# the next turn (actual). Each cause stands for one kind of difference (white space, how JSON is written, reasoning).
# `_EXPLANATIONS` are tried in order: their differences are removed from both texts, and if the actual text then begins
# with the expected one, these causes explain the drift.

DriftCause = Literal[
    "retokenised",
    "whitespace",
    "arguments_reserialised",
    "reasoning_dropped",
    "tools_changed",
    "tools_rewritten",
    "context_changed",
    "answer_changed",
]

ToolsChange = Literal["same", "rewritten", "changed"]
"""Change of the offered tools. same: equal bytes; rewritten: the same tools in another order or form; changed: other
tools."""

CAUSE_MEANINGS: Mapping[DriftCause, str] = {
    "retokenised": "the text is the same, but the tokenizer splits it into other tokens than were sampled",
    "whitespace": "white space around text, reasoning or tool calls differs from what was sampled",
    "arguments_reserialised": "the JSON of a tool call is written differently (spaces, escapes, numbers, key order)",
    "reasoning_dropped": "the reasoning of an earlier answer is no longer in the prompt",
    "tools_changed": "the harness offers other tools than in the turn before",
    "tools_rewritten": "the harness offers the same tools in another order or with another key order",
    "context_changed": "something before the answer differs from what it was when the answer was sampled",
    "answer_changed": "the harness sent the answer back in other words",
}
_CONTINUE = "--prompt-mode continue keeps the tokens as they were sampled."
CAUSE_FIXES: Mapping[DriftCause, str] = {
    "retokenised": _CONTINUE,
    "whitespace": _CONTINUE,
    "arguments_reserialised": _CONTINUE,
    "reasoning_dropped": f"{_CONTINUE} If training must see what the template makes of past turns, "
    "use --past-reasoning strip: the prompt is then rendered, with that reason in the record.",
    "tools_changed": "Nothing to fix: the prompt begins differently, so a new sequence is right. "
    "Switch off what changes the tools (lazily loaded tools, MCP servers) to keep one sequence.",
    "tools_rewritten": _CONTINUE,
    "context_changed": f"{_CONTINUE} If the difference means nothing (a date, a nonce), add a normaliser "
    "for it to polar_proxy/sessions/hashing.py; if it is an edit, a new sequence is right.",
    "answer_changed": f"{_CONTINUE} If the harness edits answers on purpose, a new sequence is right.",
}

_EXPLANATIONS: tuple[tuple[DriftCause, ...], ...] = (
    ("arguments_reserialised",),
    ("whitespace",),
    ("arguments_reserialised", "whitespace"),
    ("reasoning_dropped",),
    ("arguments_reserialised", "reasoning_dropped"),
)
"""Sets of causes, in the order in which they are tried as the explanation of a difference."""

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_THINK_TAG = re.compile(r"</?think>")
_WHITE_SPACE = re.compile(r"\s+")
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_LITERAL = re.compile(r"\b(?:True|False|None)\b")


def explain_drift(
    context: str,
    answer: str,
    actual: str,
    *,
    reasoning: Sequence[str] = (),
    tools: ToolsChange = "same",
) -> tuple[DriftCause, ...]:
    """Return why the prompt `actual` does not continue the tokens of its base, whose prompt is `context`.

    All three are texts; `answer` is the base's answer. The tokens are known to differ. `reasoning`: the thoughts of
    the answers so far, for templates that write them without `<think>` tags. `tools`: how the offered tools changed.
    Several causes are returned only if all of them are needed to explain the difference.
    """
    expected = context + answer
    if actual.startswith(expected):
        return ("retokenised",)
    if tools == "changed":
        return ("tools_changed",)
    for causes in _EXPLANATIONS:
        if _without(causes, actual, reasoning).startswith(_without(causes, expected, reasoning)):
            return causes
    if _without(_EXPLANATIONS[-1], actual, reasoning).startswith(_without(_EXPLANATIONS[-1], context, reasoning)):
        return ("answer_changed",)
    return ("tools_rewritten",) if tools == "rewritten" else ("context_changed",)


def _without(causes: tuple[DriftCause, ...], text: str, reasoning: Sequence[str]) -> str:
    """Remove from a text everything that these causes can change, so that two texts can be compared.

    White space is removed too, unless `arguments_reserialised` is the only cause.
    """
    if "reasoning_dropped" in causes:
        text = _remove_reasoning(text, reasoning)
    if "arguments_reserialised" in causes:
        text = canonical_json(text)
    return text if causes == ("arguments_reserialised",) else _WHITE_SPACE.sub("", text)


def _remove_reasoning(text: str, reasoning: Sequence[str]) -> str:
    text = _THOUGHT.sub("", text)
    for thought in sorted({thought.strip() for thought in reasoning} - {""}, key=len, reverse=True):
        text = text.replace(thought, "")
    return _THINK_TAG.sub("", text)


def canonical_json(text: str) -> str:
    """Return the text with every JSON object in one form: sorted keys, no spaces, 1000.0 as 1000.

    Python's True, False and None, as some templates write them, become JSON's literals.
    """
    text = _LITERAL.sub(lambda word: _LITERALS[word[0]], text)
    decoder = json.JSONDecoder(parse_float=_whole_number)
    out: list[str] = []
    position = 0
    while (start := text.find("{", position)) >= 0:
        out.append(text[position:start])
        try:
            value, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            out.append("{")
            position = start + 1
        else:
            out.append(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    return "".join(out) + text[position:]


def _whole_number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number
