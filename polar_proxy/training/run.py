"""Start a training run, in one of two ways: this process contains database, engine, gateway and rollout service; or a
server runs the rollouts, and this process trains on the server's feed (`polar train grpo --feed URL`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from polar_proxy.allowed_code import NO_CODE, AllowedCode
from polar_proxy.api_models import JobRequest, SubmittedJob
from polar_proxy.client import AsyncClient, UnreachableError
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.engines.factory import POLAR_TINY, make_engine
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts import RolloutService, local_gateway
from polar_proxy.rollouts.attempt import ProgressReporter
from polar_proxy.rollouts.recovery import recover
from polar_proxy.store import Store
from polar_proxy.store.service.jobs import JobRow
from polar_proxy.tasks import TaskList, TaskSource, get_source
from polar_proxy.telemetry import traced
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.feed import HttpFeed, HttpSink, StoreGroupReader
from polar_proxy.training.grpo import GrpoTrainer, RolloutSource
from polar_proxy.training.metrics import StoreSink
from polar_proxy.training.policy.checkpoint import TrainerState
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.training.trackers import MetricsTracker
from polar_proxy.training.weight_sync import LocalSync, VllmControl, WeightSync, make_vllm_sync
from polar_proxy.types import CallRecord, Json, new_id
from sandboxes.choice import choose

CONNECTION_TRIES = 12
"""Number of tries of a request while the server restarts. Together they take about a minute."""
EVAL_PRIORITY = 10
"""Priority of the jobs of an evaluation. Training rounds have priority 0, so evaluations run before them."""


class TrainingObserver(ProgressReporter, MetricsTracker, Protocol):
    """Receives the progress of a run: the stages of its rollouts, its calls, and its metrics."""

    def call(self, record: CallRecord) -> None:
        """Receive a call as soon as it is recorded."""
        ...


async def train_locally(
    settings: Settings,
    config: GrpoConfig,
    run: Path,
    store: Store,
    report: Callable[[str], None],
    observer: TrainingObserver | None = None,
) -> TrainerState:
    """Start or resume the run in the folder `run`. `report` is called with progress lines for people."""
    if settings.routes:
        raise UsageError(
            "The settings have [[routes]], which send calls to other engines than the one that this run trains. "
            "Remove them from polar.toml, or start a server with these settings and train with --feed."
        )
    code = settings.code(config.task)
    source = get_source(config.task, code)
    weights = initial_weights(settings, config)
    sandbox = choose(settings.run.sandbox)
    report(f"sandbox: {sandbox.reason}")
    own_id = run_id(run)
    spec = _job_spec(settings, config, own_id).model_copy(update={"sandbox": sandbox.kind})
    async with load_learner(weights, config) as learner:
        for line in await recover(store):
            report(line)
        report(f"database: {store.display_url}")
        async with (
            make_engine(settings.engine) as engine,
            local_gateway(settings, engine, store) as gateway,
            traced(settings.telemetry, store, gateway.observe, gateway.sessions.rollout_of) as on_rollout_end,
        ):
            report(f"engine: {engine.info.engine} {engine.info.version}, model {engine.info.model}")
            if observer is not None:
                gateway.observe(observer.call)
            async with RolloutService.of(
                settings,
                store,
                gateway,
                engine,
                reporter=observer,
                note=report,
                code=code,
                on_rollout_end=on_rollout_end,
            ) as service:
                return await GrpoTrainer(
                    run,
                    config,
                    learner,
                    model=weights,
                    engine=engine,
                    weight_sync=make_weight_sync(settings, config, engine, run),
                    feed=store.feed,
                    reader=StoreGroupReader(store),
                    rollouts=ServiceRollouts(service, store, source, config, spec, own_id, observer),
                    engine_busy_seconds=gateway.metrics.busy.seconds,
                    sink=StoreSink(store, own_id, run.name, config.to_json()),
                    observer=observer,
                    report=report,
                ).train()


async def train_remotely(
    settings: Settings,
    config: GrpoConfig,
    run: Path,
    api_key: str | None,
    report: Callable[[str], None],
    observer: MetricsTracker | None = None,
) -> TrainerState:
    """Start or resume a run on the groups of `config.feed`. New weights go to the vLLM that the server samples from."""
    if settings.engine.kind != "vllm" or settings.engine.url is None:
        raise UsageError(
            "With --feed, the trainer sends its new weights to the vLLM server that samples for the Polar server: give "
            "--engine vllm --engine-url URL. To train with an engine that runs inside a Polar process, such as local, "
            "use `polar train grpo` without --feed."
        )
    async with make_engine(settings.engine) as engine:
        report(f"engine: {engine.info.engine} {engine.info.version}, model {engine.info.model}")
        control = VllmControl(settings.engine.url, config.pause_mode)
        weight_sync = make_vllm_sync(config, control, (run / "weights").absolute())
        return await train_with_engine(
            settings, config, run, api_key, report, engine=engine, weight_sync=weight_sync, observer=observer
        )


async def train_with_engine(
    settings: Settings,
    config: GrpoConfig,
    run: Path,
    api_key: str | None,
    report: Callable[[str], None],
    *,
    engine: Engine,
    weight_sync: WeightSync,
    observer: MetricsTracker | None = None,
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
            spec = _job_spec(settings, config, own_id)
            rollouts = SubmittedRollouts(client, config, spec, own_id, settings.code(config.task))
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
            observer=observer,
            report=report,
        ).train()


class ServiceRollouts:
    """A `RolloutSource` that submits jobs to the rollout service of this process.

    Idempotency keys contain the run's id, so that a resumed run finds its jobs. All open groups of the database count
    as pending, also those of other jobs. So a database must not have other jobs for training at the same time.
    """

    def __init__(
        self,
        service: RolloutService,
        store: Store,
        source: TaskSource,
        config: GrpoConfig,
        spec: JobSpec,
        run_id: str,
        reporter: ProgressReporter | None = None,
    ) -> None:
        """`reporter` is called with each submitted rollout and its task.

        The later stages of a rollout are reported by `service`, which has a reporter too.
        """
        self._service, self._store, self._source, self._config = service, store, source, config
        self._spec, self._run_id, self._reporter = spec, run_id, reporter
        self._sampler = TaskSampler(source, config)

    async def start_round(self, number: int) -> None:
        await self._submit(self._sampler.batch(number), _round_options(self._config), f"round-{number}")

    async def pending_groups(self) -> int:
        self._service.require_working()
        return (await self._store.feed.depth()).get("open", 0)

    async def evaluate(self, step: int) -> list[float | None]:
        job = await self._submit(self._sampler.held_out, _eval_options(self._config), f"eval-{step}")
        await self._service.until_done(job.job_id)
        rows = await self._store.rollouts.find(job_id=job.job_id)
        return [row.reward for row in rows]

    async def _submit(self, seeds: Sequence[int], options: Json, name: str) -> JobRow:
        tasks = [self._source.task(seed) for seed in seeds]
        spec = self._spec.model_copy(update=options)
        job, _ = await self._service.submit(tasks, spec, idempotency_key=f"{self._run_id}/{name}")
        if self._reporter is not None:
            for row in await self._store.rollouts.find(job_id=job.job_id):
                if not row.final:
                    self._reporter.stage(row.rollout_id, "queued", row.task_id)
        return job


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

    The server's feed should have no groups of other jobs.
    """

    def __init__(
        self, client: AsyncClient, config: GrpoConfig, spec: JobSpec, run_id: str, code: AllowedCode = NO_CODE
    ) -> None:
        """`code`: the Python code to which the task source and its rows may refer in this process. On the server, the
        server's setting `allowed_code` applies."""
        self._client, self._config, self._spec, self._run_id = client, config, spec, run_id
        self._sampler = TaskSampler(get_source(config.task, code), config)

    async def start_round(self, number: int) -> None:
        await self._submit(self._sampler.batch(number), _round_options(self._config), f"round-{number}")

    async def pending_groups(self) -> int:
        try:
            return (await self._client.feed()).depth.get("open", 0)
        except UnreachableError:  # the lease request that follows reports it; the jobs are in the server's database
            return 1

    async def evaluate(self, step: int) -> list[float | None]:
        jobs = await self._submit(self._sampler.held_out, _eval_options(self._config), f"eval-{step}")
        await asyncio.gather(*(self._client.wait(job.job_id) for job in jobs))
        rollouts = [row for job in jobs for row in (await self._client.job_rollouts(job.job_id)).rollouts]
        return [rollout.reward for rollout in rollouts]

    async def _submit(self, seeds: Sequence[int], options: Json, name: str) -> list[SubmittedJob]:
        values = self._spec.model_copy(update=options).model_dump()
        requests = [JobRequest(task=self._config.task, seed=seed, **values) for seed in seeds]
        return [
            await self._client.submit(request, idempotency_key=f"{self._run_id}/{name}/{index}")
            for index, request in enumerate(requests)
        ]


