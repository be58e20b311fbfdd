"""A large request, or many at once, do not keep the event loop from the other sessions."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import RequestError
from polar_proxy.gateway import Gateway
from polar_proxy.offload import OffloadThread
from polar_proxy.store import Store
from polar_proxy.types import EngineRequest, Json, SampleEvent
from tests.conftest import Serve
from tests.factories import call_record, new_session
from tests.gateway.test_limits import HEAD, send, send_bytes
from tests.loop_watch import slowness, watched

pytestmark = pytest.mark.slow


class FullEngine(ScriptedEngine):
    """Refuses every request, as an engine does whose context is too short."""

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        raise RequestError("This model's maximum context length is 65536 tokens.")
        yield


def tool(number: int) -> Json:
    properties = {f"field_{n}": {"type": "string", "description": "a, b"} for n in range(250)}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": {"properties": properties}}}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


LARGE: dict[str, Json] = {
    "many messages": {"messages": [user("a")] * 20_000},
    "many turns": {"messages": [user("a"), {"role": "assistant", "content": "b"}] * 10_000},
    "a long text": {"messages": [user("word\n" * 3_000_000)]},
    "many parts": {"messages": [user([{"type": "text", "text": "a"}] * 200_000)]},
    "many tools": {"messages": [user("a")], "tools": [tool(n) for n in range(900)]},
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_large_request_does_not_occupy_the_event_loop(serve: Serve, name: str) -> None:
    head = HEAD.format(path="/v1/chat/completions") + "content-length: {}\r\nconnection: close\r\n\r\n"
    body = json.dumps({"model": "m", **LARGE[name]})
    request = (head.format(len(body)) + body).encode()
    async with serve(FullEngine(), limits={"messages": 20_000, "body_values": 1_000_000}) as gateway:
        await send(gateway, head.format(2), "{}")
        before = slowness()
        with watched() as watch:
            status, answer = await send_bytes(gateway, request)
        assert (status, "maximum context" in str(answer)) == (400, True)
        assert watch.worst_work < 0.05 * max(before, slowness())


async def test_requests_of_one_session_take_turns(serve: Serve) -> None:
    """Requests whose bodies have arrived are not all parsed before the loop serves anybody else."""
    body = json.dumps({"model": "m", "messages": [user(f"{n} " * 400) for n in range(400)]}).encode()
    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer k")]
    request_line = {"type": "http", "method": "POST", "raw_path": b"/v1/chat/completions", "query_string": b""}
    scope = {**request_line, "headers": headers}
    statuses: list[int] = []

    async def request(gateway: Gateway, content: bytes) -> None:
        async def receive() -> Json:
            return {"type": "http.request", "body": content}

        async def answer(message: Json) -> None:
            if "status" in message:
                statuses.append(message["status"])

        await gateway.app(scope, receive, answer)

    async with serve(FullEngine()) as gateway:
        await request(gateway, b"{}")
        before = slowness()
        with watched() as watch:
            await asyncio.gather(*(request(gateway, body) for _ in range(30)))
        assert set(statuses) == {400}
        assert watch.worst_work < 0.06 * max(before, slowness())


async def test_a_call_does_not_wait_for_the_rows_of_a_large_one(store: Store) -> None:
    session_id = await new_session(store)
    lane = store._writer._large_lane
    serialize, released = lane.serializer.serialize, threading.Event()

    def slow(records: Any) -> Any:
        released.wait(60)
        return serialize(records)

    lane.serializer.serialize = slow  # type: ignore[method-assign]
    large = asyncio.ensure_future(store.calls.commit(call_record(session_id), large=True))
    try:
        async with asyncio.timeout(30):
            await store.calls.commit(call_record(session_id))
        assert not large.done()
    finally:
        released.set()
    await large
    assert len(await store.calls.of_session(session_id)) == 2


async def test_the_thread_rests_for_as_long_as_it_worked() -> None:
    def work() -> tuple[float, float]:
        began, until = time.monotonic(), time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        return began, time.monotonic()

    thread = OffloadThread("test")
    try:
        first, second = await asyncio.gather(thread.run(True, work), thread.run(True, work))
    finally:
        thread.close()
    assert second[0] - first[1] >= 0.1
    assert await thread.run(False, threading.get_ident) == threading.get_ident()
