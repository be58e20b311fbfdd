"""The index of a session's calls. After a restart it is rebuilt from the fingerprints that are stored with the calls.

A conversation is identified by its hash keys (see `hashing.HashChain`). The only texts that are kept are those of the
newest answers, and short quotes, by which a sub-agent's prompt or a summary is recognised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from polar_proxy.sessions.hashing import AnswerNode, AssistantTurn, text_of
from polar_proxy.sessions.rules import AGENT_TOOLS
from polar_proxy.store.repositories.calls import StoredLineage
from polar_proxy.types import ANSWERED, FAILED, CallStatus, Edge, Json, Message

_FINGERPRINT_FORM = 2
"""Version of the fingerprint. Stored fingerprints of another version are ignored: their calls are not found again, so
the session's next call is a root."""

_QUOTE = 160
"""Maximum number of characters of a `Quote`."""
_MIN_AGENT_PROMPT, _MIN_ARGUMENT, _MIN_ANSWER, _MIN_LINE = 12, 80, 400, 40
"""Minimum length in characters of texts that identify a conversation: the prompt of a sub-agent, any other argument
of a tool call, an answer, and a line of an answer."""
_MIN_TURN = 200
"""An assistant turn without tool calls identifies its conversation if it has at least this many characters."""
_QUOTABLE = 32
"""Maximum number of calls in `CallIndex.quotable`. Polar looks for their quotes in new conversations."""

CallState = Literal["running"] | CallStatus
QuoteKind = Literal["agent_prompt", "argument", "summary", "answer"]


@dataclass(frozen=True, slots=True)
class Quote:
    """The beginning of a text in an answer. A later conversation may begin with it."""

    kind: QuoteKind
    text: str


@dataclass(slots=True)
class CallNode:
    """A call, as the index of a session's calls keeps it."""

    call_id: str
    thread: str
    client_thread: str | None
    """The harness's own id for the thread."""
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    request_key: bytes
    """Key of the request's messages."""
    ids_chain: bytes
    """Key of the ids of the tool calls in the request."""
    spelling: bytes
    """Key of the request's assistant turns, including their white space and reasoning."""
    at: float
    """Time of the call's start or, once it has ended, of its end."""
    state: CallState = "running"
    answers: tuple[AnswerNode, ...] = ()
    quotes: tuple[Quote, ...] = ()
    compaction: bool = False
    """True if the call asks for a summary of its conversation."""
    continued: int = 0
    """Number of calls that continue, compact or rewind this one."""
    retried: bool = False
    text: str = ""
    """The answer's text. Only the newest calls keep it (`_RECENT_TEXTS` in `state.py`); in others it is empty."""

    @property
    def failed(self) -> bool:
        return self.state in FAILED


@dataclass(slots=True)
class CallIndex:
    """The calls of a session, under each key by which they are looked up."""

    by_id: dict[str, CallNode] = field(default_factory=dict)
    by_request: dict[bytes, list[CallNode]] = field(default_factory=dict)
    """Calls by the key of their request's messages."""
    by_conversation: dict[bytes, list[tuple[CallNode, AnswerNode]]] = field(default_factory=dict)
    """Answers by a hash of all messages of the conversation up to and including the answer."""
    assistant_chains: dict[bytes, list[tuple[CallNode, AnswerNode]]] = field(default_factory=dict)
    """Hash -> answers. The hash is that of the assistant turns up to and including the answer, without other
    messages."""
    exchanges: dict[bytes | tuple[bytes, tuple[str, ...]], list[CallNode]] = field(default_factory=dict)
    """Calls by the digest of two messages: the answer, and the message before it. A call whose answer is long or has
    tool calls has a second key, which needs no message before it: (digest of the answer, ids of its tool calls)."""
    threads: dict[str, CallNode] = field(default_factory=dict)
    """The newest call of each of the harness's own threads."""
    newest: CallNode | None = None
    """The newest call that is neither a side call nor a compaction request."""
    quotable: list[CallNode] = field(default_factory=list)
    """The newest calls that have `quotes`, newest last."""
    compactions: list[CallNode] = field(default_factory=list)

    def parent_of(self, node: CallNode) -> CallNode | None:
        return self.by_id.get(node.parent_call_id or "")

    def add(self, node: CallNode) -> None:
        """Index a call by its request, and count it as a child of its parent."""
        self.by_id[node.call_id] = node
        self.by_request.setdefault(node.request_key, []).append(node)
        if node.edge != "side_call":
            if node.client_thread is not None:
                self.threads[node.client_thread] = node
            if node.compaction:
                self.compactions.append(node)
            else:
                self.newest = node
        parent = self.parent_of(node)
        if parent is None:
            return
        if node.edge == "retries":
            parent.retried = True
        elif node.edge in ("continues", "compacts", "rewinds"):
            parent.continued += 1

    def add_answers(self, node: CallNode) -> None:
        for answer in node.answers:
            self.by_conversation.setdefault(answer.conversation_key, []).append((node, answer))
            turn = answer.turn
            self.assistant_chains.setdefault(turn.assistant_chain, []).append((node, answer))
            self.exchanges.setdefault(turn.exchange, []).append(node)
            if turn.ids or turn.length >= _MIN_TURN:
                self.exchanges.setdefault((turn.digest, turn.ids), []).append(node)
        if node.quotes:
            self.quotable.append(node)
            del self.quotable[:-_QUOTABLE]

    def repeats(self, node: CallNode) -> int:
        """Return how often the agent has made this answered call; 1 without repetitions.

        This is the larger of two numbers: the number of answered calls with the same request, and the number of calls
        in a row with the same answer. The row ends with this call; failed calls do not interrupt it.
        """
        same_request = sum(other.state in ANSWERED for other in self.by_request[node.request_key])
        same_answer, here = 1, node
        while (parent := self.parent_of(here)) is not None:
            if not parent.failed:
                if _answer_digest(parent) != _answer_digest(node):
                    break
                same_answer += 1
            here = parent
        return max(same_request, same_answer)


