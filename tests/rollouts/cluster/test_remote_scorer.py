"""Scoring that would have to wait here is done remotely: the attempt's side, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from polar_proxy.allowed_code import AllowedCode
from polar_proxy.config import Settings
from polar_proxy.rewards import CommandEvaluator, EvaluationInput, Score
from polar_proxy.rollouts import JobSpec, RolloutService, local_gateway
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.rollouts.scoring import score_work
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.store import Store
from polar_proxy.tasks import Task, get_source
from sandboxes.base import SandboxKind
from tests.fakes.player import PlayerEngine
from tests.fakes.tiny_agent import TINY_AGENTS
from tests.rollouts.quick_limits import QUICK_LIMITS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_sandbox_register")]

LIMITS = replace(QUICK_LIMITS, preparing=3, running=3, scoring=1, pool_size=0)


class OtherMachine:
    """A remote scorer that scores in this process, once the file `after` exists; its first `broken` scorings fail."""

    def __init__(self, broken: int = 0, after: Path | None = None) -> None:
        self.broken = broken
        self.after = after
        self.rollouts: list[str] = []

    async def __call__(self, work: EvaluationInput, kind: SandboxKind, labels: Mapping[str, str]) -> Score:
        self.rollouts.append(labels["polar.rollout"])
        if len(self.rollouts) <= self.broken:
            raise InfrastructureError("evaluator", "the Ray task that scored the rollout failed")
        while self.after is not None and not self.after.exists():
            await asyncio.sleep(0.01)
        task = work.task
        assert isinstance(task, Task)
        return await score_work(work, lambda: TaskSandboxes(kind).fresh(task, labels))


@pytest.mark.parametrize("broken", [0, 1])
async def test_scores_remotely_only_what_would_wait(store: Store, tmp_path: Path, broken: int) -> None:
    """One of three rollouts is scored here until the others are done; a lost remote scoring is tried once more."""
    # The rollout that is scored here starts first, and ends when the file `go` exists, which is after the others.
    other, engine = OtherMachine(broken, after=tmp_path / "first"), PlayerEngine()
    go = tmp_path / "go"
    script = f"test -e {tmp_path}/first && exit 0; touch {tmp_path}/first; until test -e {go}; do sleep 0.1; done"
    task = replace(
        get_source("swe-task").task(3), timeout_seconds=280.0, evaluators=(CommandEvaluator(("sh", "-c", script)),)
    )
    async with (
        engine,
        local_gateway(Settings(), engine, store) as gateway,
        RolloutService(
            store,
            gateway,
            engine,
            tmp_path / "harnesses",
            limits=LIMITS,
            remote_scorer=other,
            code=AllowedCode(TINY_AGENTS),
        ) as running,
    ):
        harness = "tests.fakes.tiny_agent:TinyAgent"
        spec = JobSpec(harness=harness, sandbox="process", timeout=600.0, samples=3)
        job, _ = await running.submit([task], spec)
        async with asyncio.timeout(240):
            while sum(row.status == "done" for row in await store.rollouts.find()) < 2:
                await asyncio.sleep(0.05)
        (here,) = [row for row in await store.rollouts.find() if row.status != "done"]
        assert here.status == "scoring"
        assert here.rollout_id not in other.rollouts
        go.touch()
        await asyncio.wait_for(running.until_done(job.job_id), 120)
    assert len(set(other.rollouts)) == 2
    assert len(other.rollouts) == 2 + broken
    assert [(row.status, row.reward) for row in await store.rollouts.find()] == [("done", 1.0)] * 3
    for row in await store.rollouts.find():
        assert [stage.stage for stage in await store.rollouts.stages(row.rollout_id)][-1] == "scoring"
        assert {stage.attempt for stage in await store.rollouts.stages(row.rollout_id)} == {1}
