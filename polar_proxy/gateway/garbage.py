"""Garbage collection in small steps, and full collections while no request waits.

The garbage collector of Python stops the process for about a microsecond per object that it examines, and a gateway
with many long sessions keeps a million objects. By itself the collector starts when the number of objects has grown by
a threshold. Once the caches are full, new entries replace old ones and the number hardly grows, so the collector
examines nothing for a long time and then everything.

* Four times a second, the objects that were made since the last step are examined. Objects that are still in use at a
  step are not examined again before the next full collection. A busy gateway makes so many objects that a step would
  take 60 ms if steps came only once a second.
* A full collection runs when no request is being answered, and at the latest after an hour. It is needed only for
  reference cycles that were still in use when a step examined them. Calls leave no such cycles
  (`tests/gateway/test_cyclic_garbage.py`).
* Nothing is collected while the process has disabled the collector (`gc.disable`).
* The objects made at start-up are never examined: they live as long as the process.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Self

_YOUNG = 1
"""The older of the two generations that a step examines."""
_THRESHOLDS = (20_000, 50, 1_000_000)
"""Thresholds of Python's own collector, which still runs if many objects are made from one small collection to the
next. The third is so high that Python never begins a full collection itself."""


class GarbageCollection:
    """`async with GarbageCollection(idle):` collects garbage until the block ends."""

    def __init__(
        self, idle: Callable[[], bool], *, step: float = 0.25, pause: float = 60.0, longest: float = 3600.0
    ) -> None:
        """`idle` returns whether no request is being answered.

        All times are in seconds. `step`: the time from one small collection to the next. `pause`: the shortest time
        between two full collections. `longest`: the time after a full collection at which the next one runs even if
        requests are being answered.
        """
        self._idle = idle
        self._step = step
        self._pause = pause
        self._longest = longest

    async def __aenter__(self) -> Self:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        self._task = asyncio.create_task(self._run(), name="polar-garbage-collection")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        whole_at, worked, was_idle = time.monotonic(), False, False
        while True:
            await asyncio.sleep(self._step)
            if not gc.isenabled():
                continue
            idle, since = self._idle(), time.monotonic() - whole_at
            worked = worked or not idle
            if since >= self._longest or (worked and idle and was_idle and since >= self._pause):
                gc.collect()
                whole_at, worked = time.monotonic(), False
            else:
                gc.collect(_YOUNG)
            was_idle = idle
