"""Whole rollouts through the service, in this process: what the infrastructure breaks, what is cancelled, what stays.

Real parts: store, gateway, process sandboxes, the small agent, hidden tests. Scripted: the engine, and the faults.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.config import AdmissionSettings, Settings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.rollouts import JobSpec, RolloutService, ServiceLimits, attempt, local_gateway
from polar_proxy.rollouts.worker import WorkerLimits
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.rollouts import StageRow
from polar_proxy.tasks import get_source
from sandboxes import ExecResult, Sandbox, SandboxEnded, SandboxError, SandboxSpec, default_state_dir, open_sandbox
from sandboxes.base import SandboxKind
from tests.fakes.player import PlayerEngine, play

LIMITS = ServiceLimits(
    WorkerLimits(in_flight=8, running=4, retry_seconds=0.01, poll_seconds=0.05),
    pool_size=2,
    refill=False,
    admission=AdmissionSettings(memory_mb=0),  # whatever else this machine does
)
Opener = Callable[[SandboxKind, SandboxSpec], Any]


@pytest.fixture(autouse=True)
def own_sandbox_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@contextlib.asynccontextmanager
async def service(
    store: Store, tmp_path: Path, opener: Opener = open_sandbox, engine: ScriptedEngine | None = None
) -> AsyncIterator[RolloutService]:
    engine = engine or PlayerEngine()
    async with (
        engine,
        local_gateway(Settings(), engine, store) as gateway,
        RolloutService(store, gateway, engine, tmp_path / "harnesses", limits=LIMITS, opener=opener) as made,
    ):
        yield made


TASKS = [get_source("swe-task").task(3)]


def job(agent: str = "TinyAgent", **options: Any) -> JobSpec:
    return JobSpec(**{"harness": f"tests.fakes.tiny_agent:{agent}", "sandbox": "process", "timeout": 120.0, **options})


def told(stages: list[StageRow]) -> list[tuple[int, str, str | None, str | None]]:
    return [(stage.attempt, stage.stage, stage.outcome, stage.cause) for stage in stages]


def left_behind() -> list[str]:
    return sorted(path.name for path in default_state_dir().iterdir() if path.name.startswith("polar-"))


async def books(store: Store, row: RolloutRow) -> dict[str, int]:
    """Calls of all sessions of a rollout by what became of them; they add up, or this fails."""
    found = {"trained": 0}
    for session_id in await store.sessions.ids_of_rollout(row.rollout_id):
        calls = await store.calls.of_session(session_id)
        traces = await store.traces.find(session_id=session_id)
        excluded = await store.traces.exclusions(session_id)
        trained = {call_id for trace in traces for call_id in trace.call_ids}
        assert trained | set(excluded) == {call.call_id for call in calls}
        assert not trained & set(excluded)
        found["trained"] += len(trained)
        for reason in excluded.values():
            found[reason] = found.get(reason, 0) + 1
        session = await store.sessions.get(session_id)
        assert session is not None
        assert session.closed_at is not None
    return found


async def test_a_sandbox_that_dies_is_replaced(store: Store, tmp_path: Path) -> None:
    """The agent's own work in it is kept and never trained on; the second attempt is the rollout."""
    opened: list[Sandbox] = []

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        sandbox = await open_sandbox(kind, spec)
        opened.append(sandbox)
        if len(opened) == 1:
            whole = sandbox.exec

            async def dies(argv: Any, **given: Any) -> Any:
                result = await whole(argv, **given)
                if "on_output" in given:
                    raise SandboxEnded("killed from outside")
                return result

            sandbox.exec = dies  # type: ignore[method-assign]
        return sandbox

    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job(for_training=True))
        assert (await running.until_done(made.job_id)).status == "done"
    (row,) = await store.rollouts.find()
    assert (row.status, row.reward, row.error) == ("done", 1.0, None)
    assert told(await store.rollouts.stages(row.rollout_id)) == [
        (1, "preparing", "ok", None),
        (1, "ready", "ok", None),
        (1, "running", "failed", "sandbox"),
        (2, "preparing", "ok", None),
        (2, "ready", "ok", None),
        (2, "running", "ok", None),
        (2, "scoring", "ok", None),
    ]
    counts = await books(store, row)
    assert counts == {"trained": row.calls, "superseded_attempt": row.calls}
    assert await store.feed.depth() == {"waiting": 1}
    assert left_behind() == []


