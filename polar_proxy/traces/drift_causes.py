"""Why a prompt does not begin with the tokens that were sampled: the cause, told from the two texts. Pure.

The expected text is that of the base's prompt and answer, the found one that of the prompt which the engine rendered
for the next turn. The text is brought into forms that forget one kind of difference each (white space, the way JSON is
written, reasoning); the first form in which the found text begins with the expected one names the cause.
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
"""The same bytes; the same tools by meaning; other tools."""

CAUSE_MEANINGS: Mapping[DriftCause, str] = {
    "retokenised": "the text is the same; the tokenizer cuts it into other tokens than were sampled",
    "whitespace": "white space around text, reasoning or calls is not what was sampled",
    "arguments_reserialised": "the JSON of a tool call is written in another way (spaces, escapes, numbers, key order)",
    "reasoning_dropped": "reasoning of an earlier answer is not in the prompt any more",
    "tools_changed": "the harness offers other tools than at the turn before",
    "tools_rewritten": "the harness offers the same tools in another order or with other key order",
    "context_changed": "something before the answer reads differently from how it read when the answer was sampled",
    "answer_changed": "the answer came back in other words",
}
_CONTINUE = "--prompt-mode continue keeps the tokens as they were sampled."
CAUSE_FIXES: Mapping[DriftCause, str] = {
    "retokenised": _CONTINUE,
    "whitespace": _CONTINUE,
    "arguments_reserialised": _CONTINUE,
    "reasoning_dropped": f"{_CONTINUE} Where training must see what the template makes of older turns, "
    "--past-reasoning strip cuts there instead, and says so.",
    "tools_changed": "Nothing: the prompt's beginning is another one, and a new sequence begins. "
    "Switch off what changes the tools (lazily loaded tools, MCP servers) to keep one sequence.",
    "tools_rewritten": _CONTINUE,
    "context_changed": f"{_CONTINUE} If the difference means nothing (a date, a nonce), a normaliser in "
    "polar_proxy/sessions/normalisers.py lets history see that; if it is an edit, a new sequence is right.",
    "answer_changed": f"{_CONTINUE} If the harness edits answers on purpose, a new sequence is right.",
}

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_THINK_TAG = re.compile(r"</?think>")
_WHITE = re.compile(r"\s+")
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_LITERAL = re.compile(r"\b(?:True|False|None)\b")


def explain_drift(
    context: str,
    answer: str,
    found: str,
    *,
    reasoning: Sequence[str] = (),
    tools: ToolsChange = "same",
) -> tuple[DriftCause, ...]:
    """Why a prompt with the text `found` does not begin with `context` (the base's prompt) and `answer`.

    The tokens are known to differ. `reasoning` are the thoughts of the answers so far, for templates that write them
    without `<think>` tags; `tools` says what became of the offered ones. More than one cause only where it takes all of
    them to explain the difference.
    """
    expected = context + answer
    if found.startswith(expected):
        return ("retokenised",)
    if tools == "changed":
        return ("tools_changed",)
    for form, named in _forms(reasoning):
        if form(found).startswith(form(expected)):
            return named
    forget = _forms(reasoning)[-1][0]
    if forget(found).startswith(forget(context)):
        return ("answer_changed",)
    return ("tools_rewritten",) if tools == "rewritten" else ("context_changed",)


TextForm = Callable[[str], str]


def _forms(reasoning: Sequence[str]) -> list[tuple[TextForm, tuple[DriftCause, ...]]]:
    """Forms of a text, each forgetting more than nothing, and the cause that each stands for; the last forgets most."""

    def quiet(text: str) -> str:
        return _without(text, reasoning)

    return [
        (canonical_json, ("arguments_reserialised",)),
        (_packed, ("whitespace",)),
        (lambda text: _packed(canonical_json(text)), ("arguments_reserialised", "whitespace")),
        (lambda text: _packed(quiet(text)), ("reasoning_dropped",)),
        (lambda text: _packed(canonical_json(quiet(text))), ("arguments_reserialised", "reasoning_dropped")),
    ]


def _packed(text: str) -> str:
    return _WHITE.sub("", text)


def _without(text: str, reasoning: Sequence[str]) -> str:
    text = _THOUGHT.sub("", text)
    for thought in sorted({thought.strip() for thought in reasoning} - {""}, key=len, reverse=True):
        text = text.replace(thought, "")
    return _THINK_TAG.sub("", text)


def canonical_json(text: str) -> str:
    """`text` with each JSON object in it written in one way: sorted keys, no spaces, 1000.0 as 1000. Python's words for
    the literals, as some templates write them, become JSON's."""
    text = _LITERAL.sub(lambda word: _LITERALS[word[0]], text)
    decoder = json.JSONDecoder()
    out: list[str] = []
    place = 0
    while (start := text.find("{", place)) >= 0:
        out.append(text[place:start])
        try:
            value, place = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            out.append("{")
            place = start + 1
        else:
            out.append(json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    return "".join(out) + text[place:]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
