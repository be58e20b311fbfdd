"""The rollout service: store, gateway, engine, agents, sandboxes and the scheduler put together.

`polar run` is one of these, in its own process and restricted to its own job; a server's is not restricted. Both go
through the same queue in the store: what differs is who takes up after a process that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from polar_proxy.config import AdmissionSettings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import UsageError
from polar_proxy.gateway import Gateway
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts.admission import MemoryAdmission
from polar_proxy.rollouts.attempt import AttemptRunner, ProgressReporter, RemoteScorer
from polar_proxy.rollouts.engine_monitor import EngineMonitor
from polar_proxy.rollouts.harnesses import HarnessInstaller, harness_label
from polar_proxy.rollouts.pool import SandboxOpener, SandboxPool
from polar_proxy.rollouts.prebuilt import PrebuiltImageCache
from polar_proxy.rollouts.stopping import get_group_policy
from polar_proxy.rollouts.worker import Worker, WorkerLimits
from polar_proxy.store import Store
from polar_proxy.store.groups import KEEP
from polar_proxy.store.jobs import JobRow, NewGroup, NewRollout
from polar_proxy.tasks import Task, task_to_json
from polar_proxy.types import EngineInfo, Json
from sandboxes import open_sandbox

log = logging.getLogger(__name__)


class SilentReporter:
    """A listener that nobody is behind."""

    def stage(self, rollout_id: str, status: str, detail: str = "") -> None: ...
    def session(self, rollout_id: str, session_id: str) -> None: ...
    def output(self, rollout_id: str, data: bytes) -> None: ...


def check_job(spec: JobSpec) -> None:
    """Raise UsageError for a job whose groups could never be complete."""
    if spec.group_size is not None and spec.group_size > spec.samples:
        raise UsageError(f"A group of {spec.group_size} rollouts needs at least as many samples, not {spec.samples}.")
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
) -> tuple[JobRow, bool]:
    """Queue a job; return it, and whether it is new (see `Store.submit_job`). The worker may start later.

    What is known already of its worker may be given: `info` about the engine, `harness` as name and version of the
    agent, the loaded `policy_version`. Raises UsageError."""
    check_job(spec)
    keep = spec.overflow == "keep"
    if keep and owned:
        raise UsageError("`polar run` cannot keep overflowing rollouts: nothing would continue them after it ends.")
    if harness is None:
        harness = await asyncio.to_thread(harness_label, spec.harness)
    for task in tasks:
        await store.tasks.put(task.task_id, task.family, task.seed, task.instruction, task_to_json(task))
    config = spec.rollout().model_dump(mode="json")
    engine, model = ("", "") if info is None else (f"{info.engine} {info.version}", info.model)
    groups = [
        NewGroup(
            task.task_id,
            spec.group_size or spec.samples,
            {"group_policy": spec.group_policy, **(KEEP if keep else {})},
            (NewRollout(harness, spec.sandbox, engine, model, task.seed, config),) * spec.samples,
            spec.for_training,
            spec.max_staleness,
        )
        for task in tasks
    ]
    job, is_new = await store.jobs.submit(
        {"tasks": [task.task_id for task in tasks], **spec.identity()},
        groups,
        idempotency_key=idempotency_key,
        priority=spec.priority,
        label=spec.label,
        owned=owned,
        callback_url=spec.callback_url,
    )
    for group in await store.groups.of_job(job.job_id) if keep and is_new else []:
        bound = 1 if spec.max_staleness is None else spec.max_staleness
        await store.groups.carry_over(group.group_id, policy_version=policy_version, max_staleness=bound)
        await store.groups.settle(group.group_id)
    return job, is_new


async def cancel(store: Store, what: str) -> list[str]:
    """Cancel a job, a group or a rollout by its id: what is queued at once; returns the rollouts that workers have in
    hand, which they end when they look at the queue next. Raises UsageError for an id that is none."""
    if what.startswith("job_"):
        return await store.jobs.set_status(what, "cancelled")
    if what.startswith("group_"):
        group_id, known = what, await store.groups.get(what) is not None
    else:
        row = await store.rollouts.get(what)
        group_id, known = ("", False) if row is None else (row.group_id, True)
    if not known:
        raise UsageError(f"There is no job, group or rollout {what}.")
    if group_id == what:
        in_flight = await store.groups.cancel(what, reason="cancelled")
    else:
        in_flight = [] if await store.queue.cancel(what) else [what]
    await store.groups.settle(group_id)
    return in_flight


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """How much one service takes on."""

    scheduler: WorkerLimits = field(default_factory=WorkerLimits)
    shelf: int = 4
    """Sandboxes opened ahead of need, at most."""
    refill: bool = True
    """Whether one is opened for whoever comes next, besides those that are known to be needed."""
    engine_patience: float = 600.0
    """Seconds for which rollouts wait for an engine that does not answer."""
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    """When no further agent joins those that run."""
    prebuild: bool = False
    """Docker sandboxes: agents are part of their image, not mounted from this machine's disk (`prebuilt`)."""

    @classmethod
    def of(cls, agents: int, admission: AdmissionSettings | None = None, *, prebuild: bool = False) -> Self:
        """For so many agents at a time: as many again are prepared, or scored, while they run. On the shelf is room for
        the evaluator of each and for the agent that comes after it."""
        scheduler = WorkerLimits(in_flight=2 * agents, preparing=min(agents, 4), running=agents, scoring=agents)
        return cls(scheduler, shelf=2 * agents, admission=admission or AdmissionSettings(), prebuild=prebuild)


