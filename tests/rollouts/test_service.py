"""Complete rollouts through the service in this process: infrastructure failures, cancellation, restarts.

Real parts: store, gateway, process sandboxes, the small agent, hidden tests. Scripted: the engine, and the faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.allowed_code import AllowedCode
from polar_proxy.config import Settings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.rewards import PythonEvaluator
from polar_proxy.rollouts import JobSpec, RolloutService, attempt, local_gateway
from polar_proxy.rollouts.infrastructure import UnsafeSandboxError
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.repositories.rollouts import StageRow
from polar_proxy.store.service.jobs import NewGroup, NewRollout
from polar_proxy.tasks import get_source, task_to_json
from sandboxes import self_test
from sandboxes.base import ExecResult, Sandbox, SandboxEnded, SandboxError, SandboxKind, SandboxSpec
from sandboxes.choice import open_sandbox
from sandboxes.orphans import default_state_dir
from tests.fakes.player import PlayerEngine, play
from tests.fakes.tiny_agent import TINY_AGENTS
from tests.rollouts.quick_limits import QUICK_LIMITS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_sandbox_register")]

Opener = Callable[[SandboxKind, SandboxSpec], Any]


@contextlib.asynccontextmanager
async def service(
    store: Store, tmp_path: Path, opener: Opener = open_sandbox, engine: ScriptedEngine | None = None
) -> AsyncIterator[RolloutService]:
    engine = engine or PlayerEngine()
    async with (
        engine,
        local_gateway(Settings(), engine, store) as gateway,
        RolloutService(
            store, gateway, engine, tmp_path / "harnesses", limits=QUICK_LIMITS, opener=opener, code=AGENTS
        ) as made,
    ):
        yield made


AGENTS = AllowedCode(TINY_AGENTS)
TASKS = [get_source("swe-task").task(3)]


def job(agent: str = "TinyAgent", **options: Any) -> JobSpec:
    return JobSpec(**{"harness": f"tests.fakes.tiny_agent:{agent}", "sandbox": "process", "timeout": 120.0, **options})


def stage_ends(stages: list[StageRow]) -> list[tuple[int, str, str | None, str | None]]:
    return [(stage.attempt, stage.stage, stage.outcome, stage.cause) for stage in stages]


def left_behind() -> list[str]:
    return sorted(path.name for path in default_state_dir().iterdir() if path.name.startswith("polar-"))


async def count_calls(store: Store, row: RolloutRow) -> dict[str, int]:
    """Count the calls of all sessions of a rollout, trained or excluded by reason; fail if they do not add up."""
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


async def test_a_dead_sandbox_leads_to_another_attempt(store: Store, tmp_path: Path) -> None:
    """The calls of the first attempt are kept and never trained on; the second attempt is the rollout."""
    opened: list[Sandbox] = []

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        sandbox = await open_sandbox(kind, spec)
        opened.append(sandbox)
        if len(opened) == 1:
            whole = sandbox.exec

            async def dies(argv: Any, **given: Any) -> Any:
                result = await whole(argv, **given)
                if "cwd" in given:
                    raise SandboxEnded("killed from outside")
                return result

            sandbox.exec = dies  # type: ignore[method-assign]
        return sandbox

    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job(for_training=True))
        assert (await running.until_done(made.job_id)).status == "done"
    (row,) = await store.rollouts.find()
    assert (row.status, row.reward, row.error) == ("done", 1.0, None)
    assert stage_ends(await store.rollouts.stages(row.rollout_id)) == [
        (1, "preparing", "ok", None),
        (1, "ready", "ok", None),
        (1, "running", "failed", "sandbox"),
        (2, "preparing", "ok", None),
        (2, "ready", "ok", None),
        (2, "running", "ok", None),
        (2, "scoring", "ok", None),
    ]
    counts = await count_calls(store, row)
    assert counts == {"trained": row.calls, "superseded_attempt": row.calls}
    assert await store.feed.depth() == {"waiting": 1}
    assert left_behind() == []


async def test_scoring_is_tried_again_without_a_new_attempt(store: Store, tmp_path: Path) -> None:
    refused: list[str] = []

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        if spec.labels.get("polar.role") == "evaluator" and len(refused) < 2:
            refused.append("evaluator")
            raise SandboxError("no room")
        return await open_sandbox(kind, spec)

    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job())
        await running.until_done(made.job_id)
        assert running.pool.count.dead == 1  # the sandbox in the pool
    (row,) = await store.rollouts.find()
    assert (row.status, row.reward) == ("done", 1.0)
    assert {stage.attempt for stage in await store.rollouts.stages(row.rollout_id)} == {1}
    assert refused == ["evaluator"] * 2


async def test_fails_after_three_attempts_without_a_sandbox(store: Store, tmp_path: Path) -> None:
    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        raise SandboxError("the engine of sandboxes is gone")

    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job(for_training=True))
        await running.until_done(made.job_id)
    (row,) = await store.rollouts.find()
    assert (row.status, row.error) == ("failed", "the engine of sandboxes is gone")
    stages = await store.rollouts.stages(row.rollout_id)
    assert stage_ends(stages) == [(number, "preparing", "failed", "sandbox") for number in (1, 2, 3)]
    assert await store.feed.depth() == {"dropped": 1}
    assert await count_calls(store, row) == {"trained": 0}


async def test_an_unforeseen_error_is_recorded_at_once(store: Store, tmp_path: Path) -> None:
    """It must not look like a dead worker, whose rollouts wait until their claim expires."""

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        raise RecursionError("a fault of Polar's")

    start = time.monotonic()
    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job(for_training=True))
        await running.until_done(made.job_id)
    assert time.monotonic() - start < 20
    (row,) = await store.rollouts.find()
    assert (row.status, row.cause) == ("failed", "internal")
    assert row.error == "a fault in Polar: RecursionError: a fault of Polar's"
    stages = await store.rollouts.stages(row.rollout_id)
    assert stage_ends(stages) == [(number, "preparing", "failed", "internal") for number in (1, 2, 3)]


@pytest.mark.parametrize("what", ["job", "group", "rollout"])
async def test_cancelled_while_the_agent_runs(
    store: Store, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "_IDLE_SECONDS", 600.0)  # cancellation must not wait for this
    async with service(store, tmp_path) as running:
        made, _ = await running.submit(TASKS, job("SleepyAgent"))
        (group,) = await store.groups.of_job(made.job_id)
        (row,) = await store.rollouts.find()
        await asyncio.wait_for(until_calls(store, 1), 60)
        whole = {"job": made.job_id, "group": group.group_id, "rollout": row.rollout_id}[what]
        await asyncio.wait_for(running.cancel(whole), 120)
        # The sandbox that was opened for an evaluator waits in the pool.
        async with asyncio.timeout(60):
            while len(left_behind()) != running.pool.waiting:
                await asyncio.sleep(0.05)
        assert running.pool.waiting <= 1
        await asyncio.wait_for(running.until_done(made.job_id), 60)
        assert await running.cancel(row.rollout_id) == []  # it has ended, so it is not in flight
    assert left_behind() == []
    (row,) = await store.rollouts.find()
    assert (row.status, row.calls, row.reward) == ("cancelled", 1, None)
    assert stage_ends(await store.rollouts.stages(row.rollout_id))[-1] == (1, "running", "cancelled", "cancelled")
    assert await count_calls(store, row) == {"trained": 1}


async def test_another_service_continues_after_a_stop(store: Store, tmp_path: Path) -> None:
    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        sandbox = await open_sandbox(kind, spec)
        whole = sandbox.exec

        async def brief(argv: Any, **given: Any) -> Any:
            """Let the agent's time run out as soon as it sleeps."""
            if "cwd" not in given:
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
        counts = await count_calls(store, row)
        assert counts["trained"] == 1
    async with store.database.reading() as connection:
        masked = (await connection.exec_driver_sql("SELECT masked, cause FROM rollouts")).all()
    assert [tuple(row) for row in masked] == [(1, "agent_timeout")] * 2


