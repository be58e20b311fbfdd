"""What another gateway is answering: the end of a session waits for it, and knows what was lost with a gateway.

Two real gateways on one database, or a gateway and another process that is killed. On SQLite, and where it is a matter
of locks on a real PostgreSQL server as well, when `full` tests are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import Reply, ScriptedEngine
from polar_proxy.gateway import Gateway, in_flight
from polar_proxy.rollouts import recover
from polar_proxy.sessions.registry import SessionRegistry, SessionState
from polar_proxy.store import Store, open_store
from polar_proxy.store.open_calls import OpenCallRepository
from polar_proxy.types import CallRecord
from tests.factories import new_rollout
from tests.gateway.test_shared_database import ask, gateway, opened
from tests.store.conftest import postgres, url

__all__ = ["postgres", "url"]

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "home" / "polar.db")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways of this process are taken for dead after some seconds."""
    monkeypatch.setattr(in_flight, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(in_flight, "RENEW_SECONDS", 0.5)


@contextlib.asynccontextmanager
async def slow(url: str, wait: float) -> AsyncIterator[tuple[Gateway, Store]]:
    """Another gateway, whose answers begin after so many seconds."""
    settings = GatewaySettings(port=0, require_known_keys=True, shared=True)
    engine = ScriptedEngine(lambda request: Reply("Done.", wait=wait))
    async with open_store(url) as store, engine, Gateway(engine, store, settings) as running:
        yield running, store


@contextlib.asynccontextmanager
async def victim(url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A gateway in another process, and its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.gateway.killable_gateway", url),
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield process, int(await asyncio.wait_for(process.stdout.readline(), 240))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until_open(store: Store, session_id: str, count: int = 1) -> None:
    async with asyncio.timeout(120):
        while len(await store.open_calls.of_session(session_id)) != count:
            await asyncio.sleep(0.02)


async def call_at(port: int, key: str) -> None:
    """A call that nobody answers: its gateway is killed."""
    body = {"model": "m", "messages": HELLO}
    async with httpx.AsyncClient(timeout=300) as http:
        with contextlib.suppress(httpx.TransportError):
            await http.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )


async def test_the_end_waits_for_calls_elsewhere(url: str) -> None:
    async with gateway(url) as (here, store), slow(url, 1.0) as (there, _):
        session_id = await opened(store, "k")
        asking = asyncio.create_task(ask(there, "k", HELLO))
        await until_open(store, session_id)
        assert await store.calls.of_session(session_id) == []
        with pytest.raises(TimeoutError):
            await here.idle(session_id, 0.1)
        await store.sessions.close(session_id)
        assert await here.forget_session(session_id, 60) is None
        assert [call.status for call in await store.calls.of_session(session_id)] == ["ok"]
        assert await store.open_calls.of_session(session_id) == []
        assert (await asking).status_code == 200


async def test_nothing_begins_once_the_session_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed by another gateway right after this one has seen it open: no call, no row, the engine is not asked."""
    async with gateway(url) as (_, store), slow(url, 0.0) as (there, _):
        session_id = await opened(store, "k")
        assert (await ask(there, "k", HELLO)).status_code == 200
        find = SessionRegistry.find

        async def then_closed(self: SessionRegistry, *args: Any, **given: Any) -> SessionState:
            found = await find(self, *args, **given)
            await store.sessions.close(session_id)
            return found

        monkeypatch.setattr(SessionRegistry, "find", then_closed)
        refused = await ask(there, "k", HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "session_closed")
        assert len(await store.calls.of_session(session_id)) == 1
        assert await store.open_calls.of_session(session_id) == []


@pytest.mark.usefixtures("quick")
async def test_a_gateway_that_is_killed(url: str) -> None:
    async with gateway(url) as (here, store), victim(url) as (process, port):
        session_id = await opened(store, "k")
        asking = asyncio.create_task(call_at(port, "k"))
        await until_open(store, session_id)
        await asyncio.sleep(1.5)  # longer than a call is held without being renewed
        with pytest.raises(TimeoutError):
            await here.idle(session_id, 0.0)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await store.sessions.close(session_id)
        lost = await here.forget_session(session_id, 60)
        assert lost is not None
        assert lost.startswith(f"1 call(s) were lost on the gateway {os.uname().nodename}:{process.pid}:")
        assert await store.calls.of_session(session_id) == []
        assert await store.open_calls.of_session(session_id) == []
        await asking


@pytest.mark.usefixtures("quick")
async def test_a_long_call_is_not_taken_for_lost(file: str) -> None:
    async with gateway(file) as (here, store), slow(file, 6.0) as (there, _):
        session_id = await opened(store, "k")
        asking = asyncio.create_task(ask(there, "k", HELLO))
        await until_open(store, session_id)
        await store.sessions.close(session_id)
        assert await here.forget_session(session_id, 60) is None
        assert len(await store.calls.of_session(session_id)) == 1
        await asking


@pytest.mark.usefixtures("quick")
async def test_what_another_gateway_could_not_record(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(file) as (here, store), slow(file, 0.0) as (there, theirs):
        session_id = await opened(store, "k")

        async def refuse(record: CallRecord) -> None:
            raise OSError("no room")

        monkeypatch.setattr(theirs.calls, "commit", refuse)
        monkeypatch.setattr("logging.Logger.exception", lambda *args: None)
        assert (await ask(there, "k", HELLO)).status_code == 200
        await store.sessions.close(session_id)
        lost = await here.forget_session(session_id, 60)
        assert lost is not None
        assert "1 call(s) were lost on the gateway" in lost


async def test_what_comes_too_late_is_in_the_books(url: str) -> None:
    """The end waits for a bounded time; the call is recorded after it, excluded, and its rollout is incomplete."""
    async with gateway(url) as (here, store), slow(url, 2.0) as (there, _):
        session_id = await opened(store, "k")
        rollout_id = await new_rollout(store, session_id)
        async with store.database.writing() as connection:
            await connection.exec_driver_sql(f"UPDATE sessions SET rollout_id = '{rollout_id}'")
        asking = asyncio.create_task(ask(there, "k", HELLO))
        await until_open(store, session_id)
        await store.sessions.close(session_id)
        lost = await here.forget_session(session_id, 0.1)
        assert lost is not None
        assert "1 call(s) were still being answered on the gateway" in lost
        await store.rollouts.update(rollout_id, status="done")
        assert (await asking).status_code == 200
        (call,) = await store.calls.of_session(session_id)
        assert await store.traces.exclusions(session_id) == {call.call_id: "incomplete"}
        row = await store.rollouts.get(rollout_id)
        assert row is not None
        assert (row.status, row.incomplete) == ("done", True)
        assert row.error is not None
        assert "after the rollout's end" in row.error
        assert await store.maintenance.verify() == []


async def test_the_dead_are_swept_and_told(file: str) -> None:
    """At the next start; but not what a rollout that goes on has lost: its end must know."""
    async with open_store(file) as store, victim(file) as (process, port):
        alone, running = await opened(store, "alone"), await opened(store, "running")
        rollout_id = await new_rollout(store, running)
        await store.rollouts.update(rollout_id, status="running")
        async with store.database.writing() as connection:  # a service's, and not this process's own
            await connection.exec_driver_sql("UPDATE rollouts SET owner_pid = NULL, owner_host = NULL")
        asking = [asyncio.create_task(call_at(port, key)) for key in ("alone", "running")]
        for session_id in (alone, running):
            await until_open(store, session_id)
        assert await recover(store) == []  # it lives
        process.send_signal(signal.SIGKILL)
        await process.wait()
        (line,) = await recover(store)
        assert line.startswith(f"1 calls were in flight on the gateway {os.uname().nodename}:{process.pid}:")
        assert await store.open_calls.of_session(alone) == []
        assert len(await store.open_calls.of_session(running)) == 1
        await store.rollouts.update(rollout_id, status="done")
        assert len(await recover(store)) == 1
        assert await store.open_calls.gateways() == set()
        await asyncio.gather(*asking)


async def test_a_gateway_that_is_alone_announces_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: OpenCallRepository, *args: Any) -> bool:
        raise AssertionError("announced")

    monkeypatch.setattr(OpenCallRepository, "announce", never)
    async with gateway(file, shared=False) as (alone, store):
        session_id = await opened(store, "k")
        assert (await ask(alone, "k", HELLO)).status_code == 200
        assert store.open_calls._commits.shared is False
        assert await alone.forget_session(session_id, 1) is None
        assert len(await store.calls.of_session(session_id)) == 1
