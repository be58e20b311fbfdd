"""Read-only SQL on a database, with functions and views that unpack texts and tokens (SQLite only).

| function | returns |
|---|---|
| `messages(call_id)` | the request's messages in OpenAI's form, a JSON array |
| `answer(call_id, choice)` | an answer in OpenAI's form, a JSON object |
| `prompt_ids(call_id)` | the ids of the prompt, a JSON array |
| `token_ids(call_id, choice)`, `logprobs(call_id, choice)` | ids and log-probabilities of an answer, JSON arrays |

`v_messages`, `v_answers` and `v_tokens` have one row per message, answer and sampled token. Packed cells need their
context (the messages or tokens before them), so the functions take the id of a call, not a cell.

A PostgreSQL server cannot run these functions. There, SQL sees the tables and the stored views, and only
`polar_proxy.read` unpacks texts and tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from cachetools import LRUCache
from sqlalchemy import text

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.export.conversations import ConversationReader
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, Choice, Json

_READING = re.compile(r"\s*(select|with|values|explain)\b", re.IGNORECASE)
_UNPACKING = re.compile(r"function (messages|answer|prompt_ids|token_ids|logprobs)\(|v_(messages|answers|tokens)")
_COMMENTS = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_STEPS = 20_000
"""Number of steps of SQLite's virtual machine between two checks of the time limit. The steps take some
milliseconds."""
_VIEWS = {
    "v_messages": """
        SELECT c.call_id, c.session_id, m.key AS position, m.value ->> 'role' AS role,
            CASE json_type(m.value, '$.content') WHEN 'text' THEN m.value ->> 'content'
                ELSE m.value -> 'content' END AS text,
            m.value ->> 'reasoning_content' AS reasoning, m.value -> 'tool_calls' AS tool_calls,
            m.value ->> 'tool_call_id' AS tool_call_id,
            m.key >= CASE c.edge WHEN 'continues' THEN message_count(c.parent_call_id) ELSE 0 END AS is_new
        FROM calls c, json_each(messages(c.call_id)) m""",
    "v_answers": """
        SELECT x.call_id, c.session_id, x.choice_index, x.finish_reason, a.value ->> 'content' AS text,
            a.value ->> 'reasoning_content' AS reasoning, a.value -> 'tool_calls' AS tool_calls, x.tokens
        FROM completions x JOIN calls c ON c.call_id = x.call_id,
            json_each('[' || answer(x.call_id, x.choice_index) || ']') a""",
    "v_tokens": """
        SELECT x.call_id, c.session_id, x.choice_index, t.key AS position, t.value AS token_id, p.value AS logprob
        FROM completions x JOIN calls c ON c.call_id = x.call_id,
            json_each(token_ids(x.call_id, x.choice_index)) t,
            json_each(logprobs(x.call_id, x.choice_index)) p WHERE p.key = t.key""",
}


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The rows of a query. `more`: there are more rows than were asked for."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    more: bool


async def run_query(store: Store, sql: str, *, limit: int, seconds: float) -> QueryResult:
    """Run one read-only statement and return at most `limit` rows. Raises UsageError for writes, errors and
    time-outs."""
    if _READING.match(_COMMENTS.sub(" ", sql)) is None:
        raise UsageError("`polar sql` only reads: the statement must begin with SELECT, WITH, VALUES or EXPLAIN.")
    if store.database.path is None:
        return await _run_on_postgres(store, sql, limit, seconds)
    calls = _CallReader(store, asyncio.get_running_loop())
    return await asyncio.to_thread(_run_on_sqlite, store.database.path, calls, sql, limit, seconds)


def _run_on_sqlite(path: Path, calls: _CallReader, sql: str, limit: int, seconds: float) -> QueryResult:
    deadline = time.monotonic() + seconds
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        for name, count, function in calls.functions():
            connection.create_function(name, count, function, deterministic=True)
        for name, query in _VIEWS.items():
            connection.execute(f"CREATE TEMP VIEW {name} AS {query}")
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        try:
            cursor = connection.execute(sql)
            rows = cursor.fetchmany(limit + 1)
        except sqlite3.Error as error:
            raise UsageError(_describe(error, calls.problem, seconds)) from error
        names = [one[0] for one in cursor.description or ()]
    return QueryResult(names, rows[:limit], len(rows) > limit)


def _describe(error: sqlite3.Error, problem: str | None, seconds: float) -> str:
    if "interrupted" in str(error):
        return f"The query took longer than {seconds:g} s and was stopped: select fewer rows, or raise --timeout."
    if "not authorized" in str(error) or "readonly" in str(error):
        return f"`polar sql` only reads: {error}."
    if problem is not None:
        return f"A value cannot be unpacked: {problem}."
    return f"The database refused the query: {error}."


async def _run_on_postgres(store: Store, sql: str, limit: int, seconds: float) -> QueryResult:
    try:
        async with store.database.reading() as connection:
            await connection.execute(text("SET TRANSACTION READ ONLY"))
            await connection.execute(text(f"SET LOCAL statement_timeout = {round(seconds * 1000)}"))
            result = await connection.exec_driver_sql(sql)
            rows = [tuple(row) for row in result.fetchmany(limit + 1)]
            return QueryResult(list(result.keys()), rows[:limit], len(rows) > limit)
    except StoreError as error:
        hint = ""
        if _UNPACKING.search(str(error)):
            hint = " A PostgreSQL server cannot unpack texts and tokens: use `polar_proxy.read`, or an SQLite archive."
        raise UsageError(f"{error}.{hint}") from error


class _CallReader:
    """The SQL functions, such as `messages`. They run in the query's thread, and read calls in the event loop of the
    store."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._loop = store, loop
        self._sessions: LRUCache[str, dict[str, CallRecord]] = LRUCache(4)
        self._session_of: LRUCache[str, str] = LRUCache(100_000)
        self._readers: LRUCache[str, ConversationReader] = LRUCache(4)
        self._counts: LRUCache[str, int] = LRUCache(100_000)
        self.problem: str | None = None
        """Why a function failed. SQLite reports that a function failed, but not its error."""

    def functions(self) -> list[tuple[str, int, Callable[..., Any]]]:
        """Return (name, number of arguments, function) of each function."""
        own: dict[str, tuple[int, Callable[..., Any]]] = {
            "messages": (1, self._messages),
            "message_count": (1, self._message_count),
            "answer": (2, lambda call_id, index: self._of_choice(call_id, index, _answer_json)),
            "prompt_ids": (1, self._prompt_ids),
            "token_ids": (2, lambda call_id, index: self._of_choice(call_id, index, _ids_json)),
            "logprobs": (2, lambda call_id, index: self._of_choice(call_id, index, _logprobs_json)),
        }
        return [(name, count, self._reporting(function)) for name, (count, function) in own.items()]

    def _reporting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
                raise

        return run

    def _call(self, call_id: str) -> CallRecord | None:
        """Return a call. Its whole session is read and kept, because the next row is usually from the same session."""
        session_id = self._session_of.get(call_id)
        if session_id is None or session_id not in self._sessions:
            calls = asyncio.run_coroutine_threadsafe(self._read_session(call_id), self._loop).result()
            if call_id not in calls:
                return None
            session_id = calls[call_id].session_id
            self._sessions[session_id] = calls
            for name in calls:
                self._session_of[name] = session_id
        return self._sessions[session_id].get(call_id)

    async def _read_session(self, call_id: str) -> dict[str, CallRecord]:
        query = text("SELECT session_id FROM calls WHERE call_id = :call_id")
        session_id = await self._store.database.read(lambda connection: connection.scalar(query, {"call_id": call_id}))
        calls = [] if session_id is None else await self._store.calls.of_session(session_id)
        return {call.call_id: call for call in calls}

    def _conversation(self, call: CallRecord) -> Json:
        reader = self._readers.setdefault(call.session_id, ConversationReader())
        return reader.read(call)

    def _messages(self, call_id: str) -> str | None:
        call = self._call(call_id)
        if call is None:
            return None
        found = self._conversation(call)["messages"]
        self._counts[call_id] = len(found)
        return orjson.dumps(found).decode()

    def _message_count(self, call_id: str | None) -> int:
        if call_id is None:
            return 0
        if call_id not in self._counts and (call := self._call(call_id)) is not None:
            self._counts[call_id] = len(self._conversation(call)["messages"])
        return self._counts.get(call_id, 0)

    def _prompt_ids(self, call_id: str) -> str | None:
        call = self._call(call_id)
        return None if call is None or call.prompt_ids is None else json.dumps(call.prompt_ids.tolist())

    def _of_choice(self, call_id: str, index: int, show: Callable[[Choice], str]) -> str | None:
        call = self._call(call_id)
        return next((show(one) for one in (call.choices if call else ()) if one.index == index), None)


def _answer_json(choice: Choice) -> str:
    return orjson.dumps(choice.message.to_openai()).decode()


def _ids_json(choice: Choice) -> str:
    return json.dumps(choice.token_ids.tolist())


def _logprobs_json(choice: Choice) -> str:
    return json.dumps([None if math.isnan(value) else value for value in choice.logprobs.tolist()])
