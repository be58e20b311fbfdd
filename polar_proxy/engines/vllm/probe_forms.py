"""The answers by which a parser is judged, and the judgement. Pure data; `probe_parsers.py` gets them from a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from polar_proxy.engines.hermes import CALL, END_CALL, HermesParser, Reasoning
from polar_proxy.types import SampleEvent

LETTER = "Z"
PLAIN = "Hello there."
ONE = CALL + '\n{"name": "look", "arguments": {"path": "a"}}\n' + END_CALL
OTHER = CALL + '\n{"name": "look", "arguments": {}}\n' + END_CALL
AWKWARD = CALL + '\n{"name": "look", "arguments": {"b" : true,"p":"a\\u00e9 é", "e":[ ]}}\n' + END_CALL
FORMS = {"plain text": PLAIN}
CALL_FORMS = {"text and a call": f"I look.\n{ONE}", "two calls": f"{OTHER}\n{OTHER}", "awkward JSON": AWKWARD}
TAGGED, IN_REASONING = "tagged reasoning", "a call in reasoning"


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """What an answer says, without the white space around it."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    finish: str | None

    @classmethod
    def of(cls, events: Sequence[SampleEvent]) -> ParsedAnswer:
        calls: dict[int, tuple[str, str]] = {}
        for delta in (delta for event in events for delta in event.tool_calls):
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (name + (delta.name or ""), arguments + delta.arguments)
        return cls(
            "".join(event.text for event in events).strip(),
            "".join(event.reasoning for event in events).strip(),
            tuple(calls[index] for index in sorted(calls)),
            next((event.finish_reason for event in reversed(events) if event.finish_reason), None),
        )


@dataclass(frozen=True, slots=True)
class ForcedAnswer:
    """One answer: its ids without the token at which it ended, their text, and what the chat route says of it."""

    name: str
    wanted: str
    ids: tuple[int, ...]
    said: ParsedAnswer
    text: str = ""


def not_forced(seen: Sequence[ForcedAnswer], optional: set[str]) -> str | None:
    """Which form was not sampled though it was asked for."""
    missing = [answer.name for answer in seen if answer.wanted not in answer.text and answer.name not in optional]
    if not missing:
        return None
    return f"It could not be made to answer with {missing[0]} (structured outputs or biases are without effect)."


def matching_reasoning_mode(seen: Sequence[ForcedAnswer], *, tools: bool) -> tuple[Reasoning | None, str | None]:
    """The first kind of reasoning with which the Hermes parser says of all these answers what the server says."""
    wrong: dict[Reasoning, list[ForcedAnswer]] = {}
    for mode in get_args(Reasoning):
        wrong[mode] = [answer for answer in seen if _hermes(answer, mode, tools=tools) != answer.said]
        if not wrong[mode]:
            return mode, None
    nearest = min(wrong, key=lambda mode: len(wrong[mode]))
    return None, f"Its chat route reads {wrong[nearest][0].name} otherwise than the Hermes parser."


def _hermes(answer: ForcedAnswer, mode: Reasoning, *, tools: bool) -> ParsedAnswer:
    parser = HermesParser(tools=tools, reasoning=mode)
    parts = [parser.feed(answer.text), parser.close()]
    finish = "length" if answer.said.finish == "length" else "tool_calls" if parser.calls else "stop"
    events = [SampleEvent(text=part.text, reasoning=part.reasoning, tool_calls=part.tool_calls) for part in parts]
    return ParsedAnswer.of([*events, SampleEvent(finish_reason=finish)])