async def test_the_judge_gets_another_sandbox_and_the_agent_keeps_its_work(store: Store, tmp_path: Path) -> None:
    refused: list[str] = []

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        if spec.labels.get("polar.role") == "evaluator" and len(refused) < 2:
            refused.append("evaluator")
            raise SandboxError("no room")
        return await open_sandbox(kind, spec)

    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job())
        await running.until_done(made.job_id)
        assert running.pool.count.dead == 1  # the one that was opened ahead
    (row,) = await store.rollouts.find()
    assert (row.status, row.reward) == ("done", 1.0)
    assert {stage.attempt for stage in await store.rollouts.stages(row.rollout_id)} == {1}
    assert refused == ["evaluator"] * 2


async def test_no_sandbox_at_all(store: Store, tmp_path: Path) -> None:
    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        raise SandboxError("the engine of sandboxes is gone")

    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job(for_training=True))
        await running.until_done(made.job_id)
    (row,) = await store.rollouts.find()
    assert (row.status, row.error) == ("failed", "the engine of sandboxes is gone")
    stages = await store.rollouts.stages(row.rollout_id)
    assert told(stages) == [(number, "preparing", "failed", "sandbox") for number in (1, 2, 3)]
    assert await store.feed.depth() == {"dropped": 1}
    assert await books(store, row) == {"trained": 0}


