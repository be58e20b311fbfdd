"""Admission: how many rollouts are in a stage at a time, in which order they enter, and when none may start.

Promises:

* there are never more rollouts inside a stage than its limit; a rollout that is cancelled while it waits, or fails
  inside, frees its place;
* rollouts of a group that already has a rollout inside enter first, because they share the engine's prefix cache; then
  those of the job with the fewest rollouts inside; then the rollout that has waited longest;
* while the engine does not respond, no agent starts for up to `engine_patience` seconds;
* while there is too little memory or the engine is busy, a rollout enters only if no other rollout is at work. A single
  rollout is never kept waiting for these two reasons, so that work never stops for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from polar_proxy.config import AdmissionSettings, SandboxSettings, Settings
from polar_proxy.engines.base import Engine, EngineLoad
from polar_proxy.errors import EngineError
from polar_proxy.types import Json

TOO_LITTLE_MEMORY = "too little memory"
ENGINE_DOWN = "the engine does not answer"
ENGINE_CACHE_FULL = "the engine's cache is full"
ENGINE_QUEUE_LONG = "the engine's queue is long"

RESERVATION_SECONDS = 60.0
"""Duration of a memory reservation. After this time the machine's free memory shows what the sandbox uses."""
_RECHECK_SECONDS = 0.2
_MONITOR_SECONDS = 2.0
_UNLIMITED = 1 << 60
"""A control group has no memory limit if its limit is at least this many bytes (cgroup version 1), or `max` (version
2)."""
_CGROUP_FILES = (
    # (usage, limit, statistics, the statistic of memory that can be reclaimed)
    ("memory.current", "memory.max", "memory.stat", "inactive_file"),
    ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits on the concurrent work of one process."""

    in_flight: int = 64
    """Number of rollouts claimed at a time, including those that wait to enter a stage."""
    preparing: int = 4
    running: int = 8
    scoring: int = 4
    retry_seconds: float = 1.0
    """Pause before the second attempt after an infrastructure failure; it doubles with each further attempt."""
    lease_seconds: float = 30.0
    """A worker without a heartbeat for this long loses its claims."""
    poll_seconds: float = 0.5
    """Interval in seconds at which the queue is read. A cancellation by another process is noticed within this time."""
    backlog: int | None = None
    """Start no new rollouts while this many finished groups wait for the trainer; None: no limit."""
    pool_size: int = 4
    """Maximum number of sandboxes that are open before they are needed."""
    refill: bool = True
    """Also open sandboxes for rollouts that are not known yet (see `SandboxPool`)."""
    engine_patience: float = 600.0
    """Seconds for which rollouts wait for an engine that does not respond."""
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    sandboxes: SandboxSettings = field(default_factory=SandboxSettings)
    prebuild: bool = False
    """True if docker sandboxes use images that contain the agent, instead of mounting it
    (`harnesses.PrebuiltImageCache`)."""

    @classmethod
    def of(cls, settings: Settings, agents: int | None = None, **given: Any) -> Self:
        """Return the limits for `agents` agents at a time (default: `run.concurrency`). `given` overrides fields.

        At most `agents` rollouts are scored at a time. At most `agents` are prepared at a time, and never more than 4.
        The pool has room for two sandboxes per agent: one for the evaluator and one for the next agent."""
        agents = agents or settings.run.concurrency
        limits = {
            "in_flight": 2 * agents,
            "preparing": min(agents, 4),
            "running": agents,
            "scoring": agents,
            "pool_size": 2 * agents,
            "admission": settings.admission,
            "sandboxes": settings.sandboxes,
            "prebuild": settings.run.prebuild,
        }
        return cls(**{**limits, **given})


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A rollout that wants to enter a stage."""

    rollout_id: str
    group_id: str
    job_id: str | None = None
    memory_mb: int | None = None
    """MiB of memory that the rollout's sandbox needs; None if the task does not specify it."""


AdmissionCheck = Callable[[AdmissionRequest], str | None]
"""A function that returns why a rollout may not enter now, or None. It is called in the event loop, so it must be
quick."""


@dataclass(slots=True, eq=False)
class WaitingRequest:
    request: AdmissionRequest
    number: int
    entered: asyncio.Future[None]

    @property
    def queue(self) -> tuple[str | None, str]:
        """Key of the request's queue: (job, group). Requests of one queue enter in order of arrival."""
        return self.request.job_id, self.request.group_id


class StageLimiter:
    """The limit of one stage. Call all its methods in the same event loop."""

    def __init__(
        self,
        limit: int,
        *,
        may_enter: AdmissionCheck | None = None,
        may_join: AdmissionCheck | None = None,
        idle: Callable[[], bool] | None = None,
    ) -> None:
        """A rollout enters if fewer than `limit` are in the stage and `may_enter` allows it. If the stage is not idle,
        `may_join` must allow it, too.

        `idle` returns whether the stage is idle. Default: a stage is idle if no rollout is in it.
        """
        if limit < 1:
            raise ValueError(f"A stage must admit at least one rollout, not {limit}.")
        self._limit = limit
        self._may_enter = may_enter
        self._may_join = may_join
        self._idle = idle or (lambda: not self._inside)
        # One queue per group: with ten thousand waiting, choosing the next examines each group and not each request.
        self._queues: dict[tuple[str | None, str], dict[int, WaitingRequest]] = {}
        self._inside: set[str] = set()
        self._groups: Counter[str] = Counter()
        self._jobs: Counter[str | None] = Counter()
        self._next_number = 0
        self._recheck: asyncio.TimerHandle | None = None
        self.waiting = 0
        self.entered = 0
        self.waited_seconds = 0.0
        """Total number of seconds for which rollouts waited before they entered."""
        self.refusals: Counter[str] = Counter()

    @property
    def inside(self) -> int:
        return len(self._inside)

    @property
    def full(self) -> bool:
        """True if a request that comes now has to wait until a rollout leaves the stage."""
        return self.inside + self.waiting >= self._limit

    def counts(self) -> Json:
        """Return the stage's numbers for the metrics. The refusals are counted by reason."""
        return {
            "inside": self.inside,
            "waiting": self.waiting,
            "limit": self._limit,
            "entered": self.entered,
            "waited_seconds": self.waited_seconds,
            "refusals": dict(self.refusals),
        }

    @contextlib.asynccontextmanager
    async def enter(self, request: AdmissionRequest) -> AsyncIterator[None]:
        """Wait until the rollout may enter the stage. The rollout leaves the stage when the block ends."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        waiting = WaitingRequest(request, self._next_number, loop.create_future())
        self._next_number += 1
        self._queues.setdefault(waiting.queue, {})[waiting.number] = waiting
        self.waiting += 1
        self._admit()
        try:
            await waiting.entered
        except BaseException:
            if not self._dequeue(waiting):  # it was admitted at the moment of its cancellation
                self._leave(request)
            raise
        self.entered += 1
        self.waited_seconds += loop.time() - began
        try:
            yield
        finally:
            self._leave(request)

    def _leave(self, request: AdmissionRequest) -> None:
        self._inside.remove(request.rollout_id)
        _decrement(self._groups, request.group_id)
        _decrement(self._jobs, request.job_id)
        self._admit()

    def _admit(self) -> None:
        while len(self._inside) < self._limit and (following := self._next()) is not None:
            request = following.request
            if (reason := self._refusal(request)) is not None:
                self.refusals[reason] += 1
                self._recheck_later()
                return
            self._dequeue(following)
            self._inside.add(request.rollout_id)
            self._groups[request.group_id] += 1
            self._jobs[request.job_id] += 1
            following.entered.set_result(None)

    def _refusal(self, request: AdmissionRequest) -> str | None:
        if self._may_enter is not None and (reason := self._may_enter(request)) is not None:
            return reason
        return None if self._may_join is None or self._idle() else self._may_join(request)

    def _dequeue(self, waiting: WaitingRequest) -> bool:
        """Remove the request from its queue; return False if it is in no queue."""
        queue = self._queues.get(waiting.queue, {})
        if queue.pop(waiting.number, None) is None:
            return False
        self.waiting -= 1
        if not queue:
            del self._queues[waiting.queue]
        return True

    def _next(self) -> WaitingRequest | None:
        best: tuple[bool, int, int] | None = None
        following = None
        for (job, group), queue in self._queues.items():
            # A request that was cancelled a moment ago leaves its queue only when its task runs.
            head = next((waiting for waiting in queue.values() if not waiting.entered.done()), None)
            if head is not None:
                rank = group not in self._groups, self._jobs[job], head.number
                if best is None or rank < best:
                    best, following = rank, head
        return following

    def _recheck_later(self) -> None:
        """Ask the checks again soon, because they do not report when their result changes."""
        if self._recheck is None:

            def recheck() -> None:
                self._recheck = None
                self._admit()

            self._recheck = asyncio.get_running_loop().call_later(_RECHECK_SECONDS, recheck)


class StageLimits:
    """The limiters of an attempt's stages."""

    def __init__(
        self,
        limits: ServiceLimits,
        *,
        may_prepare: AdmissionCheck | None = None,
        may_run: AdmissionCheck | None = None,
        engine_ready: AdmissionCheck | None = None,
    ) -> None:
        """Each check may keep a rollout waiting before it enters a stage.

        `may_prepare` is called before a rollout is prepared, but only while `at_work` is above 0. `may_run` is called
        before an agent starts, but only while another agent runs. So `may_prepare` and `may_run` cannot stop all
        rollouts. `engine_ready` is called before every start of an agent.
        """
        self.preparing = StageLimiter(limits.preparing, may_join=may_prepare, idle=lambda: self.at_work == 0)
        self.running = StageLimiter(limits.running, may_enter=engine_ready, may_join=may_run)
        self.scoring = StageLimiter(limits.scoring)

    @property
    def at_work(self) -> int:
        """Number of rollouts that this process is preparing, running or scoring, or that wait to be run or scored."""
        later = (self.running, self.scoring)
        return self.preparing.inside + sum(limiter.inside + limiter.waiting for limiter in later)

    def counts(self) -> dict[str, Json]:
        limiters = {"preparing": self.preparing, "running": self.running, "scoring": self.scoring}
        return {stage: limiter.counts() for stage, limiter in limiters.items()}


def _decrement(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def free_memory_mb(root: Path = Path("/")) -> int | None:
    """Return the MiB that processes can still allocate, as limited by the machine and by the current control group.

    None if the system does not report free memory (for example macOS)."""
    try:
        meminfo = _read_fields(root / "proc/meminfo")
    except OSError:
        return None
    if "MemAvailable" not in meminfo:
        return None
    free = meminfo["MemAvailable"] << 10
    folder = root / "sys/fs/cgroup"
    for usage, limit, statistics, reclaimable in _CGROUP_FILES:
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            reclaimed = _read_fields(folder / statistics).get(reclaimable, 0)
        except (OSError, ValueError):
            continue
        if most < _UNLIMITED:
            free = min(free, most - used + reclaimed)
    return max(0, free >> 20)


def _read_fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


class MemoryAdmission:
    """Admits a rollout while there is memory for its sandbox.

    A sandbox uses little memory when it opens and much when its agent runs tests, so free memory alone would admit too
    many at once. Each admitted rollout therefore reserves its memory for a minute, or until `release`.
    """

    def __init__(
        self,
        need_mb: int,
        reserve_mb: int,
        *,
        free: Callable[[], int | None] = free_memory_mb,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`need_mb`: MiB that a rollout needs if its task does not specify it; 0 switches the check off.
        `reserve_mb`: MiB that must stay free."""
        self._need = need_mb
        self._reserve = reserve_mb
        self._free = free
        self._clock = clock
        self._reserved: dict[str, tuple[float, int]] = {}
        """By rollout id: the time at which the reservation ends, and its MiB."""

    def refusal(self, request: AdmissionRequest) -> str | None:
        """Reserve memory for the rollout's sandbox and return None; if there is too little, return the reason."""
        if self._need == 0 or (free := self._free()) is None:
            return None
        now = self._clock()
        need = request.memory_mb or self._need
        self._reserved = {name: reserved for name, reserved in self._reserved.items() if reserved[0] > now}
        reserved_mb = sum(size for name, (_, size) in self._reserved.items() if name != request.rollout_id)
        if free - reserved_mb - need < self._reserve:
            return TOO_LITTLE_MEMORY
        self._reserved[request.rollout_id] = now + RESERVATION_SECONDS, need
        return None

    def release(self, rollout_id: str) -> None:
        self._reserved.pop(rollout_id, None)


class EngineMonitor:
    """Watches whether the engine responds and how busy it is, so that rollouts wait for it instead of failing.

    `async with EngineMonitor(engine, patience, limits) as monitor:` asks the engine every few seconds. After `patience`
    seconds without a response, agents are admitted anyway. If the engine still does not respond, each rollout uses up
    its attempts and ends as failed. An engine that does not report its load never counts as busy.
    """

    def __init__(self, engine: Engine, patience: float, limits: AdmissionSettings) -> None:
        self._engine = engine
        self._patience = patience
        self._limits = limits
        self._down_since: float | None = None
        self.load: EngineLoad | None = None
        """The load at the last check, if the engine reports it."""

    def down(self) -> str | None:
        """Return why no agent should start; None if the engine responds, or has failed for longer than the patience."""
        if self._down_since is None or time.monotonic() - self._down_since > self._patience:
            return None
        return ENGINE_DOWN

    def busy(self) -> str | None:
        """Return why the engine is too busy for a further agent; None if it is not."""
        if self.load is None:
            return None
        if self.load.kv_usage is not None and self.load.kv_usage > self._limits.engine_kv:
            return ENGINE_CACHE_FULL
        if self.load.waiting is not None and self.load.waiting > self._limits.engine_queue * self.load.replicas:
            return ENGINE_QUEUE_LONG
        return None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._check_forever(), name="polar-engine-monitor")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def check(self) -> None:
        """Query the engine's health and load now."""
        try:
            async with asyncio.timeout(_MONITOR_SECONDS * 5):
                responds = await self._engine.health() is None
        except (EngineError, TimeoutError):
            responds = False
        load = None
        if responds:
            self._down_since = None
            # An engine that responds is usable without statistics.
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_MONITOR_SECONDS * 5):
                    load = await self._engine.load()
        elif self._down_since is None:
            self._down_since = time.monotonic()
        self.load = load

    async def _check_forever(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(_MONITOR_SECONDS)
