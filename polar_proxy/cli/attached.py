"""The attached trainer: store, engine, gateway, rollout service and trainer put together for `polar train grpo`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polar_proxy.cli import common
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.tasks import TaskList, TaskSource, get_source
from polar_proxy.types import new_id

if TYPE_CHECKING:  # torch and the rest take seconds, which `polar --help` should not
    from polar_proxy.engines.base import Engine
    from polar_proxy.rollouts.service import RolloutService
    from polar_proxy.store import Store
    from polar_proxy.training.checkpoint import TrainerState
    from polar_proxy.training.config import GrpoConfig
    from polar_proxy.training.model import Learner
    from polar_proxy.training.weight_sync import WeightSync


class TaskSampler:
    """Which instances of a task source are trained on, and which are held out."""

    def __init__(self, source: TaskSource, config: GrpoConfig) -> None:
        self._config = config
        if isinstance(source, TaskList):
            held_out = config.eval_instances if config.eval_every else 0
            seeds = list(source.seeds)
            self._train: Sequence[int] | None = seeds[: len(seeds) - held_out][: config.instances]
            self.held_out: Sequence[int] = seeds[len(seeds) - held_out :]
            if not self._train:
                raise UsageError(f"{config.task} holds {len(seeds)} tasks; {held_out} are held out, and none is left.")
        else:
            first, count = config.first_seed, config.instances
            self._train = None if count is None else range(first, first + count)
            self.held_out = range(config.eval_first_seed, config.eval_first_seed + config.eval_instances)
            clash = range(max(first, self.held_out[0]), self.held_out[-1] + 1)
            if clash and (count is None or clash[0] < first + count):
                raise UsageError("first_seed and eval_first_seed overlap: held-out instances would be trained on.")

    def of_round(self, number: int) -> list[int]:
        """Fixed by the run's seed: a resumed run asks for the same."""
        places = range(number * self._config.groups, (number + 1) * self._config.groups)
        if self._train is None:
            return [self._config.first_seed + place for place in places]
        chosen = []
        for place in places:
            epoch, index = divmod(place, len(self._train))
            order = list(self._train)
            random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
            chosen.append(order[index])
        return chosen


class ServiceRollouts:
    """Rollouts for the trainer by a service of this process; jobs have the run's own id in their idempotency keys.

    What is under way is what the database's feed still waits for: give a run a database of its own, or share it only
    with jobs that are not offered to the feed.
    """

    def __init__(
        self,
        service: RolloutService,
        store: Store,
        source: TaskSource,
        config: GrpoConfig,
        spec: JobSpec,
        run_id: str,
    ) -> None:
        self._service, self._store, self._source, self._config = service, store, source, config
        self._spec, self._run_id = spec, run_id
        self._instances = TaskSampler(source, config)

    async def start(self, round_number: int) -> None:
        tasks = [self._source.task(seed) for seed in self._instances.of_round(round_number)]
        key = f"{self._run_id}/round-{round_number}"
        options = {
            "samples": self._config.samples,
            "for_training": True,
            "max_staleness": self._config.staleness_bound,
        }
        await self._service.submit(tasks, self._spec.model_copy(update=options), idempotency_key=key)

    async def under_way(self) -> int:
        return (await self._store.feed.depth()).get("open", 0)

    async def evaluate(self, step: int) -> list[float | None]:
        from polar_proxy.rollouts.service import rollout_ids

        tasks = [self._source.task(seed) for seed in self._instances.held_out]
        key = f"{self._run_id}/eval-{step}"
        spec = self._spec.model_copy(update={"samples": self._config.eval_samples, "priority": 10})
        job, _ = await self._service.submit(tasks, spec, idempotency_key=key)
        await self._service.until_done(job.job_id)
        rows = await self._store.rollouts.find(rollout_ids=await rollout_ids(self._store, job.job_id))
        return [row.reward for row in rows]


