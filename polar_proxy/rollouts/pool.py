"""Sandboxes opened ahead of need.

Promises:

* a sandbox that is handed out was empty and alive a moment ago, and is handed out once;
* never more than `size` wait on the shelf; whatever is left there is closed at the end;
* of a sort that is asked for often, as many wait as are taken while one is opened.

After `kill -9` the sandboxes on the shelf are orphans like any others, and are swept as those are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from sandboxes import Sandbox, SandboxError, SandboxSpec, open_sandbox
from sandboxes.base import SandboxKind, uncancellable

SandboxOpener = Callable[[SandboxKind, SandboxSpec], Awaitable[Sandbox]]

log = logging.getLogger(__name__)

_LIVENESS_SECONDS = 5.0
_MAX_TRACKED_SPECS = 256
"""Of so many sorts it is remembered how they are asked for: each task may have an image of its own."""


@dataclass(slots=True)
class SpecDemand:
    """How sandboxes of one sort are asked for."""

    taken: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    """When, in the event loop's time."""
    opening: float = 0.0
    """Seconds that the last one took to open."""


@dataclass(slots=True)
class PoolCounts:
    """What came of asking, for the metrics."""

    hits: int = 0
    misses: int = 0
    dead: int = 0
    """Taken from the shelf and found dead, or never opened: another one was taken instead."""
    waited: float = 0.0
    """Seconds that all who asked waited together."""


class SandboxPool:
    """`async with Pool(size) as pool:` then `pool.take(kind, spec)` gives a sandbox, which the taker closes."""

    def __init__(self, size: int, *, refill: bool = False, opener: SandboxOpener = open_sandbox) -> None:
        """`refill`: whoever takes one has the next of its sort opened; else only what is `expect`ed is."""
        self._size = size
        self._refill = refill
        self._open = opener
        self._shelf: list[tuple[Hashable, asyncio.Task[Sandbox]]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._sorts: dict[Hashable, SpecDemand] = {}
        self.count = PoolCounts()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._size = 0
        shelf, self._shelf = self._shelf, []
        await uncancellable(_close([task for _, task in shelf]))
        await asyncio.gather(*self._closing)

    @property
    def waiting(self) -> int:
        """How many are on the shelf, those that are being opened included."""
        return len(self._shelf)

    def counts(self) -> dict[str, float]:
        """For the metrics: on_shelf, size, hits, misses, dead, waited_seconds."""
        return {
            "on_shelf": self.waiting,
            "size": self._size,
            "hits": self.count.hits,
            "misses": self.count.misses,
            "dead": self.count.dead,
            "waited_seconds": self.count.waited,
        }

    async def take(self, kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        """A sandbox of this kind and specification; the labels may be another's. Raises SandboxError."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        key = _key(kind, spec)
        self._sort(key).taken.append(began)
        sandbox: Sandbox | None = None
        while sandbox is None and (task := self._next(key)) is not None:
            sandbox = await self._checked(key, task)
        if sandbox is None:
            self.count.misses += 1
            sandbox = await self._opened(key, kind, spec)
        else:
            self.count.hits += 1
        self.count.waited += loop.time() - began
        if self._refill:
            self._fill(key, kind, spec, began)
        return sandbox

    def expect(self, kind: SandboxKind, spec: SandboxSpec) -> None:
        """One more of this sort will be taken soon: open as many as are missing from the shelf. Where that is full, the
        sandbox of another sort that has been there longest makes room."""
        self._fill(_key(kind, spec), kind, spec, asyncio.get_running_loop().time())

    def _fill(self, key: Hashable, kind: SandboxKind, spec: SandboxSpec, asked: float) -> None:
        for _ in range(self._wanted(key, asked) - sum(other == key for other, _ in self._shelf)):
            while len(self._shelf) >= self._size:
                longest = next(number for number, (other, _) in enumerate(self._shelf) if other != key)
                closing = asyncio.create_task(_close([self._shelf.pop(longest)[1]]))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            self._shelf.append((key, asyncio.create_task(self._opened(key, kind, spec))))

    def _wanted(self, key: Hashable, asked: float) -> int:
        """How many of this sort should wait: as many as are taken while one is opened (Little's law), up to the
        moment when it was asked for: what the asker waited since then says nothing of the need. At least one."""
        sort = self._sort(key)
        since = asked - sort.opening
        return min(self._size, max(1, sum(taken > since for taken in sort.taken)))

    def _sort(self, key: Hashable) -> SpecDemand:
        if key not in self._sorts:
            while len(self._sorts) >= _MAX_TRACKED_SPECS:
                del self._sorts[next(iter(self._sorts))]
            self._sorts[key] = SpecDemand()
        return self._sorts[key]

    async def _opened(self, key: Hashable, kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        loop = asyncio.get_running_loop()
        began = loop.time()
        sandbox = await self._open(kind, spec)
        self._sort(key).opening = loop.time() - began
        return sandbox

    def _next(self, key: Hashable) -> asyncio.Task[Sandbox] | None:
        for number, (other, task) in enumerate(self._shelf):
            if other == key:
                del self._shelf[number]
                return task
        return None

    async def _checked(self, key: Hashable, task: asyncio.Task[Sandbox]) -> Sandbox | None:
        """The sandbox of a task that was on the shelf, or None where it is dead or was never opened."""
        try:
            sandbox = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._shelf.append((key, task))
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
    """Everything of a sandbox but its labels."""
    parts = (spec.image, spec.mounts, spec.limits, tuple(sorted(spec.env.items())), spec.workdir, spec.folders)
    return kind, *parts


async def _close(tasks: list[asyncio.Task[Sandbox]]) -> None:
    """Close what was opened and stop what is being opened."""
    for task in tasks:
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(found, Sandbox):
            try:
                await found.close()
            except (SandboxError, OSError):
                log.exception("a sandbox that nobody took cannot be closed; the next start sweeps it")
