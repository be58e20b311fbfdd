"""Health: whether calls can be recorded and sampled now, and what happens to store operations while the store fails.

`StoreMonitor` is a circuit breaker. Promises:

* While the store is known to fail, no request waits for it: `run` raises at once, and the store is probed every second.
* A slow operation is awaited as long as the store answers probes. If the store hangs, the caller gets an error within
  seconds.
* An outage is one line in the log when it begins and one when it ends.
* Once the store can be written again, `on_writable` is called before calls are recorded.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from polar_proxy.errors import PolarError, RequestError, StoreError
from polar_proxy.store import Store
from polar_proxy.store.database import StoreUncertainError

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_AGE_SECONDS = 1.0
"""The result of a check is used again for this long. A later request for the result repeats the check."""
_ANSWER_SECONDS = 1.5
"""Time after which a check that has not ended counts as hanging."""
_LOOP_SECONDS = 0.1
"""The duration of a check is counted in waits of this length. If the event loop is busy, a wait takes longer, but is
still counted with this length. So a busy event loop does not make a check count as hanging."""
_SLOW_SECONDS = 4.0
"""Time after which an operation counts as slow. The store is then probed, and we go on waiting for the operation only
if the store answers. A commit that cannot reach the database server fails earlier (`group_commit.PATIENCE_SECONDS`);
then nothing was stored."""
_PROBE_PAUSE_SECONDS = 1.0
_RETRY_AFTER = "5"
"""Value of the header `retry-after`, in seconds, if a call could not be recorded."""


class HealthCheck:
    """A check that is repeated if its last result is older than `MAX_AGE_SECONDS`. A check that hangs has failed."""

    def __init__(self, name: str, check: Callable[[], Awaitable[str | None]]) -> None:
        """`check` returns the problem, or None if there is none. A PolarError that it raises counts as the problem."""
        self.problem: str | None = None
        self._name = name
        self._check = check
        self._task: asyncio.Task[None] | None = None
        self._began = self._ended = -math.inf

    async def result(self, max_age: float = MAX_AGE_SECONDS) -> str | None:
        """Return the problem that the check finds, or None if there is none. Takes less than two seconds."""
        if time.monotonic() - self._ended < max_age:
            return self.problem
        if self._task is None or self._task.done():
            self._began = time.monotonic()
            self._task = asyncio.create_task(self._run())
        for _ in range(round(_ANSWER_SECONDS / _LOOP_SECONDS)):
            if (await asyncio.wait([self._task], timeout=_LOOP_SECONDS))[0]:
                break
        else:
            self._ended = time.monotonic()
            self.problem = f"{self._name} has not answered for {self._ended - self._began:.0f} s"
        return self.problem

    async def _run(self) -> None:
        try:
            self.problem = await self._check()
        except PolarError as error:
            self.problem = str(error)
        self._ended = time.monotonic()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class OutageLog:
    """Logs the first failure of an outage and the first success after it, but no failure in between."""

    def __init__(self, what: str) -> None:
        """`what`: what does not work during an outage; it is part of the log messages."""
        self._what = what
        self._since: float | None = None

    def failed(self, problem: object) -> None:
        if self._since is None:
            self._since = time.monotonic()
            log.warning("%s: %s", self._what, problem)

    def worked(self) -> None:
        if self._since is not None:
            log.warning("ended after %.0f s: %s", time.monotonic() - self._since, self._what)
            self._since = None


class StoreMonitor:
    """Watches the store from the first failure until the store can be written again, or until `close`."""

    def __init__(self, store: Store, on_writable: Callable[[], Awaitable[None]]) -> None:
        """`on_writable` writes what could not be written in an outage. If it raises StoreError, it is called again."""
        self.problem: str | None = None
        """Why the store cannot be written; None if it can, as far as is known."""
        self._check = HealthCheck("The database", lambda: _probe(store))
        self._on_writable = on_writable
        self._outage = OutageLog("calls cannot be recorded")
        self._watching: asyncio.Task[None] | None = None
        self._due = False
        """True if `on_writable` must be called: `watch` asked for the call, or the last call failed."""

    async def close(self) -> None:
        """Stop watching. If `on_writable` is still due after an outage and the store can be written, call it now."""
        if self._watching is not None and not self._watching.done():
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            if await self._check.result() is None:
                await self._on_writable()
            else:
                log.warning("sessions that lost calls are marked in the store when it is opened next")
        await self._check.close()

    async def check(self) -> str | None:
        """Return the reason why the store cannot be written now; None if it can. Takes less than two seconds."""
        await self._learn(MAX_AGE_SECONDS)
        return self.problem

    def refusal(self) -> RequestError:
        """Return the error for a call that cannot be recorded."""
        reason = self.problem or "the database refused it"
        text = f"This call cannot be recorded, so it is not answered: {reason}. Try again later."
        error = RequestError(text, status=503, code="not_recorded")
        error.retry_after = _RETRY_AFTER
        return error

    async def run(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run a store operation as `wait_for` does. While the store is known to fail, raise StoreError at once
        instead."""
        if self.problem is not None:
            raise StoreError(self.problem)
        return await self.wait_for(operation())

    async def wait_for(self, operation: Awaitable[T]) -> T:
        """Return the result of a store operation.

        Raises StoreError if the operation fails. Raises StoreUncertainError if a health check during the operation
        finds that the store fails; the operation then goes on and may still have an effect.
        """
        task = asyncio.ensure_future(operation)
        task.add_done_callback(_retrieve)
        while not (await asyncio.wait([task], timeout=_SLOW_SECONDS))[0]:
            await self._learn(0.0)
            if self.problem is not None:
                raise StoreUncertainError(self.problem)
        try:
            return task.result()
        except StoreError:
            await self._learn(0.0)
            raise

    def watch(self) -> None:
        """Call `on_writable` as soon as the store can be written."""
        self._due = True
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._until_writable(), name="polar-store-monitor")

    async def _learn(self, max_age: float) -> None:
        problem = await self._check.result(max_age)
        if problem is not None:
            self.problem = problem
            self._outage.failed(problem)
            self.watch()

    async def _until_writable(self) -> None:
        while self._due:
            problem = await self._check.result()
            if problem is None:
                self._due = False
                try:
                    await self._on_writable()
                except StoreError as error:
                    self._due, problem = True, str(error)
            self.problem = problem
            if problem is not None:
                self._outage.failed(problem)
                await asyncio.sleep(_PROBE_PAUSE_SECONDS)
        self._outage.worked()


async def _probe(store: Store) -> None:
    await store.database.probe()


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an operation that is no longer awaited, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
