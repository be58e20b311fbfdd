"""A pool of sandboxes that are opened before they are needed.

Promises:

* each sandbox is empty, is taken only once, and is checked to be alive when it is taken;
* at most `size` sandboxes wait in the pool; those that are left at the end are closed;
* `expect` fills the pool for one specification; with the option `refill`, `take` does so too. The pool then holds
  as many sandboxes of this specification, open or still opening, as are taken while one sandbox opens: at least one,
  and at most `size`.

After `kill -9` of the process, the waiting sandboxes are removed like all sandboxes of dead processes
(`sandboxes.orphans.sweep`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import asdict, dataclass, field
from typing import Self

from cachetools import LRUCache

from sandboxes.base import Sandbox, SandboxError, SandboxKind, SandboxSpec, uncancellable
from sandboxes.choice import open_sandbox

SandboxOpener = Callable[[SandboxKind, SandboxSpec], Awaitable[Sandbox]]

log = logging.getLogger(__name__)

_LIVENESS_SECONDS = 5.0
_MAX_TRACKED_SPECS = 256
"""Number of specifications whose demand is remembered. Limited, because each task may have its own image."""


@dataclass(slots=True)
class SpecDemand:
    """The demand for sandboxes of one specification."""

    taken: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    """Times at which a sandbox was taken, by the event loop's clock."""
    opening: float = 0.0
    """Seconds that the last sandbox took to open."""


@dataclass(slots=True)
class PoolCounts:
    """Results of taking a sandbox, for the metrics."""

    hits: int = 0
    misses: int = 0
    dead: int = 0
    """Number of sandboxes in the pool that had died or failed to open; another one was taken instead."""
    waited_seconds: float = 0.0
    """Seconds that all callers of `take` waited in total."""


class SandboxPool:
    """`async with SandboxPool(size) as pool:` then `pool.take(kind, spec)` returns a sandbox that the caller closes."""

    def __init__(self, size: int, *, refill: bool = False, opener: SandboxOpener = open_sandbox) -> None:
        """With `refill`, `take` also opens sandboxes for later requests; otherwise only `expect` does."""
        self._size = size
        self._refill = refill
        self._open = opener
        self._waiting: list[tuple[Hashable, asyncio.Task[Sandbox]]] = []
        """(specification, opening task) of each waiting sandbox, oldest first."""
        self._closing: set[asyncio.Task[None]] = set()
        self._demands: LRUCache[Hashable, SpecDemand] = LRUCache(_MAX_TRACKED_SPECS)
        self.count = PoolCounts()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._size = 0
        waiting, self._waiting = self._waiting, []
        await uncancellable(_close([task for _, task in waiting]))
        await asyncio.gather(*self._closing)

    @property
    def waiting(self) -> int:
        """Number of sandboxes that wait in the pool, including those that are opening."""
        return len(self._waiting)

    def counts(self) -> dict[str, float]:
        """Return waiting, size, hits, misses, dead and waited_seconds, for the metrics."""
        return {"waiting": self.waiting, "size": self._size, **asdict(self.count)}

    async def take(self, kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox of this kind and specification. Raises SandboxError.

        A sandbox from the pool has the container labels with which it was opened, not those of `spec`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        key = _key(kind, spec)
        self._demand(key).taken.append(began)
        sandbox: Sandbox | None = None
        while sandbox is None and (task := self._next(key)) is not None:
            sandbox = await self._checked(key, task)
        if sandbox is None:
            self.count.misses += 1
            sandbox = await self._open_timed(key, kind, spec)
        else:
            self.count.hits += 1
        self.count.waited_seconds += loop.time() - began
        if self._refill:
            self._fill(key, kind, spec, began)
        return sandbox

    def expect(self, kind: SandboxKind, spec: SandboxSpec) -> None:
        """Open sandboxes of this specification in advance. Call it when a sandbox will be taken soon.

        If the pool is full, sandboxes of other specifications are closed to make room, the oldest first.
        """
        self._fill(_key(kind, spec), kind, spec, asyncio.get_running_loop().time())

    def _fill(self, key: Hashable, kind: SandboxKind, spec: SandboxSpec, requested_at: float) -> None:
        for _ in range(self._target(key, requested_at) - sum(other == key for other, _ in self._waiting)):
            while len(self._waiting) >= self._size:
                oldest = next(number for number, (other, _) in enumerate(self._waiting) if other != key)
                closing = asyncio.create_task(_close([self._waiting.pop(oldest)[1]]))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._waiting.append((key, asyncio.create_task(self._open_timed(key, kind, spec))))

    def _target(self, key: Hashable, requested_at: float) -> int:
        """Return how many sandboxes of this specification should wait in the pool (Little's law).

        The pool needs as many sandboxes as are taken while one opens. So count the sandboxes taken in the d seconds
        before `requested_at`, the time of the current request, and since then. The last sandbox took d seconds to open.
        Do not count from now - d: if the current request waited long, earlier requests would not be counted."""
        demand = self._demand(key)
        since = requested_at - demand.opening
        return min(self._size, max(1, sum(taken > since for taken in demand.taken)))

    def _demand(self, key: Hashable) -> SpecDemand:
        return self._demands.setdefault(key, SpecDemand())

    async def _open_timed(self, key: Hashable, kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        loop = asyncio.get_running_loop()
        began = loop.time()
        sandbox = await self._open(kind, spec)
        self._demand(key).opening = loop.time() - began
        return sandbox

    def _next(self, key: Hashable) -> asyncio.Task[Sandbox] | None:
        for number, (other, task) in enumerate(self._waiting):
            if other == key:
                del self._waiting[number]
                return task
        return None

    async def _checked(self, key: Hashable, task: asyncio.Task[Sandbox]) -> Sandbox | None:
        """Return the sandbox that `task` opens, or None if it failed to open or has died."""
        try:
            sandbox = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._waiting.append((key, task))
            raise
        except (SandboxError, OSError):
            self.count.dead += 1
            return None
        try:
            alive = (await sandbox.exec(("true",), timeout=_LIVENESS_SECONDS)).exit_code == 0
        except (SandboxError, OSError):
            alive = False
        except BaseException:
            await uncancellable(sandbox.close())
            raise
        if not alive:
            self.count.dead += 1
            await sandbox.close()
            return None
        return sandbox


def _key(kind: SandboxKind, spec: SandboxSpec) -> Hashable:
    """Return a key that interchangeable sandboxes share: the kind and the specification without its labels."""
    env = tuple(sorted(spec.env.items()))
    return kind, spec.image, spec.mounts, spec.limits, env, spec.workdir, spec.folders, spec.hosts


async def _close(tasks: list[asyncio.Task[Sandbox]]) -> None:
    """Close the sandboxes that are open and stop opening the others."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Sandbox):
            try:
                await result.close()
            except (SandboxError, OSError):
                log.exception("an unused sandbox cannot be closed; the next start removes it")
