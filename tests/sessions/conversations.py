"""Conversations for the tests of history: messages in short, and a session that plays them."""

from __future__ import annotations

import itertools
from typing import Any

import orjson

from polar_proxy.dialects import OpenAIChat
from polar_proxy.sessions import NO_METADATA, ClientMetadata, Lineage, SessionHistory
from polar_proxy.types import CallStatus, ChatRequest, Json, StoredLineage

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
    """A session's history with a clock; `ask` places, `answer` ends, `call` does both."""

    def __init__(self, *off: str) -> None:
        self.history = SessionHistory(off)
        self.now = 1000.0
        self.stored: list[StoredLineage] = []

    def ask(self, *messages: Json, hints: ClientMetadata = NO_METADATA, **body: Any) -> Lineage:
        self.now += 0.5
        call_id = f"c{len(self.stored)}_{next(_numbers)}"
        return self.history.place(call_id, request(*messages, **body), hints, now=self.now)

    def answer(self, place: Lineage, *answers: Json, status: CallStatus = "ok") -> str:
        self.now += 0.5
        fingerprint = self.history.ended(place, answers, status, now=self.now)
        row = (place.edge, place.parent_call_id, place.rule, place.thread, status, self.now)
        self.stored.append(StoredLineage(place.call_id, *row, fingerprint=orjson.loads(orjson.dumps(fingerprint))))
        return place.call_id

    def call(
        self,
        messages: list[Json],
        answer: Json,
        status: CallStatus = "ok",
        hints: ClientMetadata = NO_METADATA,
        **body: Any,
    ) -> Lineage:
        place = self.ask(*messages, hints=hints, **body)
        self.answer(place, answer, status=status)
        return place

    def restart(self) -> None:
        """As after the gateway was stopped: all that is known comes from the store."""
        self.history = SessionHistory()
        self.history.rebuild(self.stored)


def edge_parent_rule(place: Lineage) -> tuple[str, str | None, str | None]:
    return (place.edge, place.parent_call_id, place.rule)
