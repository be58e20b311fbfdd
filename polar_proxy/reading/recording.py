"""`polar_proxy.read(db)`: rollouts, sessions, calls and traces of a database as columns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from sqlalchemy import Select, column, literal_column, select, text

from polar_proxy.config import Settings
from polar_proxy.export.conversations import conversation
from polar_proxy.reading.frame import Columns, RecordFrame
from polar_proxy.store import Store, default_url, open_store, schema
from polar_proxy.store.filters import select_rollouts
from polar_proxy.types import CallRecord, Json

T = TypeVar("T")

_FLAGS = frozenset({"masked", "incomplete", "stream", "ambiguous"})
"""Columns of the views that SQLite returns as 0 or 1. (`incomplete` of a session is a text.)"""
_SESSION_COLUMNS = (
    *("session_id", "label", "origin", "rollout_id", "created_at", "closed_at", "incomplete", "calls"),
    *("failed_calls", "prompt_tokens", "completion_tokens", "last_call_at", "reward"),
)


class Recording:
    """A database to read. `where` selects rollouts as `polar export --where` does: `reward>=1, harness=codex`.

    If `where` is given, sessions, calls and traces are only those of the selected rollouts.
    """

    def __init__(self, db: str | None = None) -> None:
        """`db`: a file or a URL. Default: the database of the settings."""
        settings = Settings()
        self._url = db or settings.db or default_url(settings.home)

    def rollouts(self, where: str | None = None) -> RecordFrame:
        """Return the rows of the SQL view `v_rollouts`, oldest first."""
        return self._frame(lambda store: _view(store, "v_rollouts", "rollout_id", where))

    def sessions(self, where: str | None = None) -> RecordFrame:
        """Return the sessions, oldest first."""
        query = select(*(schema.sessions.c[name] for name in _SESSION_COLUMNS)).order_by(schema.sessions.c.session_id)
        if where is not None:
            query = query.where(schema.sessions.c.rollout_id.in_(select_rollouts(where)))
        return self._frame(lambda store: _columns(store, query, flags=frozenset()))

    def calls(self, where: str | None = None, *, messages: bool = False, tokens: bool = False) -> RecordFrame:
        """Return the rows of the SQL view `v_calls`, oldest first.

        `messages` adds messages, tools and answers as JSON in OpenAI's form. `tokens` adds the ids of the prompt, and
        ids and log-probabilities of the first answer.
        """

        async def load(store: Store) -> Columns:
            found = await _view(store, "v_calls", "call_id", where)
            if messages or tokens:
                records = await _records(store, found["session_id"], text=messages)
                found |= _call_columns([records.get(name) for name in found["call_id"]], messages, tokens)
            return found

        return self._frame(load)

    def traces(self, where: str | None = None, *, tokens: bool = False) -> RecordFrame:
        """Return the rows of the SQL view `v_traces`, oldest first.

        `tokens` adds ids, loss mask and log-probabilities.
        """

        async def load(store: Store) -> Columns:
            found = await _view(store, "v_traces", "trace_id", where)
            if tokens:
                traces = {
                    trace.trace_id: trace
                    for session_id, builder in dict.fromkeys(zip(found["session_id"], found["builder"], strict=True))
                    for trace in await store.traces.find(session_id=session_id, builder=builder)
                }
                if not traces.keys() >= set(found["trace_id"]):  # traces were rebuilt between the two reads
                    return await load(store)
                own = [traces[name] for name in found["trace_id"]]
                found["token_ids"] = [trace.token_ids.tolist() for trace in own]
                found["loss_mask"] = [trace.loss_mask.astype(int).tolist() for trace in own]
                found["logprobs"] = [trace.logprobs.tolist() for trace in own]
            return found

        return self._frame(load)

    def _frame(self, load: Callable[[Store], Awaitable[Columns]]) -> RecordFrame:
        return RecordFrame(lambda: self._run(load))

    def _run(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Run `work` on the opened store, in a new thread, because a notebook has a running event loop."""

        async def main() -> T:
            async with open_store(self._url, create=False) as store:
                return await work(store)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, main()).result()


async def _view(store: Store, view: str, key: str, where: str | None) -> Columns:
    query: Select[Any] = select(literal_column("*")).select_from(text(view)).order_by(column(key))
    if where is not None:
        query = query.where(column("rollout_id").in_(select_rollouts(where)))
    return await _columns(store, query)


async def _columns(store: Store, query: Select[Any], flags: frozenset[str] = _FLAGS) -> Columns:
    async with store.database.reading() as connection:
        result = await connection.execute(query)
        names = list(result.keys())
        rows = result.all()
    values: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else ((),) * len(names)
    return {
        name: [None if one is None else bool(one) for one in own] if name in flags else list(own)
        for name, own in zip(names, values, strict=True)
    }


async def _records(store: Store, session_ids: Sequence[str], *, text: bool) -> dict[str, CallRecord]:
    found: dict[str, CallRecord] = {}
    for session_id in dict.fromkeys(session_ids):
        found |= {call.call_id: call for call in await store.calls.of_session(session_id, text=text)}
    return found


def _call_columns(calls: Sequence[CallRecord | None], messages: bool, tokens: bool) -> Columns:
    columns: Columns = {}
    if messages:
        read = [None if call is None else conversation(call) for call in calls]
        columns["message_list"] = [None if one is None else _json(one["messages"]) for one in read]
        columns["tools"] = [None if one is None or one["tools"] is None else _json(one["tools"]) for one in read]
        columns["answers"] = [None if call is None else _json(_answers(call)) for call in calls]
    if tokens:
        ids = [None if call is None or call.prompt_ids is None else call.prompt_ids.tolist() for call in calls]
        first = [call.choices[0] if call is not None and call.choices else None for call in calls]
        columns["prompt_ids"] = ids
        columns["token_ids"] = [None if one is None else one.token_ids.tolist() for one in first]
        columns["logprobs"] = [None if one is None else one.logprobs.tolist() for one in first]
    return columns


def _answers(call: CallRecord) -> list[Json]:
    return [choice.message.to_openai() for choice in call.choices]


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
