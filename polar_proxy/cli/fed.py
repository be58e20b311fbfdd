"""The attached trainer on a server's feed: `polar train grpo --feed URL`. Rollouts run there, steps here.

Groups are leased over HTTP, whoever submitted them; with `ask` the trainer submits the jobs of its rounds itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from polar_proxy.api_models import JobRequest, SubmittedJob
from polar_proxy.cli.attached import TaskSampler, load_learner, run_id, weights_folder
from polar_proxy.cli.connect import PATIENT_TRIES, key_for
from polar_proxy.client import AsyncClient, UnreachableError
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.tasks import get_source

if TYPE_CHECKING:  # torch takes seconds, which `polar --help` should not
    from polar_proxy.engines.base import Engine
    from polar_proxy.training.checkpoint import TrainerState
    from polar_proxy.training.config import GrpoConfig
    from polar_proxy.training.weight_sync import WeightSync


class ExternalRollouts:
    """`Rollouts` that somebody else asks for. There may always be more of them."""

    async def start(self, round_number: int) -> None:
        pass

    async def under_way(self) -> int:
        return 1

    async def evaluate(self, step: int) -> list[float | None]:
        return []


class SubmittedRollouts:
    """`Rollouts` of jobs that the trainer submits to the server: one job an instance, each under a key that this run
    and round alone have. The server's feed should carry nothing else."""

    def __init__(self, client: AsyncClient, settings: Settings, config: GrpoConfig, run: str) -> None:
        self._client, self._settings, self._config, self._run = client, settings, config, run
        self._instances = TaskSampler(get_source(config.task), config)

    async def start(self, round_number: int) -> None:
        for place, seed in enumerate(self._instances.of_round(round_number)):
            await self._submit(seed, self._config.samples, f"round-{round_number}/{place}", for_training=True)

    async def under_way(self) -> int:
        try:
            return (await self._client.feed()).depth.get("open", 0)
        except UnreachableError:  # the feed, which is asked next, tells it; the jobs are in the server's database
            return 1

    async def evaluate(self, step: int) -> list[float | None]:
        samples = self._config.eval_samples
        jobs = [
            await self._submit(seed, samples, f"eval-{step}/{place}", priority=10)
            for place, seed in enumerate(self._instances.held_out)
        ]
        await asyncio.gather(*(self._client.wait(job.job_id) for job in jobs))
        rollouts = [row for job in jobs for row in (await self._client.job_rollouts(job.job_id)).rollouts]
        return [rollout.reward for rollout in rollouts]

    async def _submit(
        self, seed: int, samples: int, part: str, *, for_training: bool = False, priority: int = 0
    ) -> SubmittedJob:
        config = self._config
        spec = self._settings.run.job_spec(
            samples=samples,
            temperature=config.temperature,
            train_timed_out=config.train_timed_out,
            for_training=for_training,
            max_staleness=config.staleness_bound if for_training else None,
            priority=priority,
            label=self._run,
        )
        request = JobRequest(task=config.task, seed=seed, **spec.model_dump())
        return await self._client.submit(request, idempotency_key=f"{self._run}/{part}")


async def train_fed(settings: Settings, config: GrpoConfig, run: Path, note: Callable[[str], None]) -> TrainerState:
    """As `attached.train_grpo`, with the groups of `config.feed`. The engine is the one that the server samples from:
    it gets the new weights."""
    from polar_proxy.engines.factory import make_engine
    from polar_proxy.training.vllm_control import VllmControl
    from polar_proxy.training.weight_sync import vllm_sync

    if settings.engine.kind != "vllm" or settings.engine.url is None:
        raise UsageError(
            "The weights of a trainer on a feed go into the vLLM that the server samples from: give --engine vllm "
            "--engine-url URL (an engine inside the server's process can only be reached by `polar train grpo` there)."
        )
    async with make_engine(settings.engine) as engine:
        note(f"engine: {engine.info.engine} {engine.info.version}, model {engine.info.model}")
        sync = vllm_sync(config, VllmControl(settings.engine.url, config.pause), (run / "weights").absolute())
        return await train_with(settings, config, run, note, engine=engine, sync=sync)


async def train_with(
    settings: Settings,
    config: GrpoConfig,
    run: Path,
    note: Callable[[str], None],
    *,
    engine: Engine,
    sync: WeightSync,
) -> TrainerState:
    """The same, of an engine at hand."""
    from polar_proxy.training.grpo import GrpoTrainer
    from polar_proxy.training.published import HttpSink
    from polar_proxy.training.reading import HttpFeed

    assert config.feed is not None
    weights = weights_folder(settings, config)
    key = key_for(settings.model_copy(update={"url": config.feed}))
    async with load_learner(weights, config) as learner, AsyncClient(config.feed, key, tries=PATIENT_TRIES) as client:
        served = await client.service()
        note(f"feed: {config.feed}, Polar {served.version}")
        if not (config.ask or config.ahead):
            note("ahead is 0: groups that others submit are trained on however stale they are")
        feed = HttpFeed(client, note)
        own_id = run_id(run)
        asked = SubmittedRollouts(client, settings, config, own_id) if config.ask else ExternalRollouts()
        return await GrpoTrainer(
            run,
            config,
            learner,
            model=weights,
            engine=engine,
            sync=sync,
            feed=feed,
            reader=feed,
            rollouts=asked,
            published=HttpSink(client, own_id, run.name, config.to_json(), note),
            note=note,
        ).train()
