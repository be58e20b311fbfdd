"""Modelled rollouts: what an agent does, turn by turn, and what its sandboxes cost. All of it drawn from one seed.

Round figures of the order that coding agents show (heavy-tailed turns, answers and commands); they are assumptions, and
`benchmarks/fleet.py --json` prints them with the results.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from benchmarks._fleet.engine import Fleet
from polar_proxy.rollouts.pool import SandboxPool
from polar_proxy.rollouts.stage_limits import AdmissionRequest, StageLimits
from polar_proxy.store.rollouts import Claim
from sandboxes import ExecResult, Sandbox, SandboxSpec
from sandboxes.base import SandboxKind


@dataclass(frozen=True, slots=True)
class Heavy:
    """A log-normal distribution by its median and sigma, cut at `most`."""

    median: float
    sigma: float
    most: float

    def draw(self, chance: random.Random) -> float:
        return min(self.most, chance.lognormvariate(math.log(self.median), self.sigma))


@dataclass(frozen=True, slots=True)
class AgentModel:
    common: int = 8_000
    """Tokens of system prompt and tools."""
    task: int = 3_000
    """Tokens of the task, which siblings share."""
    turns: Heavy = Heavy(18, 0.8, 150)
    answer: Heavy = Heavy(150, 1.0, 4_000)
    """Sampled tokens of a turn."""
    result: Heavy = Heavy(400, 1.2, 8_000)
    """Tokens of what a tool says."""
    tool: Heavy = Heavy(1.5, 1.2, 120)
    """Seconds of a tool in the sandbox."""
    context: int = 128_000
    """Where the agent ends for want of room."""
    cold: Heavy = Heavy(8, 0.6, 60)
    """Seconds to open a sandbox."""
    alive: float = 0.1
    """Seconds to see that one of the shelf is alive."""
    workspace: Heavy = Heavy(2, 0.4, 20)
    """Seconds to lay it out."""
    tests: Heavy = Heavy(15, 0.8, 300)
    """Seconds of scoring."""
    open_mb: int = 60
    run_mb: int = 400
    """Memory of a sandbox that is open, and of one in which an agent or tests run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One rollout, drawn before it begins: the same in every setting."""

    turns: tuple[tuple[int, int, float], ...]
    """(sampled tokens, tokens of the tool's result, seconds of the tool)"""
    workspace: float
    tests: float
    reward: float


def plan(model: AgentModel, seed: int, number: int) -> Plan:
    chance = random.Random(f"{seed} {number}")
    turns, context = [], model.common + model.task
    for _ in range(max(1, round(model.turns.draw(chance)))):
        answer, result = round(model.answer.draw(chance)) + 1, round(model.result.draw(chance)) + 1
        if context + answer + result > model.context:
            break
        context += answer + result
        turns.append((answer, result, model.tool.draw(chance)))
    return Plan(tuple(turns), model.workspace.draw(chance), model.tests.draw(chance), float(chance.random() < 0.4))


class Memory:
    """What the sandboxes use of their machines, together."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def add(self, megabytes: int) -> None:
        self.now += megabytes
        self.most = max(self.most, self.now)


class ModelSandbox:
    """What a pool needs of a sandbox."""

    def __init__(self, model: AgentModel, memory: Memory) -> None:
        self._model = model
        self._memory = memory
        memory.add(model.open_mb)

    async def exec(self, argv: Any, **given: Any) -> ExecResult:
        await asyncio.sleep(self._model.alive)
        return ExecResult(0, b"", b"", False, self._model.alive)

    async def close(self) -> None:
        self._memory.add(-self._model.open_mb)


def opener(model: AgentModel, memory: Memory, seed: int) -> Callable[[SandboxKind, SandboxSpec], Any]:
    chance = random.Random(f"{seed} sandboxes")

    async def open_one(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(model.cold.draw(chance))
        return cast(Sandbox, ModelSandbox(model, memory))

    return open_one


@dataclass(slots=True)
class Seen:
    """When a rollout was where, in virtual seconds; NaN where it never was."""

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
        self, store: Any, fleet: Fleet, pool: SandboxPool, model: AgentModel, seed: int, memory: Memory, warm: bool
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._pool = pool
        self._model = model
        self._seed = seed
        self._memory = memory
        self._spec = SandboxSpec()
        self._judge = SandboxSpec(env={"role": "evaluator"})
        self._warm = warm
        self.seen: dict[str, Seen] = {}
        self.left: dict[str, int] = {}
        """Of each task, how many rollouts have not ended."""

    async def __call__(self, held: Claim, limits: StageLimits, request: AdmissionRequest) -> None:
        loop = asyncio.get_running_loop()
        number, task = held.seed, str(held.config["task"])
        assert number is not None
        drawn = plan(self._model, self._seed, number)
        seen = self.seen[held.rollout_id] = Seen(held.group_id, task, loop.time())
        try:
            async with limits.preparing.enter(request):
                await self._store.rollouts.enter_stage(held, "preparing")
                sandbox = await self._pool.take("process", self._spec)
                try:
                    await asyncio.sleep(drawn.workspace)
                except asyncio.CancelledError:
                    await sandbox.close()
                    raise
            seen.prepared = loop.time()
            try:
                await self._store.rollouts.enter_stage(held, "ready")
                async with limits.running.enter(request):
                    seen.running = loop.time()
                    await self._store.rollouts.enter_stage(held, "running")
                    if self._warm:
                        self._pool.expect("process", self._judge)
                    await self._work(held, task, drawn, seen)
            finally:
                await sandbox.close()
            async with limits.scoring.enter(request):
                seen.scoring = loop.time()
                await self._store.rollouts.enter_stage(held, "scoring")
                await self._score(drawn)
                await self._store.rewards.add(held.rollout_id, drawn.reward, "tests", {})
                await self._store.rollouts.end(held, "done")
            seen.status = "done"
        finally:
            seen.ended = loop.time()
            self.left[task] -= 1
            if not self.left[task]:
                self._fleet.forget(task)

    async def _work(self, held: Claim, task: str, drawn: Plan, seen: Seen) -> None:
        model, own = self._model, 0
        self._memory.add(model.run_mb - model.open_mb)
        with self._fleet.place(task) as engine:
            try:
                for answer, result, seconds in drawn.turns:
                    await engine.generate(held.rollout_id, task, model.common, model.task, own, answer)
                    seen.sampled += answer
                    own += answer + result
                    await asyncio.sleep(seconds)
            finally:
                engine.forget(held.rollout_id)
                self._memory.add(model.open_mb - model.run_mb)

    async def _score(self, drawn: Plan) -> None:
        sandbox = await self._pool.take("process", self._judge)
        self._memory.add(self._model.run_mb - self._model.open_mb)
        try:
            await asyncio.sleep(drawn.tests)
        finally:
            self._memory.add(self._model.open_mb - self._model.run_mb)
            await sandbox.close()