async def train_grpo(settings: Settings, config: GrpoConfig, run: Path, note: Callable[[str], None]) -> TrainerState:
    """Begin the run in the folder `run`, or take it up. `note` gets lines for people."""
    from polar_proxy.engines.factory import make_engine
    from polar_proxy.rollouts import RolloutService, ServiceLimits, local_gateway
    from polar_proxy.rollouts.recovery import recover
    from polar_proxy.training.grpo import GrpoTrainer
    from polar_proxy.training.published import StoreSink
    from polar_proxy.training.reading import StoreGroupReader
    from sandboxes import choose

    source = get_source(config.task)
    weights = weights_folder(settings, config)
    choice = choose(settings.run.sandbox)
    note(f"sandbox: {choice.reason}")
    spec = settings.run.job_spec(
        sandbox=choice.kind,
        temperature=config.temperature,
        train_timed_out=config.train_timed_out,
        label=run_id(run),
    )
    limits = ServiceLimits.of(settings.run.concurrency, settings.admission, bake=settings.run.bake)
    async with load_learner(weights, config) as learner, common.writer(settings) as store:
        for line in await recover(store):
            note(line)
        note(f"database: {store.display_url}")
        async with make_engine(settings.engine) as engine, local_gateway(settings, engine, store) as gateway:
            note(f"engine: {engine.info.engine} {engine.info.version}, model {engine.info.model}")
            cache = settings.harness_cache
            async with RolloutService(store, gateway, engine, cache, limits=limits, note=note) as service:
                own_id = run_id(run)
                rollouts = ServiceRollouts(service, store, source, config, spec, own_id)
                return await GrpoTrainer(
                    run,
                    config,
                    learner,
                    model=weights,
                    engine=engine,
                    sync=_sync(settings, config, engine, run),
                    feed=store.feed,
                    reader=StoreGroupReader(store),
                    rollouts=rollouts,
                    busy=gateway.metrics.busy.seconds,
                    published=StoreSink(store, own_id, run.name, config.to_json()),
                    note=note,
                ).train()


def weights_folder(settings: Settings, config: GrpoConfig) -> Path:
    """Where the weights lie that training begins with. Raises UsageError."""
    from polar_proxy.engines.factory import POLAR_TINY

    if config.weights is not None:
        return Path(config.weights).expanduser()
    if settings.engine.kind != "local":
        raise UsageError(f"--weights must name the folder of the weights that {settings.engine.kind} serves.")
    model = settings.engine.model
    return POLAR_TINY if model in (None, "polar-tiny") else Path(str(model)).expanduser()


@contextlib.asynccontextmanager
async def load_learner(weights: Path, config: GrpoConfig) -> AsyncIterator[Learner]:
    """The policy in training, with its reference where there is a KL term; over several processes if so told."""
    from polar_proxy.training.model import Learner, load_model

    reference = Path(config.reference or weights) if config.kl else None
    if config.processes > 1:
        from polar_proxy.training.fsdp import launch_sharded

        with launch_sharded(weights, reference, config) as conductor:
            yield conductor
    else:
        held = load_model(reference, config.device) if reference else None
        yield Learner(load_model(weights, config.device), config, held)


def _sync(settings: Settings, config: GrpoConfig, engine: Engine, run: Path) -> WeightSync:
    from polar_proxy.engines.local import LocalEngine
    from polar_proxy.engines.vllm import VllmEngine
    from polar_proxy.training.vllm_control import VllmControl
    from polar_proxy.training.weight_sync import LocalSync, vllm_sync

    if isinstance(engine, LocalEngine):
        return LocalSync(engine)
    if isinstance(engine, VllmEngine) and settings.engine.url is not None:
        control = VllmControl(settings.engine.url, config.pause, engine)
        return vllm_sync(config, control, (run / "weights").absolute())
    raise UsageError(f"Weights cannot be sent to the engine {settings.engine.kind}: train with local or vllm.")


def run_id(run: Path) -> str:
    """Of its own, so that a run made anew under an old name does not get the old one's rollouts."""
    path = run / "run_id"
    if not path.exists():
        run.mkdir(parents=True, exist_ok=True)
        path.write_text(new_id("run"))
    return path.read_text()
