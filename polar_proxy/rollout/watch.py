"""Whether the engine answers: rollouts wait while it does not, instead of failing one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Self

from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError


class EngineWatch:
    """`async with EngineWatch(engine, patience) as watch:` asks every few seconds; `watch.refusal` is an admission.

    After `patience` seconds without an answer agents are let in all the same: they fail, are tried again as often as
    is allowed, and so every rollout comes to an end.
    """

    def __init__(self, engine: Engine, patience: float, *, every: float = 2.0) -> None:
        self._engine = engine
        self._patience = patience
        self._every = every
        self._gone_since: float | None = None

    def refusal(self) -> str | None:
        """Why no agent should begin now, or None."""
        if self._gone_since is None or time.monotonic() - self._gone_since > self._patience:
            return None
        return "the engine does not answer"

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

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._every)
