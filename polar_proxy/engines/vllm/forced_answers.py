"""Answers that a server was made to sample, as parsed by the server's chat route and by Polar's Hermes parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from polar_proxy.engines.hermes import CALL, END_CALL, HermesParser, Reasoning
from polar_proxy.types import Json, SampleEvent

LETTER = "Z"
PLAIN = "Hello there."
ONE_CALL = CALL + '\n{"name": "look", "arguments": {"path": "a"}}\n' + END_CALL
EMPTY_CALL = CALL + '\n{"name": "look", "arguments": {}}\n' + END_CALL
AWKWARD_CALL = CALL + '\n{"name": "look", "arguments": {"b" : true,"p":"a\\u00e9 é", "e":[ ]}}\n' + END_CALL
CALL_TEXTS = {
    "text and a call": f"I look.\n{ONE_CALL}",
    "two calls": f"{EMPTY_CALL}\n{EMPTY_CALL}",
    "awkward JSON": AWKWARD_CALL,
}
TAGGED, IN_REASONING = "tagged reasoning", "a call in reasoning"


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The content of a parsed answer, without the white space around it. Tool calls are (name, arguments)."""

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
    """One answer of the server: ids without the stop token, their text, and how the chat route parsed it."""

    name: str
    wanted: str
    ids: tuple[int, ...]
    parsed: ParsedAnswer
    text: str = ""
    sampled: tuple[int, ...] = ()
    """All sampled ids, including the stop token that ended the answer."""
    chunks: tuple[int, ...] = ()
    """How many ids of `sampled` each chunk of the server's stream had. Some parsers parse the same ids differently if
    they come in other chunks."""
    prompt: tuple[int, ...] = ()
    contains_call: bool = False
    """True if a tool call was sampled in the template's format. Also true if the chat route parsed a tool call, because
    a grammar of the server may force tool calls into another format."""
    cut: bool = False
    """True if `max_tokens` cut the answer. If the cut is in a tool call, the chat route parses the call differently in
    a stream than in a whole answer."""

    @property
    def raw_finish(self) -> str:
        """The finish reason of a completion with these ids."""
        return "length" if self.parsed.finish == "length" else "stop"

    def to_sample(self) -> Json:
        """Return the answer in the format that `ParserProcess.match` takes."""
        parsed = self.parsed
        content = {"text": parsed.text, "reasoning": parsed.reasoning, "calls": parsed.calls, "finish": parsed.finish}
        return {
            "prompt": self.prompt,
            "ids": self.sampled,
            "chunks": self.chunks,
            "raw_finish": self.raw_finish,
            "contains_call": self.contains_call,
            **content,
        }


def unforced(answers: Sequence[ForcedAnswer], optional: set[str]) -> str | None:
    """Return a message that names the first answer without its forced text; None if all answers have their texts.

    The answers named in `optional` may lack their texts."""
    missing = [answer.name for answer in answers if answer.wanted not in answer.text and answer.name not in optional]
    if not missing:
        return None
    return f"The server could not be made to answer with {missing[0]} (structured outputs or biases have no effect)."


def matching_reasoning_mode(answers: Sequence[ForcedAnswer], *, tools: bool) -> tuple[Reasoning | None, str | None]:
    """Return the first reasoning mode in which the Hermes parser agrees with the server on every answer.

    If there is none, return None and a description of the disagreement.
    """
    wrong: dict[Reasoning, list[ForcedAnswer]] = {}
    for mode in get_args(Reasoning):
        wrong[mode] = [answer for answer in answers if _parse_hermes(answer, mode, tools=tools) != answer.parsed]
        if not wrong[mode]:
            return mode, None
    nearest = min(wrong, key=lambda mode: len(wrong[mode]))
    return None, f"The server's chat route and the Hermes parser parse {wrong[nearest][0].name} differently."


def _parse_hermes(answer: ForcedAnswer, mode: Reasoning, *, tools: bool) -> ParsedAnswer:
    event = SampleEvent(text=answer.text, finish_reason=answer.raw_finish)
    return ParsedAnswer.of([HermesParser(tools=tools, reasoning=mode).parse(event)])


def ids_without(events: Sequence[SampleEvent], end: int) -> tuple[int, ...]:
    """Return the sampled ids without end-of-turn tokens."""
    return tuple(token for event in events for token in event.token_ids if token != end)


def last_position(row: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Return the last position of `wanted` in `row`, or -1."""
    size = len(wanted)
    return next((at for at in range(len(row) - size, -1, -1) if size and row[at : at + size] == wanted), -1)
