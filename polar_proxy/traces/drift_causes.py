"""Causes of drift: why a prompt does not begin with the sampled tokens, found from the two texts. Pure.

The expected text is that of the base's prompt and answer; the actual text is that of the prompt which the engine
rendered for the next turn. Both are converted to forms that each ignore one kind of difference (white space, how JSON
is written, reasoning). The first form in which the actual text begins with the expected one names the cause.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
"""The same bytes; the same tools in another order or form; other tools."""

CAUSE_MEANINGS: Mapping[DriftCause, str] = {
    "retokenised": "the text is the same, and the tokenizer splits it into other tokens than were sampled",
    "whitespace": "white space around text, reasoning or calls differs from what was sampled",
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
    "tools_changed": "Nothing: the prompt begins differently, so a new sequence is right. "
    "Switch off what changes the tools (lazily loaded tools, MCP servers) to keep one sequence.",
    "tools_rewritten": _CONTINUE,
    "context_changed": f"{_CONTINUE} If the difference means nothing (a date, a nonce), a normaliser in "
    "polar_proxy/sessions/hashing.py lets history see that; if it is an edit, a new sequence is right.",
    "answer_changed": f"{_CONTINUE} If the harness edits answers on purpose, a new sequence is right.",
}

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
    """Return why a prompt with the text `actual` does not begin with `context` (the base's prompt) and `answer`.

    The tokens are known to differ. `reasoning` are the thoughts of the answers so far, for templates that write them
    without `<think>` tags; `tools` is how the offered tools changed. Several causes are returned only if all of them
    are needed to explain the difference.
    """
    expected = context + answer
    if actual.startswith(expected):
        return ("retokenised",)
    if tools == "changed":
        return ("tools_changed",)
    forms = _forms(reasoning)
    for form, causes in forms:
        if form(actual).startswith(form(expected)):
            return causes
    coarsest, _ = forms[-1]
    if coarsest(actual).startswith(coarsest(context)):
        return ("answer_changed",)
    return ("tools_rewritten",) if tools == "rewritten" else ("context_changed",)


TextForm = Callable[[str], str]


def _forms(reasoning: Sequence[str]) -> list[tuple[TextForm, tuple[DriftCause, ...]]]:
    """Return functions that normalise a text, each with the causes whose differences it removes, fewest first."""

    def without_reasoning(text: str) -> str:
        return _remove_reasoning(text, reasoning)

    return [
        (canonical_json, ("arguments_reserialised",)),
        (_remove_white_space, ("whitespace",)),
        (lambda text: _remove_white_space(canonical_json(text)), ("arguments_reserialised", "whitespace")),
        (lambda text: _remove_white_space(without_reasoning(text)), ("reasoning_dropped",)),
        (
            lambda text: _remove_white_space(canonical_json(without_reasoning(text))),
            ("arguments_reserialised", "reasoning_dropped"),
        ),
    ]


def _remove_white_space(text: str) -> str:
    return _WHITE_SPACE.sub("", text)


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
    decoder = json.JSONDecoder()
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
            value = _with_whole_numbers(value)
            out.append(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    return "".join(out) + text[position:]


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
