"""The smallest environment: a prompt of ids, a few sampled tokens, and a reward that depends on them.

Everything but the agent is real: the local engine samples, calls and traces go through the store, groups through jobs
and the feed. There is no sandbox, harness or gateway.

    python -m tests.training.bandit FOLDER MODEL STEPS    # a run in its own process, for a test that kills it
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polar_proxy.engines.local import LocalEngine
from polar_proxy.store import Store, open_store
from polar_proxy.store.repositories.rollouts import Claim
from polar_proxy.store.service.jobs import NewGroup, NewRollout
from polar_proxy.traces.operations import build_traces
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.feed import StoreGroupReader
from polar_proxy.training.grpo import GrpoTrainer
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.training.weight_sync import LocalSync
from polar_proxy.types import CallRecord, Choice, Message, Sampling, TextRequest, new_id

PROMPT = (11, 12, 13, 14)
LENGTH = 4
CONFIG = GrpoConfig(groups=1, samples=8, steps=3, learning_rate=1e-3, lease_seconds=60, wait_seconds=60)


def reward_of(token_ids: list[int]) -> float:
    """Return the share of even tokens."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


@dataclass
class Bandit:
    """A `RolloutSource` for the trainer."""

    store: Store
    engine: LocalEngine
    run: str
    groups: int
    samples: int
    with_versions: bool = True
    seed: int = 0
    """Seed of the first rollout."""
    worker: str = "bandit"

    async def start_round(self, number: int) -> None:
        await self.store.tasks.put("bandit", "bandit", 0, "sample", {})
        rollouts = tuple(
            NewRollout("none", "none", "local", "tiny", self.seed + 1000 * number + index, {})
            for index in range(self.samples)
        )
        new = [NewGroup("bandit", self.samples, {}, rollouts, for_training=True)] * self.groups
        await self.store.jobs.submit({}, new, idempotency_key=f"{self.run}/{number}")

    async def pending_groups(self) -> int:
        """Run all queued rollouts, so that no group is pending when this returns."""
        version = await self.engine.weight_version() if self.with_versions else None
        claims = await self.store.queue.claim(self.worker, 1000, 60, policy_version=version)
        by_group: dict[str, list[Claim]] = {}
        for claim in claims:
            by_group.setdefault(claim.group_id, []).append(claim)
        for group_id, members in by_group.items():
            # One after the other: in a batch, the rounding of log-probabilities depends on who else is in it.
            calls = [await self._sample(claim) for claim in members]
            rewards = [reward_of(call.choices[0].token_ids.tolist()) for call in calls]
            for claim, call, reward in zip(members, calls, rewards, strict=True):
                await self.store.rewards.add(claim.rollout_id, reward, "bandit", {})
                await build_traces(self.store, call.session_id, claim.rollout_id, reward=reward, incomplete=False)
                await self.store.rollouts.update(claim.rollout_id, status="done")
            await self.store.groups.settle(group_id)
        return 0

    async def evaluate(self, step: int) -> list[float | None]:
        return []

    async def _sample(self, claim: Claim) -> CallRecord:
        session = await self.store.sessions.create(
            key_hash=None, label=None, rollout_id=claim.rollout_id, origin="rollout"
        )
        await self.store.rollouts.enter_stage(claim, "running", session_id=session.session_id)
        ids: list[int] = []
        logprobs: list[float] = []
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=LENGTH, seed=claim.seed)
        finish = version = None
        started = time.time()
        async for event in self.engine.sample(TextRequest("tiny", PROMPT, sampling)):
            ids += event.token_ids
            logprobs += event.logprobs
            finish, version = event.finish_reason or finish, event.weight_version or version
        choice = Choice(0, Message("assistant", ""), finish, np.array(ids, np.int32), np.array(logprobs, np.float32))
        call = CallRecord(
            call_id=new_id("call"),
            session_id=session.session_id,
            dialect="openai_completions",
            path="/v1/completions",
            stream=False,
            model="tiny",
            engine=self.engine.info,
            weight_version=version,
            logprob_mode="processed",
            status="ok",
            http_status=200,
            error=None,
            edge="root",
            parent_call_id=None,
            messages=(b'"prompt"',),
            tools=None,
            params={},
            sampling={"temperature": 1.0},
            prompt_ids=np.array(PROMPT, np.int32),
            choices=(choice,),
            started_at=started,
            first_token_at=None,
            ended_at=time.time(),
        )
        await self.store.calls.commit(call)
        return call


@contextlib.asynccontextmanager
async def opened(folder: Path, model: Path) -> AsyncIterator[tuple[Store, LocalEngine]]:
    async with (
        open_store(f"sqlite:///{folder}/polar.db") as store,
        LocalEngine(model, name="tiny") as engine,
    ):
        yield store, engine


def trainer(
    folder: Path,
    model: Path,
    store: Store,
    engine: LocalEngine,
    config: GrpoConfig = CONFIG,
    *,
    learner: Learner | None = None,
    on_point: Callable[[str], None] = lambda point: None,
    **parts: Any,
) -> GrpoTrainer:
    """Return a trainer of the run `folder/run`. Without a learner, the model is loaded again as in a new process."""
    run = folder / "run"
    defaults: dict[str, Any] = {
        "weight_sync": LocalSync(engine),
        "feed": store.feed,
        "reader": StoreGroupReader(store),
        "rollouts": Bandit(store, engine, str(run), config.groups, config.samples),
    }
    learner = learner or Learner(load_model(model), config)
    return GrpoTrainer(run, config, learner, model=model, engine=engine, on_point=on_point, **{**defaults, **parts})


async def _main(folder: Path, model: Path, steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    async with opened(folder, model) as (store, engine):
        await trainer(folder, model, store, engine, CONFIG.model_copy(update={"steps": steps})).train()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