@pytest.mark.parametrize("what", ["job", "group", "rollout"])
async def test_cancelled_while_the_agent_runs(
    store: Store, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_IDLE_SECONDS", 600.0)  # which is not waited for
    async with service(store, tmp_path) as running:
        made, _ = await running.submit(TASKS, job("SleepyAgent"))
        (group,) = await store.groups.of_job(made.job_id)
        (row,) = await store.rollouts.find()
        await asyncio.wait_for(until_calls(store, 1), 60)
        whole = {"job": made.job_id, "group": group.group_id, "rollout": row.rollout_id}[what]
        await asyncio.wait_for(running.cancel(whole), 120)
        # What was opened ahead for a judge is nobody's, and waits for the next.
        await running.pool.opened()
        assert len(left_behind()) == running.pool.waiting <= 1
        await asyncio.wait_for(running.until_done(made.job_id), 60)
    assert left_behind() == []
    (row,) = await store.rollouts.find()
    assert (row.status, row.calls, row.reward) == ("cancelled", 1, None)
    assert told(await store.rollouts.stages(row.rollout_id))[-1] == (1, "running", "cancelled", "cancelled")
    assert await books(store, row) == {"trained": 1}


async def test_a_stopped_service_is_followed_by_another(store: Store, tmp_path: Path) -> None:
    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        sandbox = await open_sandbox(kind, spec)
        whole = sandbox.exec

        async def brief(argv: Any, **given: Any) -> Any:
            """The agent's time runs out as soon as it sleeps."""
            if "on_output" not in given:
                return await whole(argv, **given)
            program = asyncio.create_task(whole(argv, **given))
            await asyncio.wait_for(until_asleep(sandbox), 60)
            program.cancel()
            await asyncio.wait({program})
            return ExecResult(137, b"", b"", timed_out=True, seconds=given["timeout"])

        sandbox.exec = brief  # type: ignore[method-assign]
        return sandbox

    async with service(store, tmp_path) as first:
        made, _ = await first.submit(TASKS, job("SleepyAgent", timeout=600.0, samples=2))
        await asyncio.wait_for(until_calls(store, 1), 60)
    assert [row.status for row in await store.rollouts.find()] == ["queued", "queued"]
    assert left_behind() == []
    async with service(store, tmp_path, opener) as second:
        await asyncio.wait_for(second.until_done(made.job_id), 120)
    for row in await store.rollouts.find():
        assert (row.status, row.calls, row.exit_code) == ("timed_out", 1, None)
        counts = await books(store, row)
        assert counts["trained"] == 1
    async with store.database.reading() as connection:
        masked = (await connection.exec_driver_sql("SELECT masked, cause FROM rollouts")).all()
    assert [tuple(row) for row in masked] == [(1, "agent_timeout")] * 2


async def test_a_rollout_that_is_lost_is_ended_early_and_scored(store: Store, tmp_path: Path) -> None:
    """The agent would sleep for ten minutes. Its work is judged as ever: what it had done until then is not enough."""
    task = get_source("swe-task").task(3)
    said = {"stop_when": {"command": ["sh", "-c", 'test -e "$HOME/asleep"'], "every": 0.2}}
    task = replace(task, metadata={**task.metadata, **said})
    async with service(store, tmp_path) as running:
        made, _ = await running.submit([task], job("SleepyAgent", timeout=300.0, for_training=True))
        await asyncio.wait_for(running.until_done(made.job_id), 120)
    (row,) = await store.rollouts.find()
    assert (row.status, row.cause, row.reward, row.exit_code, row.masked) == ("done", "lost", 0.0, None, False)
    assert (await books(store, row))["trained"] == row.calls
    assert left_behind() == []


async def test_an_engine_that_is_away_is_waited_for(store: Store, tmp_path: Path) -> None:
    class Away(PlayerEngine):
        away: str | None = "restarting"

        async def health(self) -> str | None:
            return self.away

    engine = Away()
    async with service(store, tmp_path, engine=engine) as running:
        await running.engine_monitor.check()
        made, _ = await running.submit(TASKS, job())
        while not [row for row in await store.rollouts.find() if row.status == "ready"]:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert engine.requests == []
        engine.away = None
        await running.engine_monitor.check()
        await running.until_done(made.job_id)
        assert running.worker.stages.running.count.refusals["the engine does not answer"] > 0
    (row,) = await store.rollouts.find()
    assert (row.status, row.reward) == ("done", 1.0)


@pytest.mark.parametrize(
    ("error", "ends", "status"),
    [
        (EngineError("it was restarted"), [(1, "failed", "engine"), (2, "ok", None)], "done"),
        (RequestError("the prompt is too long"), [(1, "failed", None)], "failed"),
    ],
)
async def test_an_engine_that_fails_the_last_call(
    store: Store, tmp_path: Path, error: Exception, ends: list[Any], status: str
) -> None:
    """It is back by the time that the agent has failed: not the agent's fault. A refusal of what it asks is its own."""
    errors = [error]
    engine = ScriptedEngine(lambda request: errors.pop() if errors else play(request))
    async with service(store, tmp_path, engine=engine) as running:
        made, _ = await running.submit(TASKS, job())
        await running.until_done(made.job_id)
    (row,) = await store.rollouts.find()
    ran = [stage for stage in await store.rollouts.stages(row.rollout_id) if stage.stage == "running"]
    assert [(stage.attempt, stage.outcome, stage.cause) for stage in ran] == ends
    assert row.status == status


async def until_calls(store: Store, count: int) -> None:
    while sum(row.calls for row in await store.sessions.recent()) < count:
        await asyncio.sleep(0.05)


async def first_of(opened: list[Sandbox]) -> Sandbox:
    while not opened:
        await asyncio.sleep(0.02)
    return opened[0]


async def until_asleep(sandbox: Sandbox) -> None:
    while not await asyncio.to_thread(Path(sandbox.home, "asleep").exists):
        await asyncio.sleep(0.02)


async def test_a_drain_that_is_not_done_in_time_takes_work_again(store: Store, tmp_path: Path) -> None:
    opened: list[Sandbox] = []

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        opened.append(await open_sandbox(kind, spec))
        return opened[-1]

    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job("SleepyAgent", timeout=600.0))
        await asyncio.wait_for(until_asleep(await first_of(opened)), 60)
        (row,) = await store.rollouts.find()
        assert await running.drain(0.05) == [row.rollout_id]
        assert running.accepting
        draining = asyncio.create_task(running.drain(120))
        await opened[0].kill_all()
        assert await asyncio.wait_for(draining, 150) == []
        assert not running.accepting
        await running.until_done(made.job_id)
        later, _ = await running.submit(TASKS, job())
        await asyncio.sleep(0.3)
        assert await store.jobs.in_flight(later.job_id) == 0
        running.pause_all(0.1)
        await asyncio.wait_for(running.until_done(later.job_id), 120)
        assert (running.accepting, running.paused_until) == (True, None)


async def test_a_group_that_has_fallen_too_far_behind_is_given_up(store: Store, tmp_path: Path) -> None:
    """At dispatch, for a trainer: what is in hand of it is ended, what is queued is not begun, and it is told."""

    class Trained(PlayerEngine):
        version = "1"

        async def weight_version(self) -> str | None:
            return self.version

    engine = Trained()
    async with service(store, tmp_path, engine=engine) as running:
        made, _ = await running.submit(TASKS, job("SleepyAgent", samples=2, for_training=True, max_staleness=1))
        await asyncio.wait_for(until_calls(store, 2), 60)
        engine.version = "2"
        await asyncio.sleep(0.3)
        assert await store.feed.depth() == {"open": 1}
        engine.version = "3"
        await asyncio.wait_for(running.until_done(made.job_id), 60)
    assert {row.status for row in await store.rollouts.find()} == {"cancelled"}
    assert await store.feed.depth() == {"dropped": 1}
    assert await store.feed.drop_reasons() == {"staler than 1 policy versions": 1}
    assert left_behind() == []
