"""Whether the engine answers, and how busy it is: rollouts wait for it, instead of failing one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Self

from polar_proxy.config import AdmissionSettings
from polar_proxy.engines.base import Engine, EngineLoad
from polar_proxy.errors import EngineError

ENGINE_DOWN = "the engine does not answer"
ENGINE_CACHE_FULL = "the engine's cache is full"
ENGINE_QUEUE_LONG = "the engine's queue is long"


class EngineMonitor:
    """`async with EngineWatch(engine, patience) as watch:` asks every few seconds; `watch.refusal` is an `Admission`,
    `watch.crowded` says why no agent should join those that run.

    After `patience` seconds without an answer agents are let in all the same: they fail, are tried again as often as
    is allowed, and so every rollout comes to an end. An engine that does not say how busy it is is never crowded.
    """

    def __init__(
        self, engine: Engine, patience: float, limits: AdmissionSettings | None = None, *, every: float = 2.0
    ) -> None:
        self._engine = engine
        self._patience = patience
        self._limits = limits or AdmissionSettings()
        self._every = every
        self._gone_since: float | None = None
        self.load: EngineLoad | None = None
        """As it was a moment ago."""

    def refusal(self) -> str | None:
        """Why no agent should begin now, or None."""
        if self._gone_since is None or time.monotonic() - self._gone_since > self._patience:
            return None
        return ENGINE_DOWN

    def crowded(self) -> str | None:
        """Why no agent should join those that run, or None."""
        if self.load is None:
            return None
        if self.load.kv_usage is not None and self.load.kv_usage > self._limits.engine_kv:
            return ENGINE_CACHE_FULL
        if self.load.waiting is not None and self.load.waiting > self._limits.engine_queue * self.load.replicas:
            return ENGINE_QUEUE_LONG
        return None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch(), name="polar-engine-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def look(self) -> None:
        """Ask now."""
        try:
            async with asyncio.timeout(self._every * 5):
                reason = await self._engine.health()
        except (EngineError, TimeoutError) as error:
            reason = str(error) or "no answer"
        if reason is None:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = time.monotonic()
        self.load = await self._look_at_load() if reason is None else None

    async def _look_at_load(self) -> EngineLoad | None:
        """None where it is not known: an engine that answers is not kept waiting for want of its statistics."""
        try:
            async with asyncio.timeout(self._every * 5):
                return await self._engine.load()
        except (EngineError, TimeoutError):
            return None

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._every)
