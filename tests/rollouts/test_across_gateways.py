"""A rollout with calls on two gateways of one database ends with the calls of both, and both spend its budget.

Real parts: store, gateways, service, process sandbox, the small agent, hidden tests. Scripted: the engines. The second
gateway is in this process, or in another one that is killed. Budgets are tested on PostgreSQL too, in `full` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.config import GatewaySettings, Settings
from polar_proxy.gateway import Gateway, in_flight
from polar_proxy.rollouts import RolloutService, attempt, local_gateway, stopping
from polar_proxy.store import RolloutRow, Store, open_store
from tests.fakes.player import PlayerEngine
from tests.gateway.shared_gateways import (
    HELLO,
    ask,
    ask_in_vain,
    run_gateway,
    run_killable_gateway,
    run_slow_gateway,
    until_open,
)
from tests.rollouts.quick_limits import QUICK_LIMITS
from tests.rollouts.test_service import AGENTS, TASKS, count_calls, job
from tests.store.conftest import postgres, postgres_template, url

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("polar_home", "own_sandbox_register")]

__all__ = ["postgres", "postgres_template", "url"]

KEY = "sk-polar-known-to-the-test"


@contextlib.asynccontextmanager
async def waiting_agent(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[tuple[RolloutService, str]]:
    """Yield a service on one of several gateways, and the session of its rollout, whose agent waits.

    `options`: of the rollout.
    """
    monkeypatch.setattr(attempt, "new_key", lambda: KEY)
    settings = Settings(gateway=GatewaySettings(shared=True))
    async with (
        PlayerEngine() as engine,
        local_gateway(settings, engine, store) as gateway,
        RolloutService(store, gateway, engine, tmp_path / "harnesses", limits=QUICK_LIMITS, code=AGENTS) as service,
    ):
        await service.submit(TASKS, job("HeldAgent", **options))
        async with asyncio.timeout(240):
            while not (rows := await store.rollouts.find()) or not rows[0].calls:
                await asyncio.sleep(0.05)
        assert rows[0].session_id is not None
        yield service, rows[0].session_id


async def let_agent_finish(store: Store) -> RolloutRow:
    """Let the agent continue, and return the rollout when it has ended."""
    home = Path(os.environ["POLAR_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    (home / "go").touch()
    return await until_final(store)


async def until_final(store: Store) -> RolloutRow:
    async with asyncio.timeout(240):
        while True:
            (row,) = await store.rollouts.find()
            if row.final:
                return row
            await asyncio.sleep(0.05)


async def test_traces_a_call_in_flight_on_another_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "polar.db")
    async with (
        open_store(url, artifacts=tmp_path / "artifacts") as store,
        run_slow_gateway(url, 8.0) as (there, _),
        waiting_agent(store, tmp_path, monkeypatch) as (_, session_id),
    ):
        before = len(await store.calls.of_session(session_id))
        asking = asyncio.create_task(ask(there, KEY, HELLO))
        await until_open(store, session_id)
        row = await let_agent_finish(store)
        answer = await asking
        assert answer.status_code == 200
        late = answer.headers["x-polar-call-id"]
        traces = await store.traces.find(session_id=session_id)
    assert row.calls > before
    assert (row.status, row.reward, row.incomplete, row.error) == ("done", 1.0, False, None)
    assert late in {call_id for trace in traces for call_id in trace.call_ids}


async def test_a_killed_gateway_makes_the_rollout_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's result and reward are kept, and its calls are accounted for."""
    monkeypatch.setattr(in_flight, "RENEW_SECONDS", 0.2)
    url = str(tmp_path / "polar.db")
    async with (
        open_store(url, artifacts=tmp_path / "artifacts") as store,
        run_killable_gateway(url) as (process, port),
        waiting_agent(store, tmp_path, monkeypatch) as (_, session_id),
    ):
        asking = asyncio.create_task(ask_in_vain(port, KEY))
        await until_open(store, session_id)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await asking
        row = await let_agent_finish(store)
        assert (row.status, row.cause, row.reward, row.incomplete) == ("done", None, 1.0, True)
        assert row.error is not None
        assert "1 call(s) were lost on the gateway" in row.error
        assert "the rollout is not trained on" in row.error
        assert await store.traces.find(session_id=session_id) == []
        assert await count_calls(store, row) == {"trained": 0, "incomplete": row.calls}
        assert await store.open_calls.gateways() == set()


async def spend_elsewhere(there: Gateway, store: Store, session_id: str) -> None:
    """Spend the budget of three calls by calls on a gateway that is not the rollout's; the agent has made one."""
    assert len(await store.calls.of_session(session_id)) == 1
    questions = [[{"role": "user", "content": f"question {number}"}] for number in range(3)]
    assert [(await ask(there, KEY, question)).status_code for question in questions] == [200, 200, 403]


@pytest.mark.parametrize("goes_on", [True, False])
async def test_calls_on_another_gateway_spend_the_budget_of_a_rollout(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """The agent's next call is refused; an agent that makes no other call is stopped."""
    monkeypatch.setattr(stopping, "GRACE_SECONDS", 240.0 if goes_on else 0.2)
    async with (
        open_store(url, artifacts=tmp_path / "artifacts") as store,
        run_gateway(url) as (there, _),
        waiting_agent(store, tmp_path, monkeypatch, max_calls=3) as (_, session_id),
    ):
        await spend_elsewhere(there, store, session_id)
        row = await (let_agent_finish if goes_on else until_final)(store)
        counted = await count_calls(store, row)
    assert (row.status, row.cause, row.masked, row.incomplete, row.calls) == ("done", "budget", True, False, 3)
    assert not goes_on or row.exit_code == 1  # of the agent, whose call was refused
    assert sum(counted.values()) == 3
