"""The rollout service combines store, gateway, engine, agents, sandboxes and worker.

`polar run` starts a service that is limited to its own job (`run_job`); the service of a server takes all jobs. Both
use the same queue in the store. If a server is killed, other workers continue its jobs; if `polar run` is killed, its
job ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

from harness_adapters.base import HarnessError
from polar_proxy.allowed_code import NO_CODE, AllowedCode
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.engines.factory import open_engines
from polar_proxy.errors import UsageError
from polar_proxy.gateway import Gateway
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts.admission import EngineMonitor, MemoryAdmission, ServiceLimits, StageLimits
from polar_proxy.rollouts.attempt import AttemptRunner, ProgressReporter, RemoteScorer
from polar_proxy.rollouts.harnesses import HarnessInstaller, PrebuiltImageCache, harness_label
from polar_proxy.rollouts.infrastructure import UnsafeSandboxError
from polar_proxy.rollouts.interception import SandboxInterception
from polar_proxy.rollouts.pool import SandboxOpener, SandboxPool
from polar_proxy.rollouts.stopping import get_group_policy
from polar_proxy.rollouts.worker import Worker
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.service.groups import KEEP_OVERFLOW
from polar_proxy.store.service.jobs import JobRow, NewGroup, NewRollout
from polar_proxy.tasks import Task, task_to_json
from polar_proxy.types import EngineInfo, Json
from sandboxes.base import SandboxError, SandboxKind, uncancellable
from sandboxes.choice import choose, open_sandbox
from sandboxes.docker_engine import describe_engine
from sandboxes.self_test import SandboxLeaks, SelfTests

log = logging.getLogger(__name__)


class SilentReporter:
    """A progress reporter that does nothing."""

    def stage(self, rollout_id: str, status: str, detail: str = "", reward: float | None = None) -> None: ...
    def session(self, rollout_id: str, session_id: str) -> None: ...


class RolloutService:
    """`async with RolloutService(store, gateway, engine, harness_cache) as service:` runs queued rollouts until the
    block ends. Then rollouts in flight go back into the queue. To let them end instead, call `worker.drain` first."""

    def __init__(
        self,
        store: Store,
        gateway: Gateway,
        engine: Engine,
        harness_cache: Path,
        *,
        limits: ServiceLimits | None = None,
        reporter: ProgressReporter | None = None,
        note: Callable[[str], None] = lambda line: None,
        job_id: str | None = None,
        opener: SandboxOpener = open_sandbox,
        remote_scorer: RemoteScorer | None = None,
        code: AllowedCode = NO_CODE,
        on_rollout_end: Callable[[str], None] = lambda rollout_id: None,
        home: Path | None = None,
    ) -> None:
        """`harness_cache` is the folder of installed agents. `home` is the folder of the certificate authority for
        agents whose calls are intercepted. `code` lists the Python objects that tasks and rollouts may refer to by
        name. With `job_id` the service works only on that job. `remote_scorer` scores on another machine when scoring
        here would have to wait. `on_rollout_end` is called with a rollout's id after each attempt. By then the rollout
        has its final status, unless another attempt follows, the claim was lost or the store failed."""
        limits = limits or ServiceLimits()
        memory = MemoryAdmission(limits.admission.memory_mb, limits.admission.memory_reserve_mb)
        self._store, self._engine, self._code = store, engine, code
        self._reporter = reporter or SilentReporter()
        self._settled = asyncio.Event()
        self._checked_version: str | None = None
        self._prebuilt = PrebuiltImageCache() if limits.prebuild else None
        self._docker_runtime = limits.sandboxes.docker_runtime
        self.harnesses = HarnessInstaller(harness_cache, note, code)
        self.pool = SandboxPool(limits.pool_size, refill=limits.refill, opener=opener)
        self.self_tests = SelfTests(limits.sandboxes.self_test, limits.sandboxes.docker_runtime)
        self.engine_monitor = EngineMonitor(engine, limits.engine_patience, limits.admission)
        self.stages = StageLimits(
            limits,
            may_prepare=memory.refusal,
            may_run=lambda request: self.engine_monitor.busy() or memory.refusal(request),
            engine_ready=lambda request: self.engine_monitor.down(),
        )
        runner = AttemptRunner(
            store=store,
            gateway=gateway,
            engine=engine,
            harnesses=self.harnesses,
            pool=self.pool,
            limits=self.stages,
            reporter=self._reporter,
            remote_scorer=remote_scorer,
            prebuilt=self._prebuilt,
            sandbox_settings=limits.sandboxes,
            self_tests=self.self_tests,
            interception=SandboxInterception(home, gateway.settings.model_hosts),
            code=code,
        )
        self.worker = Worker(
            store,
            runner.run,
            limits,
            policy_version=self._read_policy_version,
            on_release=memory.release,
            on_settled=lambda group_id: self._settled.set(),
            on_end=on_rollout_end,
            job_id=job_id,
        )

    @classmethod
    def of(cls, settings: Settings, store: Store, gateway: Gateway, engine: Engine, **given: Any) -> Self:
        """Return a service with the limits, the folders and the allowed code of the settings.

        `given`: further arguments of the constructor; they override the values from the settings."""
        defaults = {"limits": ServiceLimits.of(settings), "code": settings.code(), "home": settings.home}
        return cls(store, gateway, engine, settings.harness_cache, **{**defaults, **given})

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.self_tests.close)
            for part in (self.pool, self.engine_monitor, self.worker):
                await stack.enter_async_context(part)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def test_sandbox(self, wanted: SandboxKind | Literal["auto"]) -> None:
        """Test the kind of sandbox that rollouts get if they do not name another. Call this before `async with`.

        If programs can break out of this kind, this service claims no rollouts. If no sandbox of this kind can be
        opened now, the kind is tested when it is first used, like all other kinds."""
        try:
            kind = (await asyncio.to_thread(choose, wanted)).kind
            await self.self_tests.require(kind)
            if kind == "docker":
                log.info("docker sandboxes: %s", await describe_engine(self._docker_runtime))
        except SandboxLeaks as error:
            self.worker.refuse(str(error))
        except SandboxError as error:
            log.warning("the sandbox %s is not tested at the start: %s", wanted, error)

    def counts(self) -> Json:
        """Return the values of the metrics: counts of rollouts, stages, warm and prebuilt sandboxes; engine load."""
        load = self.engine_monitor.load
        return {
            "in_flight": self.worker.in_flight,
            "stages": self.stages.counts(),
            "pool": self.pool.counts(),
            "engine": None if load is None else asdict(load),
            "prebuilt": None if self._prebuilt is None else asdict(self._prebuilt.count),
        }

    async def submit(
        self, tasks: Sequence[Task], spec: JobSpec, *, idempotency_key: str | None = None
    ) -> tuple[JobRow, bool]:
        """Queue a job. Return the job, and whether it is new."""
        version = await self._engine.weight_version() if spec.overflow == "keep" else None
        job, is_new = await submit(
            self._store,
            tasks,
            spec,
            self._engine.info,
            idempotency_key=idempotency_key,
            policy_version=version,
            code=self._code,
            harness_cache=self.harnesses.cache,
        )
        self.worker.wake()
        return job, is_new

    async def cancel(self, job_group_or_rollout: str) -> list[str]:
        """Cancel a job, a group or a rollout by its id. Return the cancelled rollouts that were in flight.

        First wait until the cancelled rollouts of this process have ended. Other processes end their rollouts within
        their `poll_seconds`. Raises UsageError for an unknown id."""
        in_flight = await cancel(self._store, job_group_or_rollout)
        self._settled.set()
        await self.worker.cancel(in_flight)
        for rollout_id in in_flight:
            self._reporter.stage(rollout_id, "cancelled", "cancelled")
        return in_flight

    def require_working(self) -> None:
        """Raise UnsafeSandboxError if the worker stopped claiming rollouts because its sandboxes are unsafe."""
        if self.worker.problem is not None:
            raise UnsafeSandboxError(self.worker.problem)

    async def until_done(self, job_id: str) -> JobRow:
        """Wait until a job has ended. Raises UnsafeSandboxError as `require_working` does."""
        while True:
            self._settled.clear()
            self.require_working()
            job = await self._store.jobs.get(job_id)
            if job is None:
                raise UsageError(f"There is no job {job_id}.")
            if job.status in ("done", "cancelled"):
                return job
            with contextlib.suppress(TimeoutError):  # another process may have ended the last group
                async with asyncio.timeout(1.0):
                    await self._settled.wait()

    async def _read_policy_version(self) -> str | None:
        """Return the engine's policy version. If it is new, first drop the groups that are now too old for training."""
        version = await self._engine.weight_version()
        if version != self._checked_version:
            groups, in_flight = await self._store.feed.drop_stale(version)
            self._checked_version = version
            for group_id in groups:
                log.warning("group %s is dropped: it is too many policy versions old", group_id)
                await self._store.groups.settle(group_id)
            self.worker.stop(in_flight)
        return version