class RolloutService:
    """`async with RolloutService(store, gateway, engine, harnesses) as service:` works on what is queued until the
    block ends; what is in hand then goes back into the queue (`drain` first to let it end)."""

    def __init__(
        self,
        store: Store,
        gateway: Gateway,
        engine: Engine,
        harnesses: Path,
        *,
        limits: ServiceLimits | None = None,
        listener: ProgressReporter | None = None,
        note: Callable[[str], None] = lambda line: None,
        job_id: str | None = None,
        opener: SandboxOpener = open_sandbox,
        elsewhere: RemoteScorer | None = None,
    ) -> None:
        """`harnesses`: where agents are installed. `job_id`: work on this job alone. `elsewhere`: who scores what
        finds no place here."""
        limits = limits or ServiceLimits()
        self._store = store
        self._engine = engine
        self._listener = listener or SilentReporter()
        self.harnesses = HarnessInstaller(harnesses, note)
        self.pool = SandboxPool(limits.shelf, refill=limits.refill, opener=opener)
        self._watch = EngineMonitor(engine, limits.engine_patience, limits.admission)
        self._baked = PrebuiltImageCache() if limits.prebuild else None
        room = MemoryAdmission(limits.admission.memory_mb, limits.admission.memory_reserve_mb)
        self._settled = asyncio.Event()
        self._checked_version: str | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self.paused_until: float | None = None
        """When a pause of the service ends by itself (seconds since the epoch); None: when somebody says so."""
        self.scheduler = Worker(
            store,
            AttemptRunner(store, gateway, engine, self.harnesses, self.pool, self._listener, elsewhere, self._baked),
            limits.scheduler,
            policy_version=self._version,
            admission=self._watch.refusal,
            crowded=lambda ticket: self._watch.crowded() or room.refusal(ticket),
            room=room.refusal,
            on_release=room.left,
            on_settled=lambda group_id: self._settled.set(),
            job_id=job_id,
        )

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.pool)
            await stack.enter_async_context(self._watch)
            await stack.enter_async_context(self.scheduler)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        await self._stack.__aexit__(kind, error, trace)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def counts(self) -> Json:
        """For the metrics: what is in hand, the gates, the pool, how busy the engine says it is."""
        load = self._watch.load
        return {
            **self.scheduler.counts(),
            "pool": self.pool.counts(),
            "engine": None if load is None else asdict(load),
            "prebuilt": None if self._baked is None else asdict(self._baked.count),
        }

    async def submit(
        self, tasks: Sequence[Task], spec: JobSpec, *, idempotency_key: str | None = None
    ) -> tuple[JobRow, bool]:
        """Queue a job; return it, and whether it is new."""
        version = await self._engine.weight_version() if spec.overflow == "keep" else None
        job = await submit(
            self._store, tasks, spec, self._engine.info, idempotency_key=idempotency_key, policy_version=version
        )
        self.scheduler.wake()
        return job

    async def cancel(self, what: str) -> list[str]:
        """Cancel a job, a group or a rollout by its id; returns its rollouts that were in hand anywhere. When this
        returns nothing of it is left in this process; what other processes have in hand ends within their
        `poll_seconds`. Raises UsageError for an id that is none."""
        in_flight = await cancel(self._store, what)
        self._settled.set()
        await self.scheduler.cancel(in_flight)
        for rollout_id in in_flight:
            self._listener.stage(rollout_id, "cancelled", "cancelled")
        return in_flight

    async def pause(self, job_id: str) -> None:
        """Begin nothing new of this job; what is in hand goes on."""
        await self._store.jobs.set_status(job_id, "paused")

    async def resume(self, job_id: str) -> None:
        await self._store.jobs.set_status(job_id, "open")
        self.scheduler.wake()

    @property
    def taking(self) -> bool:
        """Whether it takes new rollouts."""
        return self.scheduler.taking

    def pause_all(self, seconds: float | None = None) -> None:
        """Take nothing new of any job, for so long or until `resume_all`; what is in hand goes on."""
        self.resume_all()
        self.scheduler.take(False)
        if seconds is not None:
            self.paused_until = time.time() + seconds
            self._resuming = asyncio.get_running_loop().call_later(seconds, self.resume_all)

    def resume_all(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        self._resuming, self.paused_until = None, None
        self.scheduler.take(True)

    async def drain(self, timeout: float | None = None) -> list[str]:
        """Take nothing new and wait for what is in hand. What is left of it after `timeout` seconds is returned; then
        it takes work again, unless it was paused before."""
        before = self.scheduler.taking
        left = await self.scheduler.drain(timeout)
        if left:
            self.scheduler.take(before)
        return left

    async def _version(self) -> str | None:
        """Of the policy, asked before each claim. Where it is a new one, groups that can only be delivered too late
        are given up first: nothing of them is begun."""
        version = await self._engine.weight_version()
        if version != self._checked_version:
            groups, in_flight = await self._store.feed.drop_stale(version)
            self._checked_version = version
            for group_id in groups:
                log.warning("group %s has fallen too far behind the policy, and is given up", group_id)
                await self._store.groups.settle(group_id)
            if in_flight:
                task = asyncio.create_task(self.scheduler.cancel(in_flight), name="polar-too-stale")
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        return version

    async def until_done(self, job_id: str) -> JobRow:
        """Wait until every group of the job has ended."""
        while True:
            self._settled.clear()
            job = await self._store.jobs.get(job_id)
            if job is None:
                raise UsageError(f"There is no job {job_id}.")
            if job.status in ("done", "cancelled"):
                return job
            with contextlib.suppress(TimeoutError):  # another process may have ended the last group
                async with asyncio.timeout(1.0):
                    await self._settled.wait()


async def rollout_ids(store: Store, job_id: str, statuses: Collection[str] | None = None) -> list[str]:
    """The ids of a job's rollouts, in the order of submission."""
    found = []
    for group in await store.groups.of_job(job_id):
        rows = await store.rollouts.find(group_id=group.group_id, statuses=statuses)
        found += [row.rollout_id for row in sorted(rows, key=lambda row: row.group_index)]
    return found
