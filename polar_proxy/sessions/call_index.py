"""What a session's history remembers of a call, and how it is kept in the store to be known again after a restart.

Texts are not kept: a conversation is known by the keys of `meaning.Chain`. The exceptions are short quotes, by which
a sub-agent's prompt or a summary is recognised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from polar_proxy.sessions.hashing import EMPTY, text_of
from polar_proxy.sessions.rules import AGENT_TOOLS
from polar_proxy.types import CallStatus, Edge, Json, Message, StoredLineage

_FORM = 1
"""Of `fingerprint`. Others are not read: their calls are then not found again, and the next one is a root."""

_QUOTE = 160
_LONG_ARGUMENT = 80
_LONG_LINE = 40
_LONG_ANSWER = 400

CallState = Literal["running"] | CallStatus
QuoteKind = Literal["agent_prompt", "argument", "summary", "answer"]


@dataclass(frozen=True, slots=True)
class Quote:
    """Text of an answer that a later conversation may begin with: the `_QUOTE` first characters."""

    kind: QuoteKind
    text: str


@dataclass(frozen=True, slots=True)
class AnswerNode:
    """An answer: keys of the conversation and of its assistant turns with it."""

    end: bytes
    assistant_chain: bytes
    said: bytes
    ids: tuple[str, ...]
    length: int


@dataclass(slots=True)
class CallNode:
    """A call that the history knows. `asked` is the key of its messages."""

    call_id: str
    thread: str
    client_thread: str | None
    """The harness's own id of the thread."""
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    asked: bytes
    assistant_chain: bytes
    ids: bytes
    at: float
    """When it was asked, then when it ended."""
    state: CallState = "running"
    answers: tuple[AnswerNode, ...] = ()
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


def fingerprint_of(known: CallNode) -> Json:
    """What the store keeps so that the call is known again: keys as hex, no text but the quotes worth it."""
    fingerprint: Json = {
        "form": _FORM,
        "asked": known.asked.hex(),
        "ids": known.ids.hex(),
        "answers": [
            {
                "end": answer.end.hex(),
                "assistant_chain": answer.assistant_chain.hex(),
                "said": answer.said.hex(),
                "ids": list(answer.ids),
                "length": answer.length,
            }
            for answer in known.answers
        ],
    }
    if known.assistant_chain != EMPTY:
        fingerprint["assistant_chain"] = known.assistant_chain.hex()
    if known.client_thread is not None:
        fingerprint["thread"] = known.client_thread
    if known.compaction:
        fingerprint["compaction"] = True
    if quotes := [[quote.kind, quote.text] for quote in known.quotes if quote.kind in ("agent_prompt", "summary")]:
        fingerprint["quotes"] = quotes
    return fingerprint


def node_from_store(row: StoredLineage) -> CallNode | None:
    """The call as it was known, or None where the store has no fingerprint of this form."""
    fingerprint = row.fingerprint
    if not fingerprint or fingerprint.get("form") != _FORM:
        return None
    return CallNode(
        call_id=row.call_id,
        thread=row.thread or row.call_id,
        client_thread=fingerprint.get("thread"),
        edge=row.edge,
        parent_call_id=row.parent_call_id,
        rule=row.rule,
        asked=bytes.fromhex(fingerprint["asked"]),
        assistant_chain=bytes.fromhex(fingerprint["assistant_chain"]) if "assistant_chain" in fingerprint else EMPTY,
        ids=bytes.fromhex(fingerprint["ids"]),
        at=row.ended_at,
        state=row.status,
        answers=tuple(
            AnswerNode(
                bytes.fromhex(answer["end"]),
                bytes.fromhex(answer["assistant_chain"]),
                bytes.fromhex(answer["said"]),
                tuple(answer["ids"]),
                answer["length"],
            )
            for answer in fingerprint["answers"]
        ),
        quotes=tuple(Quote(kind, text) for kind, text in fingerprint.get("quotes", ())),
        compaction=bool(fingerprint.get("compaction")),
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
class CallIndex:
    """The calls of a session by everything they can be found by."""

    asked: dict[bytes, list[CallNode]] = field(default_factory=dict)
    ends: dict[bytes, list[tuple[CallNode, AnswerNode]]] = field(default_factory=dict)
    assistant_chains: dict[bytes, list[tuple[CallNode, AnswerNode]]] = field(default_factory=dict)
    said: dict[tuple[bytes, tuple[str, ...]], CallNode] = field(default_factory=dict)
    threads: dict[str, CallNode] = field(default_factory=dict)
    """The newest call of each of the harness's own threads."""
    newest: CallNode | None = None
    """Of those that are neither side calls nor compaction requests."""
    quotable: list[CallNode] = field(default_factory=list)
    """Calls with quotes, the newest last; see `QUOTABLE`."""
    compactions: list[CallNode] = field(default_factory=list)
    by_id: dict[str, CallNode] = field(default_factory=dict)

    QUOTABLE = 32

    def add(self, known: CallNode) -> None:
        self.by_id[known.call_id] = known
        self.asked.setdefault(known.asked, []).append(known)
        if known.edge != "side_call":
            if known.client_thread is not None:
                self.threads[known.client_thread] = known
            if known.compaction:
                self.compactions.append(known)
            else:
                self.newest = known

    def answered(self, known: CallNode) -> None:
        for answer in known.answers:
            self.ends.setdefault(answer.end, []).append((known, answer))
            self.assistant_chains.setdefault(answer.assistant_chain, []).append((known, answer))
            if answer.ids or answer.length >= 200:
                self.said[answer.said, answer.ids] = known
        if known.quotes:
            self.quotable.append(known)
            del self.quotable[: -self.QUOTABLE]
