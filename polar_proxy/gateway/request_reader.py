"""Reading of model requests: the body as it comes, its JSON, the calls that it refers to, and what it asks for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence

from polar_proxy.config import GatewayLimits
from polar_proxy.dialects.base import Dialect, ParsedRequest
from polar_proxy.errors import RequestError, StoreError
from polar_proxy.gateway import asgi
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.limits import BodyReservation
from polar_proxy.gateway.stored_responses import StoredCalls
from polar_proxy.offload import OffloadThread
from polar_proxy.sessions.state import SessionState
from polar_proxy.types import ChatRequest, Json

_LARGE_BODY, _MANY_MESSAGES = 1 << 20, 500
"""Bytes (with `_BYTES_OF_VALUE`) and messages above which a request is `large`: what takes time that grows with it runs
in a thread, to keep the event loop free."""
_MANY_REFERENCES = 50
"""Number of recorded calls above which a request that refers to them is `large`."""
_TAKES_TURNS = 1 << 16
"""Size in bytes above which a request lets others be served before it is parsed. Smaller requests of its session do
not wait for it."""
_BYTES_OF_VALUE = 64
"""Memory of a parsed JSON value, besides its text."""
_MESSAGE_LISTS = ("messages", "input", "contents", "prompt")
"""The fields of the dialects that hold messages or prompts. A list of numbers is one prompt of token ids."""
_TOOL_LISTS = ("tools", "functions")


class RequestReader:
    def __init__(
        self, limits: GatewayLimits, thread: OffloadThread, stored_calls: StoredCalls, monitor: StoreMonitor
    ) -> None:
        """`thread`: where large requests are parsed."""
        self._limits = limits
        self._thread = thread
        self._stored_calls = stored_calls
        self._monitor = monitor

    async def read(
        self,
        dialect: Dialect,
        receive: asgi.Receive,
        session: SessionState,
        reservation: BodyReservation,
        resumable: Collection[str],
    ) -> tuple[ParsedRequest, bool]:
        """Read and parse the body of a model request. Return also whether the request is large."""
        parts = await asgi.read_body(receive, reservation.take)
        async with _turn(session, reservation.size):
            body, large = await self._read_json(parts, reservation)
            body, large = await self._write_out_references(dialect, body, session, large, resumable)
            return await self._thread.run(large, dialect.parse, body, session.last_parsed(dialect.name)), large

    async def read_count(
        self, dialect: Dialect, receive: asgi.Receive, session: SessionState, reservation: BodyReservation
    ) -> ChatRequest:
        """Read and parse the body of a request for the number of tokens of a prompt."""
        parts = await asgi.read_body(receive, reservation.take)
        async with _turn(session, reservation.size):
            body, large = await self._read_json(parts, reservation)
            body, large = await self._write_out_references(dialect, body, session, large)
        return await self._thread.run(large, dialect.parse_count, body)

    async def _read_json(self, parts: list[bytes], reservation: BodyReservation) -> tuple[Json, bool]:
        """Return the JSON object in a body, and whether the request is large (see `_LARGE_BODY`).

        Raises RequestError for a body with too many JSON values, messages or tools.
        """
        limits = self._limits
        reservation.reading = False
        large = reservation.size > _LARGE_BODY
        raw = await self._thread.run(large, b"".join, parts)
        values = await self._thread.run(large, asgi.count_values, raw, limits.body_values)
        if values > limits.body_values:
            raise RequestError(f"The request body has more than {limits.body_values} JSON values.", status=413)
        reservation.take(values * _BYTES_OF_VALUE)
        large = reservation.size > _LARGE_BODY
        body = await self._thread.run(large, asgi.parse_json_object, raw)
        most_items = dict.fromkeys(_MESSAGE_LISTS, limits.messages) | dict.fromkeys(_TOOL_LISTS, limits.tools)
        for name, most in most_items.items():
            items = body.get(name)
            if isinstance(items, list) and len(items) > most and not isinstance(items[0], int):
                message = f"'{name}' has {len(items)} items; at most {most} are served."
                raise RequestError(message, status=413, param=name)
            large = large or (isinstance(items, list) and len(items) > _MANY_MESSAGES)
        return body, large

    async def _write_out_references(
        self, dialect: Dialect, body: Json, session: SessionState, large: bool, resumable: Collection[str] = ()
    ) -> tuple[Json, bool]:
        """Return a body with its references replaced by the recorded items, and whether the request is then large."""
        call_ids = await self._thread.run(large, dialect.referenced_calls, body)
        if not call_ids:
            return body, large
        try:
            calls = await self._stored_calls.find_referenced(session, dialect, call_ids, resumable)
        except StoreError as error:
            raise self._monitor.refusal() from error
        # A short body may refer to megabytes.
        large = large or len(calls) > _MANY_REFERENCES or any(_are_many(call.messages) for call in calls.values())
        return await self._thread.run(large, dialect.write_out_references, body, calls), large


@contextlib.asynccontextmanager
async def _turn(session: SessionState, size: int) -> AsyncIterator[None]:
    """Wait for the turn to parse a body. The bodies of one session are parsed in different turns of the event loop.

    Other sessions are served before each body of more than `_TAKES_TURNS` bytes.
    """
    lock = session.parsing_large if size > _TAKES_TURNS else session.parsing
    await lock.acquire()
    try:
        if size > _TAKES_TURNS:
            await asyncio.sleep(0)
        yield
    finally:
        asyncio.get_running_loop().call_soon(lock.release)


def _are_many(messages: Sequence[bytes]) -> bool:
    """Return whether a request with these messages is large."""
    return len(messages) > _MANY_MESSAGES or sum(map(len, messages)) > _LARGE_BODY
