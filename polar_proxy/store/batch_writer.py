"""Writing in batches: items that arrive during one write are written together by the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

_MAX_BATCH = 256

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class BatchWriter(Generic[ItemT, ResultT]):
    """Collects the items that arrive while a batch is written, and writes them together as the next batch.

    `write` gets each item with the future that `add` returned for it, and must resolve all futures.
    """

    def __init__(self, write: Callable[[Sequence[tuple[ItemT, asyncio.Future[ResultT]]]], Awaitable[None]]) -> None:
        self._write_batch = write
        self._waiting: list[tuple[ItemT, asyncio.Future[ResultT]]] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, item: ItemT) -> asyncio.Future[ResultT]:
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="polar-store-writer")
        return future

    def take_waiting(self) -> Sequence[tuple[ItemT, asyncio.Future[ResultT]]]:
        """Remove the waiting items and return them with their futures, which the caller must resolve."""
        waiting, self._waiting = self._waiting, []
        return waiting

    async def stop(self) -> None:
        """Wait until everything is written."""
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while self._waiting:
            batch = self._waiting[:_MAX_BATCH]
            del self._waiting[:_MAX_BATCH]
            await self._write_batch(batch)


def concerns_any_record(error: Exception) -> bool:
    """Return whether the cause of this error is the database (locked, full or unreachable). Any other record would then
    fail too."""
    cause = error.__cause__
    return isinstance(cause, OperationalError | PoolTimeout | OSError) or (
        isinstance(cause, DBAPIError) and cause.connection_invalidated
    )