def _job_spec(settings: Settings, config: GrpoConfig, run_id: str) -> JobSpec:
    return settings.run.job_spec(temperature=config.temperature, train_timed_out=config.train_timed_out, label=run_id)


def _round_options(config: GrpoConfig) -> Json:
    return {"samples": config.samples, "for_training": True, "max_staleness": config.max_staleness}


def _eval_options(config: GrpoConfig) -> Json:
    return {"samples": config.eval_samples, "priority": EVAL_PRIORITY}


class TaskSampler:
    """Chooses the instances of a task source to train on, and those that are held out for evaluation."""

    def __init__(self, source: TaskSource, config: GrpoConfig) -> None:
        self._config = config
        if isinstance(source, TaskList):
            held_out = config.eval_instances if config.eval_every else 0
            seeds = list(source.seeds)
            self._seeds: Sequence[int] | None = seeds[: len(seeds) - held_out][: config.instances]
            self.held_out: Sequence[int] = seeds[len(seeds) - held_out :]
            if not self._seeds:
                raise UsageError(
                    f"{config.task} holds {len(seeds)} tasks and {held_out} are held out, so none is left to train on: "
                    "lower eval_instances."
                )
        else:
            first, count = config.first_seed, config.instances
            self._seeds = None if count is None else range(first, first + count)
            self.held_out = range(config.eval_first_seed, config.eval_first_seed + config.eval_instances)
            overlap = range(max(first, self.held_out[0]), self.held_out[-1] + 1)
            if overlap and (count is None or overlap[0] < first + count):
                raise UsageError("The instances from first_seed and from eval_first_seed overlap: change one of them.")

    def batch(self, number: int) -> list[int]:
        """Return the instances of a round. They depend only on the round's number, the settings and the source of
        tasks, so a resumed run gets the same instances."""
        positions = range(number * self._config.groups, (number + 1) * self._config.groups)
        if self._seeds is None:
            return [self._config.first_seed + position for position in positions]
        batch = []
        for position in positions:
            epoch, index = divmod(position, len(self._seeds))
            order = list(self._seeds)
            random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
            batch.append(order[index])
        return batch


