"""Work outside of the event loop, for large requests.

A thread and the event loop use the interpreter in turns, but nothing interrupts a single C function, such as the
parsing of a whole body. So the thread rests after each piece of work for as long as the piece took. One such
thread then takes half of the interpreter's time at most, and the loop never waits for more than one C function. A
process has only a few such threads. If several work at once, they may take more than half together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_REST_AFTER_SECONDS = 0.01
"""Work shorter than this is not followed by a rest."""


class OffloadThread:
    """One thread, which does one piece of work after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._rests_until = 0.0

    async def run(self, large: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work(...)`. If `large` is true, compute it in the thread."""
        if not large:
            return work(*args, **kwargs)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._work, partial(work, *args, **kwargs))

    def close(self) -> None:
        """End the thread. A later `run` of large work starts a new thread."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _work(self, work: Callable[[], T]) -> T:
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        started = time.thread_time()
        try:
            return work()
        finally:
            worked = time.thread_time() - started
            if worked > _REST_AFTER_SECONDS:
                self._rests_until = time.monotonic() + worked
