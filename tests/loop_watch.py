"""Measures for how long an event loop is blocked by its own thread's work and waits, and not by the machine.

On a busy machine the operating system pauses the loop, so the time between two turns is no measure. Between the end of
one `select` and the beginning of the next, this counts the thread's processor time, or all of the time if the thread
gave up the processor itself (in a blocking call, and not by preemption).
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LoopWatch:
    worst = 0.0
    """The longest time in seconds for which one turn blocked the loop."""
    worst_work = 0.0
    """The longest processor time in seconds of one turn."""
    turns = 0


_WORK_SECONDS = 0.011
"""Processor time of `slowness`'s work on the machine for which the tests' limits were chosen, while it was idle."""


def slowness() -> float:
    """Return how many times longer fixed work takes now than on an idle machine, at least 1.

    Other programs slow a processor down (shared caches, hyper-threads), so limits on processor time are multiplied by
    this.
    """
    began = time.thread_time()
    sum(number * number for number in range(200_000))
    return max(1.0, (time.thread_time() - began) / _WORK_SECONDS)


@contextmanager
def watched() -> Iterator[LoopWatch]:
    """Watch the running loop, from its next turn on."""
    selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select, watch = selector.select, LoopWatch()
    began: tuple[float, float, int] | None = None

    def now() -> tuple[float, float, int]:
        given_away = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        return time.monotonic(), time.thread_time(), given_away

    def watching(timeout: float | None = None) -> Any:
        nonlocal began
        if began is not None:
            wall, cpu, given_away = (after - before for before, after in zip(began, now(), strict=True))
            watch.worst = max(watch.worst, wall if given_away else cpu)
            watch.worst_work = max(watch.worst_work, cpu)
            watch.turns += 1
        try:
            return select(timeout)
        finally:
            began = now()

    selector.select = watching
    try:
        yield watch
    finally:
        selector.select = select
