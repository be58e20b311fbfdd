"""Conditions under which no further rollout may start: too little memory here, or an engine that is down or busy.

`MemoryAdmission.refusal`, `EngineMonitor.down` and `EngineMonitor.busy` are admission checks of `stage_limits`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from polar_proxy.config import AdmissionSettings
from polar_proxy.engines.base import Engine, EngineLoad
from polar_proxy.errors import EngineError
from polar_proxy.rollouts.stage_limits import AdmissionRequest

TOO_LITTLE_MEMORY = "too little memory"
ENGINE_DOWN = "the engine does not answer"
ENGINE_CACHE_FULL = "the engine's cache is full"
ENGINE_QUEUE_LONG = "the engine's queue is long"

RESERVATION_SECONDS = 60.0
"""After this time the memory that a sandbox uses is visible in the machine's free memory."""
_UNLIMITED = 1 << 60
"""A control group without a limit reports a number of this order (version 1), or `max` (version 2)."""
_CGROUP_FILES = (
    # (usage, limit, statistics, the statistic of memory that can be reclaimed)
    ("memory.current", "memory.max", "memory.stat", "inactive_file"),
    ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def free_memory_mb(root: Path = Path("/")) -> int | None:
    """Return the MiB that processes can still allocate, as limited by the machine and by the current control group.

    None if the system does not report it, because it is not Linux."""
    try:
        meminfo = _read_fields((root / "proc/meminfo").read_text())
    except OSError:
        return None
    if "MemAvailable" not in meminfo:
        return None
    free = meminfo["MemAvailable"] << 10
    for usage, limit, statistics, reclaimable in _CGROUP_FILES:
        folder = root / "sys/fs/cgroup"
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            reclaimed = _read_fields((folder / statistics).read_text()).get(reclaimable, 0)
        except (OSError, ValueError):
            continue
        if most < _UNLIMITED:
            free = min(free, most - used + reclaimed)
    return max(0, free >> 20)


def _read_fields(text: str) -> dict[str, int]:
    """Parse lines of a name and a number."""
    rows = (line.split() for line in text.splitlines())
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
        """`need_mb` is for rollouts that do not say what they need; 0 turns the check off. `reserve_mb` stays free."""
        self._need = need_mb
        self._reserve = reserve_mb
        self._free = free
        self._clock = clock
        self._reserved: dict[str, tuple[float, int]] = {}
        """(end of the reservation, MiB) by rollout id."""

    def refusal(self, request: AdmissionRequest) -> str | None:
        """Return why there is no memory for the rollout's sandbox, or reserve it and return None."""
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
        """End the rollout's reservation, because its sandbox is closed."""
        self._reserved.pop(rollout_id, None)


class EngineMonitor:
    """Watches whether the engine responds and how busy it is, so that rollouts wait for it instead of failing.

    `async with EngineMonitor(engine, patience) as monitor:` asks the engine every few seconds. After `patience` seconds
    without a response agents are admitted anyway: they fail and use up their attempts, so that every rollout ends. An
    engine that does not report its load never counts as busy.
    """

    def __init__(
        self, engine: Engine, patience: float, limits: AdmissionSettings | None = None, *, every: float = 2.0
    ) -> None:
        self._engine = engine
        self._patience = patience
        self._limits = limits or AdmissionSettings()
        self._every = every
        self._down_since: float | None = None
        self.load: EngineLoad | None = None
        """The load at the last check, if the engine reports it."""

    def down(self) -> str | None:
        """Return why no agent should start now, or None."""
        if self._down_since is None or time.monotonic() - self._down_since > self._patience:
            return None
        return ENGINE_DOWN

    def busy(self) -> str | None:
        """Return why no agent should join those that run, or None."""
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def check(self) -> None:
        """Query the engine's health and load now."""
        try:
            async with asyncio.timeout(self._every * 5):
                reason = await self._engine.health()
        except (EngineError, TimeoutError) as error:
            reason = str(error) or "no answer"
        if reason is None:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = time.monotonic()
        self.load = await self._read_load() if reason is None else None

    async def _read_load(self) -> EngineLoad | None:
        """Return the load; None if it is not reported, because an engine that responds is usable without statistics."""
        try:
            async with asyncio.timeout(self._every * 5):
                return await self._engine.load()
        except (EngineError, TimeoutError):
            return None

    async def _check_forever(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(self._every)