# ---------------------------------------------------------------- jobs


def check_job(spec: JobSpec) -> None:
    if spec.group_size is not None and spec.group_size > spec.samples:
        raise UsageError(
            f"A group of {spec.group_size} rollouts needs at least {spec.group_size} samples, not {spec.samples}: "
            "raise samples or lower group_size."
        )
    get_group_policy(spec.group_policy)


async def submit(
    store: Store,
    tasks: Sequence[Task],
    spec: JobSpec,
    info: EngineInfo | None = None,
    *,
    idempotency_key: str | None = None,
    owned: bool = False,
    harness: str | None = None,
    policy_version: str | None = None,
    code: AllowedCode = NO_CODE,
    harness_cache: Path | None = None,
) -> tuple[JobRow, bool]:
    """Queue a job, whether or not a worker runs. Return the job, and whether it is new (see `store.jobs.submit`).

    `info` (the engine) and `harness` (name and version of the agent, by default those that `spec` names) are recorded
    with the rollouts. `owned`: the job belongs to this process. `policy_version`: the current policy version, if it is
    known. Rollouts that earlier jobs kept (`overflow`) are not carried over to this job if they are too old for this
    version. Besides Polar's own agents, the job may name agents of `code` and of the user's definition files in
    `harness_cache`.

    Raises UsageError if `spec` cannot be carried out, if the agent cannot be used, or if the idempotency key belongs to
    another job."""
    check_job(spec)
    keep = spec.overflow == "keep"
    if keep and owned:
        raise UsageError(
            "`polar run` cannot use `--overflow keep`, because `polar run` ends with its job, and nothing would then "
            "continue the rollouts that are kept. Use `polar submit`."
        )
    if harness is None:
        harness = await asyncio.to_thread(harness_label, spec.harness, harness_cache, code)
    for task in tasks:
        await store.tasks.put(task.task_id, task.family, task.seed, task.instruction, task_to_json(task))
    job, is_new = await store.jobs.submit(
        {"tasks": [task.task_id for task in tasks], **spec.identity()},
        _groups(tasks, spec, harness, info),
        idempotency_key=idempotency_key,
        priority=spec.priority,
        label=spec.label,
        owned=owned,
        callback_url=spec.callback_url,
    )
    if keep and is_new:
        bound = 1 if spec.max_staleness is None else spec.max_staleness
        for group in await store.groups.of_job(job.job_id):
            await store.groups.carry_over(group.group_id, policy_version=policy_version, max_staleness=bound)
            await store.groups.settle(group.group_id)
    return job, is_new


