"""Modelled rollouts: the turns of an agent and the cost of its sandboxes, all drawn from one seed.

The parameters are round figures in the range of real coding agents; the numbers of turns, the answers and the durations
of commands have heavy tails. They are assumptions; `benchmarks/fleet.py --json` prints them with the results.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from benchmarks._fleet.engine import Fleet
from polar_proxy.rollouts.admission import AdmissionRequest, StageLimits
from polar_proxy.rollouts.pool import SandboxPool
from polar_proxy.store.repositories.rollouts import Claim
from sandboxes.base import ExecResult, Sandbox, SandboxKind, SandboxSpec


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution, given by median and sigma, truncated at `most`."""

    median: float
    sigma: float
    most: float

    def draw(self, rng: random.Random) -> float:
        return min(self.most, rng.lognormvariate(math.log(self.median), self.sigma))


@dataclass(frozen=True, slots=True)
class AgentModel:
    common: int = 8_000
    """Tokens of system prompt and tools."""
    task: int = 3_000
    """Tokens of the task, which the rollouts of a group share."""
    turns: LogNormal = LogNormal(18, 0.8, 150)
    answer: LogNormal = LogNormal(150, 1.0, 4_000)
    """Sampled tokens per turn."""
    result: LogNormal = LogNormal(400, 1.2, 8_000)
    """Tokens of a tool result."""
    tool: LogNormal = LogNormal(1.5, 1.2, 120)
    """Seconds of a tool call in the sandbox."""
    context: int = 128_000
    """Context length at which the agent ends."""
    cold: LogNormal = LogNormal(8, 0.6, 60)
    """Seconds to open a sandbox."""
    alive: float = 0.1
    """Seconds to check that a pooled sandbox is alive."""
    workspace: LogNormal = LogNormal(2, 0.4, 20)
    """Seconds to prepare the workspace."""
    tests: LogNormal = LogNormal(15, 0.8, 300)
    """Seconds of scoring."""
    open_mb: int = 60
    run_mb: int = 400
    """Memory in MB of a sandbox in which an agent or tests run. `open_mb` is that of any other open sandbox."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One rollout, drawn before it starts, so that it is the same in every setting."""

    turns: tuple[tuple[int, int, float], ...]
    """(sampled tokens, tokens of the tool's result, seconds of the tool)"""
    workspace: float
    tests: float
    reward: float


def plan(model: AgentModel, seed: int, number: int) -> RolloutPlan:
    rng = random.Random(f"{seed} {number}")
    turns, context = [], model.common + model.task
    for _ in range(max(1, round(model.turns.draw(rng)))):
        answer, result = round(model.answer.draw(rng)) + 1, round(model.result.draw(rng)) + 1
        if context + answer + result > model.context:
            break
        context += answer + result
        turns.append((answer, result, model.tool.draw(rng)))
    return RolloutPlan(tuple(turns), model.workspace.draw(rng), model.tests.draw(rng), float(rng.random() < 0.4))


class MemoryUse:
    """Memory of all sandboxes together."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def add(self, megabytes: int) -> None:
        self.now += megabytes
        self.most = max(self.most, self.now)


class ModelSandbox:
    """A modelled sandbox, with the methods that a pool calls."""

    def __init__(self, model: AgentModel, memory: MemoryUse) -> None:
        self._model = model
        self._memory = memory
        memory.add(model.open_mb)

    async def exec(self, argv: Any, **given: Any) -> ExecResult:
        await asyncio.sleep(self._model.alive)
        return ExecResult(0, b"", b"", False, self._model.alive)

    async def close(self) -> None:
        self._memory.add(-self._model.open_mb)


def opener(model: AgentModel, memory: MemoryUse, seed: int) -> Callable[[SandboxKind, SandboxSpec], Any]:
    rng = random.Random(f"{seed} sandboxes")

    async def open_one(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(model.cold.draw(rng))
        return cast(Sandbox, ModelSandbox(model, memory))

    return open_one


@dataclass(slots=True)
class RolloutTimes:
    """When a rollout entered each stage, in virtual seconds; NaN for stages it never entered."""

    group_id: str
    task: str
    claimed: float
    prepared: float = math.nan
    running: float = math.nan
    scoring: float = math.nan
    ended: float = math.nan
    sampled: int = 0
    status: str = "cancelled"


class ModelAttempt:
    """An `AttemptFunction` with the stages of `rollouts/attempt.py` and modelled contents."""

    def __init__(
        self,
        store: Any,
        fleet: Fleet,
        pool: SandboxPool,
        limits: StageLimits,
        model: AgentModel,
        seed: int,
        memory: MemoryUse,
        warm: bool,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._pool = pool
        self._limits = limits
        self._model = model
        self._seed = seed
        self._memory = memory
        self._spec = SandboxSpec()
        self._judge = SandboxSpec(env={"role": "evaluator"})
        self._warm = warm
        self.times: dict[str, RolloutTimes] = {}
        self.left: dict[str, int] = {}
        """Number of unfinished rollouts of each task."""

    async def __call__(self, claim: Claim) -> None:
        limits, request = self._limits, AdmissionRequest(claim.rollout_id, claim.group_id, claim.job_id)
        loop = asyncio.get_running_loop()
        number, task = claim.seed, str(claim.config["task"])
        assert number is not None
        drawn = plan(self._model, self._seed, number)
        times = self.times[claim.rollout_id] = RolloutTimes(claim.group_id, task, loop.time())
        try:
            async with limits.preparing.enter(request):
                await self._store.rollouts.enter_stage(claim, "preparing")
                sandbox = await self._pool.take("process", self._spec)
                try:
                    await asyncio.sleep(drawn.workspace)
                except asyncio.CancelledError:
                    await sandbox.close()
                    raise
            times.prepared = loop.time()
            try:
                await self._store.rollouts.enter_stage(claim, "ready")
                async with limits.running.enter(request):
                    times.running = loop.time()
                    await self._store.rollouts.enter_stage(claim, "running")
                    if self._warm:
                        self._pool.expect("process", self._judge)
                    await self._work(claim, task, drawn, times)
            finally:
                await sandbox.close()
            async with limits.scoring.enter(request):
                times.scoring = loop.time()
                await self._store.rollouts.enter_stage(claim, "scoring")
                await self._score(drawn)
                await self._store.rewards.add(claim.rollout_id, drawn.reward, "tests", {})
                await self._store.rollouts.end(claim, "done")
            times.status = "done"
        finally:
            times.ended = loop.time()
            self.left[task] -= 1
            if not self.left[task]:
                self._fleet.forget(task)

    async def _work(self, claim: Claim, task: str, drawn: RolloutPlan, times: RolloutTimes) -> None:
        model, own = self._model, 0
        self._memory.add(model.run_mb - model.open_mb)
        with self._fleet.place(task) as engine:
            try:
                for answer, result, seconds in drawn.turns:
                    await engine.generate(claim.rollout_id, task, model.common, model.task, own, answer)
                    times.sampled += answer
                    own += answer + result
                    await asyncio.sleep(seconds)
            finally:
                engine.forget(claim.rollout_id)
                self._memory.add(model.open_mb - model.run_mb)

    async def _score(self, drawn: RolloutPlan) -> None:
        sandbox = await self._pool.take("process", self._judge)
        self._memory.add(self._model.run_mb - self._model.open_mb)
        try:
            await asyncio.sleep(drawn.tests)
        finally:
            self._memory.add(self._model.open_mb - self._model.run_mb)
            await sandbox.close()