async def test_stops_an_agent_early_and_scores_its_work(store: Store, tmp_path: Path) -> None:
    """The agent would sleep for ten minutes. Its work until then is scored as usual, and does not solve the task."""
    task = get_source("swe-task").task(3)
    stop_when = {"stop_when": {"command": ["sh", "-c", 'test -e "$HOME/asleep"'], "every": 0.2}}
    task = replace(task, metadata={**task.metadata, **stop_when})
    async with service(store, tmp_path) as running:
        made, _ = await running.submit([task], job("SleepyAgent", timeout=300.0, for_training=True))
        await asyncio.wait_for(running.until_done(made.job_id), 120)
    (row,) = await store.rollouts.find()
    assert (row.status, row.cause, row.reward, row.exit_code, row.masked) == ("done", "lost", 0.0, None, False)
    assert (await count_calls(store, row))["trained"] == row.calls
    assert left_behind() == []


async def test_waits_for_an_engine_that_is_down(store: Store, tmp_path: Path) -> None:
    class RestartingEngine(PlayerEngine):
        down: str | None = "restarting"

        async def health(self) -> str | None:
            return self.down

    engine = RestartingEngine()
    async with service(store, tmp_path, engine=engine) as running:
        await running.engine_monitor.check()
        made, _ = await running.submit(TASKS, job())
        while not [row for row in await store.rollouts.find() if row.status == "ready"]:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert engine.requests == []
        engine.down = None
        await running.engine_monitor.check()
        await running.until_done(made.job_id)
        assert running.stages.running.refusals["the engine does not answer"] > 0
    (row,) = await store.rollouts.find()
    assert (row.status, row.reward) == ("done", 1.0)


