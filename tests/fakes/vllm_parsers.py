"""The answer parsers of the fake vLLM server, independent of Polar's. Pure functions."""

from __future__ import annotations

import re
from typing import Any

Json = dict[str, Any]

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_HERMES = re.compile(r'\{"name": "(\w+)", "arguments":\s*(.*)\}', re.DOTALL)
_OTHER = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def parse_answer(
    text: str, *, tools: bool, thinks: bool, other_form: bool
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Return (reasoning, text, calls as (name, arguments)) of a whole answer."""
    reasoning = ""
    if thinks and (thought := _THOUGHT.match(text)):
        reasoning, text = thought[1], text[thought.end() :]
    if not tools:
        return reasoning, text, ()
    form = _OTHER if other_form else _HERMES
    bodies = [form.fullmatch(body) for body in _CALL.findall(text)]
    calls = tuple((found[1], found[2]) for found in bodies if found)
    return reasoning, text[: text.index("<tool_call>")] if calls else text, calls if len(calls) == len(bodies) else ()


def derendered_chunk(before: tuple[Any, ...], now: tuple[Any, ...], finish: str | None) -> Json:
    """Return the streamed chunk with what `now` adds to `before` (both are results of `parse_answer`)."""
    delta: Json = {}
    for name, old, new in (("reasoning", before[0], now[0]), ("content", before[1], now[1])):
        if len(new) > len(old):
            delta[name] = new[len(old) :]
    delta["tool_calls"] = [
        {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(now[2])
        if index >= len(before[2])
    ]
    if finish == "stop" and now[2]:
        finish = "tool_calls"
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
