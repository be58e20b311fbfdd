"""Time-outs of the engine: a call to which the engine sends nothing for too long ends with status 504.

Only the time in which a call waits for the engine counts, not the time in which its client is slow to read. Restarting
a timer at every token would cost time, so each call has one timer, which checks at intervals how long the call has
waited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from polar_proxy.config import GatewaySettings
from polar_proxy.errors import EngineError

REPORTED_SECONDS = 60.0
"""After a time-out the engine is reported as unusable for this long, or until it sends a token. Afterwards it is
reported as usable again, because only a new call shows whether it samples."""


class EngineTimeouts:
    """The time-outs of one gateway's engine, and whether this engine can sample."""

    def __init__(self, settings: GatewaySettings, health: Callable[[], Awaitable[str | None]]) -> None:
        """`health` returns why the engine cannot be used, or None."""
        self.first, self.next = settings.first_token_seconds, settings.next_token_seconds
        self._health = health
        self._timed_out: str | None = None
        self._timed_out_at = 0.0

    async def problem(self) -> str | None:
        """Return why the engine cannot sample, or None if no problem is known."""
        if self._timed_out is not None and time.monotonic() - self._timed_out_at > REPORTED_SECONDS:
            self._timed_out = None
        return await self._health() or self._timed_out

    def sampled(self) -> None:
        self._timed_out = None

    def timed_out(self, seconds: float) -> EngineError:
        self._timed_out = f"The engine sent nothing for {seconds:g} s to a call that waited for it"
        self._timed_out_at = time.monotonic()
        return EngineError(f"{self._timed_out}.", status=504)


class EngineWait:
    """`async with EngineWait(timeouts) as wait:` raises EngineError 504 if the block waits too long for the engine.

    The clock starts with the block, is stopped by `received`, and is started again by `resume`.
    """

    def __init__(self, timeouts: EngineTimeouts) -> None:
        self._timeouts = timeouts
        self._limit = timeouts.first
        self._loop = asyncio.get_running_loop()
        self._since: float | None = self._loop.time()
        self._scope = asyncio.timeout(None)

    def received(self) -> None:
        """Stop the clock, because the engine sent something."""
        self._since = None

    def resume(self) -> None:
        """Start the clock again, for the next token."""
        self._since = self._loop.time()
        self._limit = self._timeouts.next

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._timer = self._loop.call_later(min(self._timeouts.first, self._timeouts.next), self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as timeout:
            raise self._timeouts.timed_out(self._limit) from timeout

    def _check(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._limit
        if due > now:
            self._timer = self._loop.call_at(due, self._check)
        else:
            self._scope.reschedule(now)
