"""What a session's history remembers of a call, and how it is kept in the store to be known again after a restart.

Texts are not kept: a conversation is known by the keys of `meaning.Chain`. The exceptions are short quotes, by which
a sub-agent's prompt or a summary is recognised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from polar_proxy.history.meaning import EMPTY, text_of
from polar_proxy.history.rules import AGENT_TOOLS
from polar_proxy.types import CallPlace, CallStatus, Edge, Json, Message

_FORM = 1
"""Of `marks`. Others are not read: their calls are then not found again, and the next one is a root."""

_QUOTE = 160
_LONG_ARGUMENT = 80
_LONG_LINE = 40
_LONG_ANSWER = 400

State = Literal["running"] | CallStatus
QuoteKind = Literal["agent_prompt", "argument", "summary", "answer"]


@dataclass(frozen=True, slots=True)
class Quote:
    """Text of an answer that a later conversation may begin with: the `_QUOTE` first characters."""

    kind: QuoteKind
    text: str


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer: keys of the conversation and of its assistant turns with it."""

    end: bytes
    skeleton: bytes
    said: bytes
    ids: tuple[str, ...]
    length: int


@dataclass(slots=True)
class Known:
    """A call that the history knows. `asked` is the key of its messages."""

    call_id: str
    thread: str
    hinted: str | None
    """The harness's own id of the thread."""
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    asked: bytes
    skeleton: bytes
    ids: bytes
    at: float
    """When it was asked, then when it ended."""
    state: State = "running"
    answers: tuple[Heard, ...] = ()
    quotes: tuple[Quote, ...] = ()
    compaction: bool = False
    """It asks for a summary of its conversation."""
    continued: int = 0
    """How many calls extend its answer."""
    asked_again: bool = False
    text: str = ""
    """The answer's text, of recent calls only."""

    @property
    def failed(self) -> bool:
        return self.state in ("client_gone", "upstream_error")


def marks_of(known: Known) -> Json:
    """What the store keeps so that the call is known again: keys as hex, no text but the quotes worth it."""
    marks: Json = {
        "form": _FORM,
        "asked": known.asked.hex(),
        "ids": known.ids.hex(),
        "answers": [
            {
                "end": answer.end.hex(),
                "skeleton": answer.skeleton.hex(),
                "said": answer.said.hex(),
                "ids": list(answer.ids),
                "length": answer.length,
            }
            for answer in known.answers
        ],
    }
    if known.skeleton != EMPTY:
        marks["skeleton"] = known.skeleton.hex()
    if known.hinted is not None:
        marks["thread"] = known.hinted
    if known.compaction:
        marks["compaction"] = True
    if quotes := [[quote.kind, quote.text] for quote in known.quotes if quote.kind in ("agent_prompt", "summary")]:
        marks["quotes"] = quotes
    return marks


def known_from(row: CallPlace) -> Known | None:
    """The call as it was known, or None where the store has no marks of this form."""
    marks = row.marks
    if not marks or marks.get("form") != _FORM:
        return None
    return Known(
        call_id=row.call_id,
        thread=row.thread or row.call_id,
        hinted=marks.get("thread"),
        edge=row.edge,
        parent_call_id=row.parent_call_id,
        rule=row.rule,
        asked=bytes.fromhex(marks["asked"]),
        skeleton=bytes.fromhex(marks["skeleton"]) if "skeleton" in marks else EMPTY,
        ids=bytes.fromhex(marks["ids"]),
        at=row.ended_at,
        state=row.status,
        answers=tuple(
            Heard(
                bytes.fromhex(answer["end"]),
                bytes.fromhex(answer["skeleton"]),
                bytes.fromhex(answer["said"]),
                tuple(answer["ids"]),
                answer["length"],
            )
            for answer in marks["answers"]
        ),
        quotes=tuple(Quote(kind, text) for kind, text in marks.get("quotes", ())),
        compaction=bool(marks.get("compaction")),
    )


def quotes_of(answers: Iterable[Message], compaction: bool) -> tuple[Quote, ...]:
    """What later conversations may quote of these answers."""
    quotes: list[Quote] = []
    for answer in answers:
        for call in answer.tool_calls:
            starts_agents = call.name.lower() in AGENT_TOOLS
            for value in _strings(call.arguments):
                text = value.strip()
                if starts_agents and len(text) >= 12 and " " in text:
                    quotes.append(Quote("agent_prompt", text[:_QUOTE]))
                elif len(text) >= _LONG_ARGUMENT and " " in text:
                    quotes.append(Quote("argument", text[:_QUOTE]))
        text = text_of(answer)
        if not answer.tool_calls and (compaction or len(text) >= _LONG_ANSWER):
            lines = sorted((line.strip() for line in text.splitlines()), key=len, reverse=True)[:3]
            kind: QuoteKind = "summary" if compaction else "answer"
            quotes += [Quote(kind, line[:_QUOTE]) for line in lines if len(line) >= _LONG_LINE]
    return tuple(quotes)


def _strings(arguments: str) -> Sequence[str]:
    """The strings of a call's arguments, one level deep."""
    try:
        value: Any = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return ()
    return [item for item in value.values() if isinstance(item, str)] if isinstance(value, dict) else ()


@dataclass(slots=True)
class Memory:
    """The calls of a session by everything they can be found by."""

    asked: dict[bytes, list[Known]] = field(default_factory=dict)
    ends: dict[bytes, list[tuple[Known, Heard]]] = field(default_factory=dict)
    skeletons: dict[bytes, list[tuple[Known, Heard]]] = field(default_factory=dict)
    said: dict[tuple[bytes, tuple[str, ...]], Known] = field(default_factory=dict)
    threads: dict[str, Known] = field(default_factory=dict)
    """The newest call of each of the harness's own threads."""
    newest: Known | None = None
    """Of those that are neither side calls nor compaction requests."""
    quotable: list[Known] = field(default_factory=list)
    """Calls with quotes, the newest last; see `QUOTABLE`."""
    compactions: list[Known] = field(default_factory=list)
    by_id: dict[str, Known] = field(default_factory=dict)

    QUOTABLE = 32

    def add(self, known: Known) -> None:
        self.by_id[known.call_id] = known
        self.asked.setdefault(known.asked, []).append(known)
        if known.edge != "side_call":
            if known.hinted is not None:
                self.threads[known.hinted] = known
            if known.compaction:
                self.compactions.append(known)
            else:
                self.newest = known

    def answered(self, known: Known) -> None:
        for answer in known.answers:
            self.ends.setdefault(answer.end, []).append((known, answer))
            self.skeletons.setdefault(answer.skeleton, []).append((known, answer))
            if answer.ids or answer.length >= 200:
                self.said[answer.said, answer.ids] = known
        if known.quotes:
            self.quotable.append(known)
            del self.quotable[: -self.QUOTABLE]
