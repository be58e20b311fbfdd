"""Calls in flight on other gateways: the end of a session waits for them and reports those that were lost.

Two real gateways on one database, or a gateway and another process that is killed. They run on SQLite and, where locks
matter, in `full` runs on a real PostgreSQL server too.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.errors import StoreError
from polar_proxy.gateway import in_flight
from polar_proxy.rollouts import recover
from polar_proxy.sessions.registry import SessionRegistry
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import open_store
from polar_proxy.store.repositories.calls import OpenCallRepository
from polar_proxy.types import CallRecord
from tests.factories import new_rollout
from tests.gateway.agents import new_session
from tests.gateway.shared_gateways import (
    HELLO,
    ask,
    ask_in_vain,
    run_gateway,
    run_killable_gateway,
    run_slow_gateway,
    until_open,
)
from tests.store.conftest import postgres, postgres_template, url

pytestmark = pytest.mark.slow

__all__ = ["postgres", "postgres_template", "url"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "home" / "polar.db")


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways count as dead after two seconds."""
    monkeypatch.setattr(in_flight, "LEASE_SECONDS", 2.0)
    monkeypatch.setattr(in_flight, "RENEW_SECONDS", 0.5)


async def test_the_end_of_a_session_waits_for_calls_on_other_gateways(url: str) -> None:
    async with run_gateway(url) as (here, store), run_slow_gateway(url, 1.0) as (there, _):
        session_id = await new_session(store, "k")
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


async def test_no_call_begins_after_the_session_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another gateway closes the session just after this one found it open: no call, no row, no engine request."""
    async with run_gateway(url) as (_, store), run_slow_gateway(url, 0.0) as (there, _):
        session_id = await new_session(store, "k")
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


@pytest.mark.usefixtures("short_leases")
async def test_reports_calls_lost_with_a_killed_gateway(url: str) -> None:
    async with run_gateway(url) as (here, store), run_killable_gateway(url) as (process, port):
        session_id = await new_session(store, "k")
        asking = asyncio.create_task(ask_in_vain(port, "k"))
        await until_open(store, session_id)
        await asyncio.sleep(1.5)  # longer than the lease of a call that is not renewed
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


@pytest.mark.usefixtures("short_leases")
async def test_a_long_call_does_not_count_as_lost(file: str) -> None:
    async with run_gateway(file) as (here, store), run_slow_gateway(file, 3.5) as (there, _):
        session_id = await new_session(store, "k")
        asking = asyncio.create_task(ask(there, "k", HELLO))
        await until_open(store, session_id)
        await store.sessions.close(session_id)
        assert await here.forget_session(session_id, 60) is None
        assert len(await store.calls.of_session(session_id)) == 1
        await asking


@pytest.mark.usefixtures("short_leases")
async def test_reports_a_call_that_another_gateway_could_not_record(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_gateway(file) as (here, store), run_slow_gateway(file, 0.0) as (there, theirs):
        session_id = await new_session(store, "k")

        async def refuse(record: CallRecord, **options: bool) -> None:
            raise StoreError("no room")

        monkeypatch.setattr(theirs.calls, "commit", refuse)
        assert (await ask(there, "k", HELLO)).status_code == 200
        await store.sessions.close(session_id)
        lost = await here.forget_session(session_id, 60)
        assert lost is not None
        assert "1 call(s) were lost on the gateway" in lost


async def test_a_call_recorded_after_the_rollout_is_excluded(url: str) -> None:
    """The end waits for a bounded time. A later call is refused on whatever gateway it is, and recorded but excluded,
    and its rollout is incomplete."""
    async with run_gateway(url) as (here, store), run_slow_gateway(url, 2.0) as (there, _):
        session_id = await new_session(store, "k")
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
        late = await asking
        assert (late.status_code, late.json()["error"]["code"]) == (409, "rollout_ended")
        (call,) = await store.calls.of_session(session_id)
        assert (call.status, call.http_status) == ("client_gone", 409)
        assert call.choices[0].token_ids.size
        assert await store.traces.exclusions(session_id) == {call.call_id: "incomplete"}
        row = await store.rollouts.get(rollout_id)
        assert row is not None
        assert (row.status, row.incomplete) == ("done", True)
        assert row.error is not None
        assert "after the end of the rollout" in row.error
        assert await store.maintenance.verify() == []


async def test_the_next_start_reports_calls_of_dead_gateways(file: str) -> None:
    """Except for calls of a rollout that still runs, because its end must report them."""
    async with open_store(file) as store, run_killable_gateway(file) as (process, port):
        alone, running = await new_session(store, "alone"), await new_session(store, "running")
        rollout_id = await new_rollout(store, running)
        await store.rollouts.update(rollout_id, status="running")
        async with store.database.writing() as connection:  # a rollout of a server's job, not of this process
            await connection.exec_driver_sql("UPDATE rollouts SET owner_pid = NULL, owner_host = NULL")
        asking = [asyncio.create_task(ask_in_vain(port, key)) for key in ("alone", "running")]
        for session_id in (alone, running):
            await until_open(store, session_id)
        assert await recover(store) == []  # this gateway is alive
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


async def test_a_single_gateway_announces_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: OpenCallRepository, *args: Any, **options: Any) -> str:
        raise AssertionError("announced")

    monkeypatch.setattr(OpenCallRepository, "announce", never)
    async with run_gateway(file, shared=False) as (alone, store):
        session_id = await new_session(store, "k")
        assert (await ask(alone, "k", HELLO)).status_code == 200
        assert store.open_calls._writer.shared is False
        assert await alone.forget_session(session_id, 1) is None
        assert len(await store.calls.of_session(session_id)) == 1