@pytest.mark.parametrize(
    ("error", "ends", "status"),
    [
        (EngineError("it was restarted"), [(1, "failed", "engine"), (2, "ok", None)], "done"),
        (RequestError("the prompt is too long"), [(1, "failed", None)], "failed"),
    ],
)
async def test_blames_the_engine_for_a_failed_last_call(
    store: Store, tmp_path: Path, error: Exception, ends: list[Any], status: str
) -> None:
    """An engine error leads to another attempt, even if the engine works again; a rejected request is a result."""
    errors = [error]
    engine = ScriptedEngine(lambda request: errors.pop() if errors else play(request))
    async with service(store, tmp_path, engine=engine) as running:
        made, _ = await running.submit(TASKS, job())
        await running.until_done(made.job_id)
    (row,) = await store.rollouts.find()
    ran = [stage for stage in await store.rollouts.stages(row.rollout_id) if stage.stage == "running"]
    assert [(stage.attempt, stage.outcome, stage.cause) for stage in ran] == ends
    assert row.status == status


@pytest.mark.parametrize("error", [EngineError("out of range"), ValueError("a fault in Polar")])
async def test_a_request_that_the_engine_can_never_answer_is_the_agents_fault(
    store: Store, tmp_path: Path, error: Exception
) -> None:
    """Otherwise an agent could get another attempt by a request that makes the engine fail."""
    engine = ScriptedEngine(lambda request: error if len(request.messages) > 1 else "hello")  # type: ignore[union-attr]
    async with service(store, tmp_path, engine=engine) as running:
        made, _ = await running.submit(TASKS, job())
        await running.until_done(made.job_id)
    (row,) = await store.rollouts.find()
    assert (row.status, row.cause, row.reward, row.attempt, row.calls) == ("failed", "agent", 0.0, 1, 1)


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


