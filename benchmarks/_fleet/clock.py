"""An event loop with a virtual clock, which jumps to the next timer when all tasks wait.

    with asyncio.Runner(loop_factory=VirtualLoop) as runner: runner.run(main())

`loop.time()`, and with it `asyncio.sleep`, `call_later` and `timeout`, are virtual. Work outside of the loop (a
database in its thread) takes no virtual time: `real_time(loop)` stops the clock while it is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import selectors
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from polar_proxy.store.database import Repository


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = 0.0
        self.outside = 0
        """Number of tasks that wait for something outside of the loop."""
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._virtual

    def advance(self, seconds: float) -> None:
        self._virtual += seconds

    async def shutdown_default_executor(self) -> None:
        with real_time(self):
            await super().shutdown_default_executor()


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """A selector that advances the virtual clock to the next timer instead of waiting for it."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        if self._loop.outside:
            return super().select(None)  # the work outside wakes the loop when it ends
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and there is no timer")
        self._loop.advance(timeout)
        return super().select(0)


@contextlib.contextmanager
def real_time(loop: VirtualLoop) -> Iterator[None]:
    """Stop the clock while the block runs."""
    loop.outside += 1
    try:
        yield
    finally:
        loop.outside -= 1


class RealTimeProxy:
    """An object whose coroutine methods, and those of its attributes, take no virtual time.

    `seconds` and `operations` count the real time and the number of these calls.
    """

    def __init__(self, inner: Any, loop: VirtualLoop) -> None:
        self._inner = inner
        self._loop = loop
        self.seconds = 0.0
        self.operations = 0
        self._since = 0.0
        self._open = 0

    def __getattr__(self, name: str) -> Any:
        return self._wrap(getattr(self._inner, name))

    def _wrap(self, found: Any) -> Any:
        if isinstance(found, Repository | SimpleNamespace):
            return _RealTimeRepository(found, self._wrap)
        if not inspect.iscoroutinefunction(found):
            return found

        async def method(*args: Any, **given: Any) -> Any:
            self.operations += 1
            if not self._open:
                self._since = time.perf_counter()
            self._open += 1
            try:
                with real_time(self._loop):
                    return await found(*args, **given)
            finally:
                self._open -= 1
                if not self._open:
                    self.seconds += time.perf_counter() - self._since

        return method


class _RealTimeRepository:
    """A repository of the store whose coroutine methods are wrapped."""

    def __init__(self, inner: Any, wrap: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._wrap = wrap

    def __getattr__(self, name: str) -> Any:
        return self._wrap(getattr(self._inner, name))
