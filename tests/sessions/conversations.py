"""Short forms of messages, and a driver that plays conversations through a session."""

from __future__ import annotations

import itertools
from typing import Any

import orjson

from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.sessions.hashing import MessageHasher
from polar_proxy.sessions.identity import NO_METADATA, ClientMetadata
from polar_proxy.sessions.lineage import Lineage
from polar_proxy.sessions.state import SessionState
from polar_proxy.store.repositories.calls import StoredLineage
from polar_proxy.types import CallStatus, ChatRequest, Json

_numbers = itertools.count()


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def says(text: str) -> Json:
    return {"role": "assistant", "content": text}


def calls(name: str = "bash", ident: str | None = None, **arguments: Any) -> Json:
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    call = {"id": ident or f"call_{next(_numbers)}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(answer: Json, text: str) -> Json:
    return {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": text}


def tools(*names: str) -> list[Json]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


def request(*messages: Json, **body: Any) -> ChatRequest:
    (parsed,) = OpenAIChat().parse({"model": "m", "messages": list(messages), **body}).requests
    assert isinstance(parsed, ChatRequest)
    return parsed


class SessionDriver:
    """A session with a clock. `ask` places a call, `answer` records its answer, `call` does both."""

    def __init__(self, *off: str) -> None:
        self.state = SessionState("session", {}, MessageHasher(off))
        self.now = 1000.0
        self.stored: list[StoredLineage] = []

    def ask(self, *messages: Json, metadata: ClientMetadata = NO_METADATA, **body: Any) -> Lineage:
        self.now += 0.5
        call_id = f"c{len(self.stored)}_{next(_numbers)}"
        return self.state.place(call_id, request(*messages, **body), metadata, now=self.now)

    def answer(self, lineage: Lineage, *answers: Json, status: CallStatus = "ok") -> str:
        self.now += 0.5
        messages = request(*answers).messages
        fingerprint = self.state.record_answer(lineage, messages, status, now=self.now)
        row = (lineage.edge, lineage.parent_call_id, lineage.rule, lineage.thread, status, self.now)
        self.stored.append(StoredLineage(lineage.call_id, *row, fingerprint=orjson.loads(orjson.dumps(fingerprint))))
        return lineage.call_id

    def call(
        self,
        messages: list[Json],
        answer: Json,
        status: CallStatus = "ok",
        metadata: ClientMetadata = NO_METADATA,
        **body: Any,
    ) -> Lineage:
        lineage = self.ask(*messages, metadata=metadata, **body)
        self.answer(lineage, answer, status=status)
        return lineage

    def restart(self) -> None:
        """Rebuild the session from the store, as after a restart of the gateway."""
        self.state = SessionState("session", {})
        self.state.rebuild(self.stored)


def edge_parent_rule(lineage: Lineage) -> tuple[str, str | None, str | None]:
    return (lineage.edge, lineage.parent_call_id, lineage.rule)