async def test_accepts_work_again_after_a_drain_that_times_out(store: Store, tmp_path: Path) -> None:
    opened: list[Sandbox] = []

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        opened.append(await open_sandbox(kind, spec))
        return opened[-1]

    async with service(store, tmp_path, opener) as running:
        made, _ = await running.submit(TASKS, job("SleepyAgent", timeout=600.0))
        await asyncio.wait_for(until_asleep(await first_of(opened)), 60)
        (row,) = await store.rollouts.find()
        assert await running.worker.drain(0.05) == [row.rollout_id]
        assert running.worker.accepting
        draining = asyncio.create_task(running.worker.drain(120))
        with contextlib.suppress(SandboxEnded):  # the rollout ends at once, and may have closed it already
            await opened[0].kill_all()
        assert await asyncio.wait_for(draining, 150) == []
        assert not running.worker.accepting
        await running.until_done(made.job_id)
        later, _ = await running.submit(TASKS, job())
        await asyncio.sleep(0.3)
        assert await store.jobs.in_flight(later.job_id) == 0
        running.worker.pause(0.1)
        await asyncio.wait_for(running.until_done(later.job_id), 120)
        assert running.worker.accepting


async def test_drops_a_group_that_becomes_too_stale(store: Store, tmp_path: Path) -> None:
    """Its running rollouts are ended, its queued ones never start, and the feed counts the drop."""

    class VersionedEngine(PlayerEngine):
        version = "1"

        async def weight_version(self) -> str | None:
            return self.version

    engine = VersionedEngine()
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
    assert await store.feed.drop_reasons() == {"more than 1 policy versions old": 1}
    assert left_behind() == []


async def test_a_stored_task_or_rollout_names_no_code(store: Store, tmp_path: Path) -> None:
    """Rows of the queue are data too: the worker checks them again, whoever wrote them."""
    task = replace(TASKS[0], evaluators=(PythonEvaluator("os:system"),))
    async with service(store, tmp_path) as running:
        named, _ = await running.submit([task], job())
        await asyncio.wait_for(running.until_done(named.job_id), 60)
        new = NewRollout("x", "process", "", "", 0, job().rollout().model_dump(mode="json") | {"harness": "os:system"})
        await store.tasks.put(task.task_id, task.family, 0, "Fix it.", task_to_json(TASKS[0]))
        other, _ = await store.jobs.submit({}, [NewGroup(task.task_id, 1, {}, (new,))])
        running.worker.wake()
        await asyncio.wait_for(running.until_done(other.job_id), 60)
    first, second = await store.rollouts.find()
    assert (first.status, first.cause) == ("failed", "task")
    assert (second.status, second.cause) == ("failed", "harness")
    for row in (first, second):
        assert "the code os:system is not allowed here" in str(row.error)


async def test_a_sandbox_that_leaks_stops_the_worker_and_costs_no_attempt(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No agent is started, and another worker, whose sandboxes hold, takes all rollouts as they were."""
    leaks = ["/proc/sys can be written"]

    async def find_leaks(*given: object) -> list[str]:
        return leaks

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        return await open_sandbox("process", spec)

    monkeypatch.setattr(self_test, "find_leaks", find_leaks)
    async with service(store, tmp_path, opener) as first:
        made, _ = await first.submit(TASKS, job(sandbox="bubblewrap", samples=3, for_training=True))
        with pytest.raises(UnsafeSandboxError, match="/proc/sys can be written"):
            await asyncio.wait_for(first.until_done(made.job_id), 60)
        async with asyncio.timeout(60):
            while first.worker.in_flight:
                await asyncio.sleep(0.02)
        assert not first.worker.accepting
        for row in await store.rollouts.find():
            assert (row.status, row.attempt, row.calls) == ("queued", 1, 0)
            assert await store.rollouts.stages(row.rollout_id) == []
    assert left_behind() == []
    leaks = []
    async with service(store, tmp_path, opener) as second:
        await asyncio.wait_for(second.until_done(made.job_id), 120)
    for row in await store.rollouts.find():
        assert (row.status, row.attempt, row.reward) == ("done", 1, 1.0)
        assert {stage.attempt for stage in await store.rollouts.stages(row.rollout_id)} == {1}