def _groups(tasks: Sequence[Task], spec: JobSpec, harness: str, info: EngineInfo | None) -> list[NewGroup]:
    """Return the groups of a new job, one for each task."""
    config = spec.rollout().model_dump(mode="json")
    policy = {"group_policy": spec.group_policy, **(KEEP_OVERFLOW if spec.overflow == "keep" else {})}
    engine, model = ("", "") if info is None else (f"{info.engine} {info.version}", info.model)
    return [
        NewGroup(
            task.task_id,
            spec.group_size or spec.samples,
            policy,
            (NewRollout(harness, spec.sandbox, engine, model, task.seed, config),) * spec.samples,
            spec.for_training,
            spec.max_staleness,
        )
        for task in tasks
    ]


async def cancel(store: Store, job_group_or_rollout: str) -> list[str]:
    """Cancel a job, a group or a rollout by its id. Queued rollouts are cancelled at once.

    Returns the rollouts that workers have in flight; these end the next time their worker reads the queue. Raises
    UsageError for an unknown id."""
    given = job_group_or_rollout
    if given.startswith("job_"):
        return await store.jobs.set_status(given, "cancelled")
    if given.startswith("group_") and await store.groups.get(given) is not None:
        in_flight = await store.groups.cancel(given, reason="cancelled")
        await store.groups.settle(given)
        return in_flight
    row = await store.rollouts.get(given)
    if row is None:
        raise UsageError(f"There is no job, group or rollout {given}.")
    ended = row.final or await store.queue.cancel(given)
    in_flight = [] if ended else [given]
    await store.groups.settle(row.group_id)
    return in_flight


