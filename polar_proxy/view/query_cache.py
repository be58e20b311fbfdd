"""Query results that requests share for a moment, so that many open pages cost little more than one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

from cachetools import TTLCache

T = TypeVar("T")

_KEPT = 500


class QueryCache:
    """Query results by key, each kept for `seconds`. If the query of a key still runs, further requests for the key
    wait for its result."""

    def __init__(self, seconds: float) -> None:
        self._tasks: TTLCache[Hashable, asyncio.Task[Any]] = TTLCache(_KEPT, seconds)

    async def get(self, key: Hashable, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the key's last result. If there is none, or it is too old, call `read` and return the new result.

        Raises the errors of `read`; later requests within `seconds` get the same error."""
        task: asyncio.Task[T] | None = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(read())
            task.add_done_callback(_retrieve_error)
        return await asyncio.shield(task)  # a request that is cancelled must not cancel the others' query


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Retrieve the task's error. If nobody does (all waiting requests were cancelled), asyncio logs the error."""
    if not task.cancelled():
        task.exception()
