"""The smallest environment there is: a prompt of ids, a few sampled tokens, a reward for what they are.

Everything but the agent is real: the local engine samples, calls and traces go through the store, groups through jobs
and the feed. No sandbox, no harness, no gateway.

    python -m tests.training.bandit FOLDER MODEL STEPS    # a run of its own, for a test that kills it
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
from polar_proxy.store.jobs import NewGroup, NewRollout
from polar_proxy.store.stages import Claim
from polar_proxy.traces.operations import build_traces
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.feed import StoreGroupReader
from polar_proxy.training.grpo import GrpoTrainer
from polar_proxy.training.model import Learner, load_model
from polar_proxy.training.weight_sync import LocalSync
from polar_proxy.types import CallRecord, Choice, Sampling, TextRequest, new_id

PROMPT = (11, 12, 13, 14)
LENGTH = 4
CONFIG = GrpoConfig(groups=1, samples=8, steps=3, learning_rate=1e-3, lease_seconds=60, wait_seconds=60)


def reward_of(token_ids: list[int]) -> float:
    """The share of even tokens."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


@dataclass
class Bandit:
    """`Rollouts` for the trainer."""

    store: Store
    engine: LocalEngine
    run: str
    groups: int
    samples: int
    tells_versions: bool = True
    seed: int = 0
    """Of the run: the first of its rollouts' seeds."""
    worker: str = "bandit"

    async def start_round(self, number: int) -> None:
        await self.store.tasks.put("bandit", "bandit", 0, "sample", {})
        rollouts = tuple(
            NewRollout("none", "none", "local", "tiny", self.seed + 1000 * number + index, {})
            for index in range(self.samples)
        )
        new = [NewGroup("bandit", self.samples, {}, rollouts, offered=True)] * self.groups
        await self.store.jobs.submit({}, new, idempotency_key=f"{self.run}/{number}")

    async def pending_groups(self) -> int:
        """Works the queue off; so nothing is under way when it returns."""
        version = await self.engine.weight_version() if self.tells_versions else None
        held = await self.store.queue.claim(self.worker, 1000, 60, policy_version=version)
        by_group: dict[str, list[Claim]] = {}
        for one in held:
            by_group.setdefault(one.group_id, []).append(one)
        for group_id, members in by_group.items():
            answers = await asyncio.gather(*(self._sample(one) for one in members))
            rewards = [reward_of(call.choices[0].token_ids.tolist()) for call in answers]
            for one, call, reward in zip(members, answers, rewards, strict=True):
                await self.store.rewards.add(one.rollout_id, reward, "bandit", {})
                await build_traces(self.store, call.session_id, one.rollout_id, reward=reward, incomplete=False)
                await self.store.rollouts.update(one.rollout_id, status="done")
            await self.store.groups.settle(group_id)
        return 0

    async def evaluate(self, step: int) -> list[float | None]:
        return []

    async def _sample(self, held: Claim) -> CallRecord:
        session = await self.store.sessions.create(
            key_hash=None, label=None, rollout_id=held.rollout_id, origin="rollout"
        )
        await self.store.rollouts.update(held.rollout_id, status="running", session_id=session.session_id)
        ids: list[int] = []
        logprobs: list[float] = []
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=LENGTH, seed=held.seed)
        finish = version = None
        began = time.time()
        async for event in self.engine.sample(TextRequest("tiny", PROMPT, sampling)):
            ids += event.token_ids
            logprobs += event.logprobs
            finish, version = event.finish_reason or finish, event.weight_version or version
        choice = Choice(0, {"text": ""}, finish, np.array(ids, np.int32), np.array(logprobs, np.float32))
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
            started_at=began,
            first_token_at=None,
            ended_at=time.time(),
        )
        await self.store.calls.commit(call)
        return call


@contextlib.asynccontextmanager
async def opened(folder: Path, model: Path) -> AsyncIterator[tuple[Store, LocalEngine]]:
    async with (
        open_store(f"sqlite:///{folder}/polar.db") as store,
        LocalEngine(model, name="tiny", threads=1) as engine,
    ):
        yield store, engine


def trainer(
    folder: Path,
    model: Path,
    store: Store,
    engine: LocalEngine,
    config: GrpoConfig = CONFIG,
    *,
    on_point: Callable[[str], None] = lambda point: None,
    **parts: Any,
) -> GrpoTrainer:
    """A trainer of the run `folder/run`, its model loaded afresh, as a new process would."""
    run = folder / "run"
    given: dict[str, Any] = {
        "weight_sync": LocalSync(engine),
        "feed": store.feed,
        "reader": StoreGroupReader(store),
        "rollouts": Bandit(store, engine, str(run), config.groups, config.samples),
    }
    learner = Learner(load_model(model), config)
    return GrpoTrainer(run, config, learner, model=model, engine=engine, on_point=on_point, **{**given, **parts})


async def _main(folder: Path, model: Path, steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    async with opened(folder, model) as (store, engine):
        await trainer(folder, model, store, engine, CONFIG.model_copy(update={"steps": steps})).train()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