def _answer_digest(node: CallNode) -> bytes | None:
    return node.answers[0].turn.digest if node.answers else None


def fingerprint_of(node: CallNode) -> Json:
    """Return a call's fingerprint as JSON: its keys as hex, and short quotes of its texts.

    The fingerprint is stored with the call. After a restart, the index is rebuilt from the fingerprints.
    """
    fingerprint: Json = {
        "form": _FINGERPRINT_FORM,
        "asked": node.request_key.hex(),
        "ids": node.ids_chain.hex(),
        "spelling": node.spelling.hex(),
        "answers": [{"end": answer.conversation_key.hex(), **_turn_to_json(answer.turn)} for answer in node.answers],
    }
    if node.client_thread is not None:
        fingerprint["thread"] = node.client_thread
    if node.compaction:
        fingerprint["compaction"] = True
    if quotes := [[quote.kind, quote.text] for quote in node.quotes if quote.kind in ("agent_prompt", "summary")]:
        fingerprint["quotes"] = quotes
    return fingerprint


def node_from_store(row: StoredLineage) -> CallNode | None:
    """Return the index entry of a stored call, from its fingerprint; None if the fingerprint is missing or of another
    version."""
    fingerprint = row.fingerprint
    if not fingerprint or fingerprint.get("form") != _FINGERPRINT_FORM:
        return None
    return CallNode(
        call_id=row.call_id,
        thread=row.thread or row.call_id,
        client_thread=fingerprint.get("thread"),
        edge=row.edge,
        parent_call_id=row.parent_call_id,
        rule=row.rule,
        request_key=bytes.fromhex(fingerprint["asked"]),
        ids_chain=bytes.fromhex(fingerprint["ids"]),
        spelling=bytes.fromhex(fingerprint["spelling"]),
        at=row.ended_at,
        state=row.status,
        answers=tuple(
            AnswerNode(bytes.fromhex(answer["end"]), _turn_from_json(answer)) for answer in fingerprint["answers"]
        ),
        quotes=tuple(Quote(kind, text) for kind, text in fingerprint.get("quotes", ())),
        compaction=bool(fingerprint.get("compaction")),
    )


_TURN_KEYS = ("assistant_chain", "ids_chain", "spelling", "digest", "exchange")


def _turn_to_json(turn: AssistantTurn) -> Json:
    keys = {name: getattr(turn, name).hex() for name in _TURN_KEYS}
    return {"messages": turn.end, **keys, "ids": list(turn.ids), "length": turn.length}


def _turn_from_json(turn: Json) -> AssistantTurn:
    keys = {name: bytes.fromhex(turn[name]) for name in _TURN_KEYS}
    return AssistantTurn(end=turn["messages"], **keys, ids=tuple(turn["ids"]), length=turn["length"])


def quotes_of(answers: Iterable[Message], compaction: bool) -> tuple[Quote, ...]:
    """Return the texts that later conversations may quote. `compaction`: the answers are summaries."""
    quotes: list[Quote] = []
    for answer in answers:
        for call in answer.tool_calls:
            starts_agents = call.name.lower() in AGENT_TOOLS
            for value in _strings(call.arguments):
                text = value.strip()
                if starts_agents and len(text) >= _MIN_AGENT_PROMPT and " " in text:
                    quotes.append(Quote("agent_prompt", text[:_QUOTE]))
                elif len(text) >= _MIN_ARGUMENT and " " in text:
                    quotes.append(Quote("argument", text[:_QUOTE]))
        text = text_of(answer)
        if not answer.tool_calls and (compaction or len(text) >= _MIN_ANSWER):
            longest = sorted((line.strip() for line in text.splitlines()), key=len, reverse=True)[:3]
            kind: QuoteKind = "summary" if compaction else "answer"
            quotes += [Quote(kind, line[:_QUOTE]) for line in longest if len(line) >= _MIN_LINE]
    return tuple(quotes)


def _strings(arguments: str) -> Sequence[str]:
    """Return the values of a tool call's arguments that are strings. Strings inside lists and objects are left out."""
    try:
        value: Any = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return ()
    return [item for item in value.values() if isinstance(item, str)] if isinstance(value, dict) else ()
