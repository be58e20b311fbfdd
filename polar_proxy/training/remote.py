"""The same training loop on a server's feed: `polar train grpo --feed URL`. Rollouts run there, steps here.

Groups are leased over HTTP, no matter which client submitted them. With `submit_jobs` the trainer submits the jobs of
its rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from polar_proxy.api_models import (
    JobRequest,
    LeaseRequest,
    SubmittedJob,
    TrainingLine,
    TrainingLinesRequest,
    TrainingRunRequest,
)
from polar_proxy.client import AsyncClient, ConflictError, NotFoundError, UnavailableError, UnreachableError
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.engines.factory import make_engine
from polar_proxy.errors import UsageError
from polar_proxy.store.service.feed import GroupLease, LeaseBatch
from polar_proxy.tasks import get_source
from polar_proxy.traces.rows import read_row
from polar_proxy.training.batch import GroupRollout, TrainingGroup
from polar_proxy.training.checkpoint import TrainerState
from polar_proxy.training.config import BuilderName, GrpoConfig
from polar_proxy.training.grpo import GrpoTrainer, RolloutSource
from polar_proxy.training.run import EVAL_PRIORITY, TaskSampler, initial_weights, load_learner, run_id
from polar_proxy.training.vllm_sync import VllmControl, make_vllm_sync
from polar_proxy.training.weight_sync import WeightSync
from polar_proxy.types import Json, Trace

CONNECTION_TRIES = 12
"""Enough to wait about a minute for a server that restarts."""


async def train_remotely(
    settings: Settings, config: GrpoConfig, run: Path, api_key: str | None, report: Callable[[str], None]
) -> TrainerState:
    """Start or resume a run on the groups of `config.feed`. New weights go to the vLLM that the server samples from."""
    if settings.engine.kind != "vllm" or settings.engine.url is None:
        raise UsageError(
            "A trainer on a feed sends its weights to the vLLM that the server samples from: give --engine vllm "
            "--engine-url URL. (Only a trainer in the server's own process could reach an engine that runs in it: use "
            "`polar train grpo` without --feed.)"
        )
    async with make_engine(settings.engine) as engine:
        report(f"engine: {engine.info.engine} {engine.info.version}, model {engine.info.model}")
        control = VllmControl(settings.engine.url, config.pause_mode)
        weight_sync = make_vllm_sync(config, control, (run / "weights").absolute())
        return await train_with_engine(settings, config, run, api_key, report, engine=engine, weight_sync=weight_sync)


async def train_with_engine(
    settings: Settings,
    config: GrpoConfig,
    run: Path,
    api_key: str | None,
    report: Callable[[str], None],
    *,
    engine: Engine,
    weight_sync: WeightSync,
) -> TrainerState:
    """Like `train_remotely`, with an engine that is already open."""
    assert config.feed is not None
    weights = initial_weights(settings, config)
    async with (
        load_learner(weights, config) as learner,
        AsyncClient(config.feed, api_key, tries=CONNECTION_TRIES) as client,
    ):
        service = await client.service()
        report(f"feed: {config.feed}, Polar {service.version}")
        if not (config.submit_jobs or config.max_async_steps):
            report("max_async_steps is 0: groups that others submit are trained however stale they are")
        feed = HttpFeed(client, report)
        own_id = run_id(run)
        rollouts: RolloutSource = ExternalRollouts()
        if config.submit_jobs:
            rollouts = SubmittedRollouts(client, settings, config, own_id)
        return await GrpoTrainer(
            run,
            config,
            learner,
            model=weights,
            engine=engine,
            weight_sync=weight_sync,
            feed=feed,
            reader=feed,
            rollouts=rollouts,
            sink=HttpSink(client, own_id, run.name, config.to_json(), report),
            report=report,
        ).train()


class ExternalRollouts:
    """A `RolloutSource` for jobs that others submit. It assumes that more groups can always come."""

    async def start_round(self, number: int) -> None:
        pass

    async def pending_groups(self) -> int:
        return 1

    async def evaluate(self, step: int) -> list[float | None]:
        return []


class SubmittedRollouts:
    """A `RolloutSource` that submits one job per instance to the server, under an idempotency key of this run.

    The server's feed should carry nothing else.
    """

    def __init__(self, client: AsyncClient, settings: Settings, config: GrpoConfig, run_id: str) -> None:
        self._client, self._settings, self._config, self._run_id = client, settings, config, run_id
        self._sampler = TaskSampler(get_source(config.task), config)

    async def start_round(self, number: int) -> None:
        for index, seed in enumerate(self._sampler.batch(number)):
            await self._submit(seed, self._config.samples, f"round-{number}/{index}", for_training=True)

    async def pending_groups(self) -> int:
        try:
            return (await self._client.feed()).depth.get("open", 0)
        except UnreachableError:  # the lease request that follows reports it; the jobs are in the server's database
            return 1

    async def evaluate(self, step: int) -> list[float | None]:
        samples = self._config.eval_samples
        jobs = [
            await self._submit(seed, samples, f"eval-{step}/{index}", priority=EVAL_PRIORITY)
            for index, seed in enumerate(self._sampler.held_out)
        ]
        await asyncio.gather(*(self._client.wait(job.job_id) for job in jobs))
        rollouts = [row for job in jobs for row in (await self._client.job_rollouts(job.job_id)).rollouts]
        return [rollout.reward for rollout in rollouts]

    async def _submit(
        self, seed: int, samples: int, name: str, *, for_training: bool = False, priority: int = 0
    ) -> SubmittedJob:
        config = self._config
        spec = self._settings.run.job_spec(
            samples=samples,
            temperature=config.temperature,
            train_timed_out=config.train_timed_out,
            for_training=for_training,
            max_staleness=config.max_staleness if for_training else None,
            priority=priority,
            label=self._run_id,
        )
        request = JobRequest(task=config.task, seed=seed, **spec.model_dump())
        return await self._client.submit(request, idempotency_key=f"{self._run_id}/{name}")


class HttpFeed:
    """Feed and reader of groups over a server's API: a `GroupFeed` and a `GroupReader`.

    Rows carry everything that training reads, log-probabilities in float32 as recorded, so a step is the same as from
    the store.
    """

    def __init__(self, client: AsyncClient, report: Callable[[str], None], *, wait: float = 2.0) -> None:
        """`wait`: seconds that the server may wait for a group before it answers that there is none."""
        self._client, self._report, self._wait = client, report, wait
        self._unreachable = False

    async def lease(
        self, consumer: str, limit: int, seconds: float, *, policy_version: str | None, max_staleness: int | None
    ) -> LeaseBatch:
        """Lease groups as the store does. Raises ApiError if the server refuses.

        An unreachable server counts as one without groups and is reported once; the trainer asks again for as long as
        it waits for groups.
        """
        request = LeaseRequest(
            consumer=consumer,
            limit=limit,
            seconds=seconds,
            policy_version=policy_version,
            max_staleness=max_staleness,
            wait=self._wait,
        )
        try:
            response = await self._client.lease(request)
        except (UnreachableError, UnavailableError) as error:
            if not self._unreachable:
                self._report(f"the feed cannot be reached: {error}")
            self._unreachable = True
            return LeaseBatch((), ())
        self._unreachable = False
        leases = [
            GroupLease(
                lease.lease_id,
                lease.group_id,
                lease.consumer,
                lease.expires_at,
                lease.staleness,
                lease.policy_version,
            )
            for lease in response.leases
        ]
        return LeaseBatch(tuple(leases), tuple(response.dropped))

    async def acknowledge(self, lease_id: str) -> None:
        await self._client.acknowledge(lease_id)

    async def release(self, lease_id: str) -> None:
        await self._client.give_back(lease_id)

    async def extend(self, lease_id: str, seconds: float) -> float:
        return (await self._client.extend(lease_id, seconds)).expires_at

    async def read_group(self, group_id: str, builder: BuilderName, staleness: int | None) -> TrainingGroup:
        group = await self._client.group(group_id)
        traces: dict[str, list[Trace]] = {rollout.rollout_id: [] for rollout in group.rollouts}
        # All grades: the trainer decides which are trained, and counts the others.
        async for row in self._client.group_trajectories(group_id, builder=builder, all_grades=True):
            traces[row["rollout_id"]].append(read_row(row).trace)
        members = [GroupRollout(rollout, tuple(traces[rollout.rollout_id])) for rollout in group.rollouts]
        return TrainingGroup(group_id, group.task_id, tuple(members), staleness)


class HttpSink:
    """Sends a run's metrics to the server. After an outage the server gets all lines that it missed.

    A server without the route of training runs gets no lines, which is reported once.
    """

    def __init__(
        self, client: AsyncClient, run_id: str, name: str, config: Json, report: Callable[[str], None]
    ) -> None:
        self._client, self._run_id, self._name, self._config, self._report = client, run_id, name, config, report
        self._unsupported = False

    async def replace(self, lines: Sequence[Json]) -> bool:
        request = TrainingRunRequest(name=self._name, config=self._config, lines=_training_lines(lines))
        try:
            if not self._unsupported:
                await self._client.put_training_run(self._run_id, request)
        except NotFoundError:
            self._unsupported = True
            self._report("the server does not store training runs: their curves are in the run's folder only")
        except (UnreachableError, UnavailableError):
            return False
        return True

    async def append(self, first: int, lines: Sequence[Json]) -> bool:
        request = TrainingLinesRequest(first=first, lines=_training_lines(lines))
        try:
            if not self._unsupported:
                await self._client.add_training_lines(self._run_id, request)
        except (UnreachableError, UnavailableError, NotFoundError, ConflictError):
            return False  # unreachable, or it lost the lines that these follow
        return True


def _training_lines(lines: Sequence[Json]) -> list[TrainingLine]:
    return [TrainingLine(**line) for line in lines]