# ---------------------------------------------------------------- a job of this process


@contextlib.asynccontextmanager
async def local_gateway(settings: Settings, engine: Engine, store: Store) -> AsyncIterator[Gateway]:
    """Serve a gateway that accepts only the keys of rollouts, on a free loopback port."""
    own = settings.gateway.model_copy(update={"host": "127.0.0.1", "port": 0, "require_known_keys": True})
    async with (
        open_engines(settings.engines) as engines,
        Gateway(engine, store, own, engines=engines, routes=settings.routes) as gateway,
    ):
        yield gateway


async def run_job(
    tasks: Sequence[Task],
    spec: JobSpec,
    settings: Settings,
    engine: Engine,
    store: Store,
    gateway: Gateway,
    reporter: ProgressReporter,
    note: Callable[[str], None],
    code: AllowedCode | None = None,
    on_rollout_end: Callable[[str], None] = lambda rollout_id: None,
) -> list[RolloutRow]:
    """Run a job, `run.concurrency` rollouts at a time; return its rollouts in order. `note` gets progress lines.
    `code`: the Python objects to which tasks and rollouts may refer by name; by default those that the settings allow.
    `on_rollout_end`: see `RolloutService`.

    A rollout that fails is a result, not an error. A cancellation cancels the job, leaves nothing running, and is
    passed on. The job belongs to this process: no server works on it, and if this process is killed, the next start
    marks its rollouts as interrupted.
    """
    choice = await asyncio.to_thread(choose, spec.sandbox)
    note(f"sandbox: {choice.reason}")
    spec = spec.model_copy(update={"sandbox": choice.kind})
    async with RolloutService.of(
        settings,
        store,
        gateway,
        engine,
        limits=ServiceLimits.of(settings, refill=False, engine_patience=60.0),
        reporter=reporter,
        note=note,
        job_id="",
        code=settings.code() if code is None else code,
        on_rollout_end=on_rollout_end,
    ) as service:
        service.self_tests.start(choice.kind)
        try:
            harness = await service.harnesses.get(spec.harness)
        except HarnessError as error:
            raise UsageError(str(error)) from error
        note(f"harness: {harness.label}")
        job, _ = await submit(store, tasks, spec, engine.info, owned=True, harness=harness.label)
        try:
            for row in await store.rollouts.find(job_id=job.job_id):
                reporter.stage(row.rollout_id, "queued", row.task_id)
            service.worker.work_on(job.job_id)
            await service.until_done(job.job_id)
        except BaseException:
            await uncancellable(service.cancel(job.job_id))
            raise
    return await store.rollouts.find(job_id=job.job_id)