def initial_weights(settings: Settings, config: GrpoConfig) -> Path:
    """Return the folder of the weights that training starts with.

    Raises UsageError if `weights` is not set and the engine is not local.
    """
    if config.weights is not None:
        return Path(config.weights).expanduser()
    if settings.engine.kind != "local":
        raise UsageError(f"--weights must name the folder of the weights that {settings.engine.kind} serves.")
    model = settings.engine.model
    return POLAR_TINY if model in (None, "polar-tiny") else Path(str(model)).expanduser()


@contextlib.asynccontextmanager
async def load_learner(weights: Path, config: GrpoConfig) -> AsyncIterator[Learner]:
    """Yield the learner with the policy of the folder `weights`, and with a reference model if there is a KL term.

    If `processes` is above 1, the other processes of the learner run until the block ends.
    """
    reference = Path(config.reference or weights) if config.kl_coef else None
    if config.processes > 1:
        from polar_proxy.training.policy.fsdp import launch_sharded

        with launch_sharded(weights, reference, config) as coordinator:
            yield coordinator
    else:
        reference_model = load_model(reference, config.device) if reference else None
        yield Learner(load_model(weights, config.device), config, reference_model)


def make_weight_sync(settings: Settings, config: GrpoConfig, engine: Engine, run: Path) -> WeightSync:
    from polar_proxy.engines.local import LocalEngine
    from polar_proxy.engines.vllm import VllmEngine

    if isinstance(engine, LocalEngine):
        return LocalSync(engine)
    if isinstance(engine, VllmEngine) and settings.engine.url is not None:
        control = VllmControl(settings.engine.url, config.pause_mode, engine)
        return make_vllm_sync(config, control, (run / "weights").absolute())
    raise UsageError(f"Weights cannot be sent to the engine {settings.engine.kind}: train with local or vllm.")


def run_id(run: Path) -> str:
    """Return the run's id, which is made at its first start and kept in its folder.

    A new run under the name of a deleted one has another id, so it does not get the deleted run's rollouts.
    """
    path = run / "run_id"
    if not path.exists():
        run.mkdir(parents=True, exist_ok=True)
        path.write_text(new_id("run"))
    return path.read_text()
