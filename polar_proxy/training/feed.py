"""The leases that a trainer has open: kept alive while it works, written down for the process after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

import orjson

from polar_proxy.client import ApiError, UnreachableError
from polar_proxy.errors import StoreError
from polar_proxy.store.feed import GroupLease, LeaseBatch
from polar_proxy.training.checkpoint import write_file

log = logging.getLogger(__name__)

FEED_ERRORS = (StoreError, ApiError, UnreachableError)
"""What a feed may say instead of ending or extending a lease. The lease then runs out and its group comes again."""


class GroupFeed(Protocol):
    """The trainer feed, of the store in this process or of one elsewhere."""

    async def lease(
        self, consumer: str, limit: int, seconds: float, *, policy_version: str | None, max_staleness: int | None
    ) -> LeaseBatch: ...
    async def acknowledge(self, lease_id: str) -> None: ...
    async def release(self, lease_id: str) -> None: ...
    async def extend(self, lease_id: str, seconds: float) -> float: ...


class OpenLeases:
    """Open leases of one run, oldest first."""

    def __init__(self, feed: GroupFeed, run: Path, seconds: float, note: Callable[[str], None]) -> None:
        self._feed, self._seconds, self._note = feed, seconds, note
        self._file = run / "leases.json"
        self._open: list[GroupLease] = []

    def __iter__(self) -> Iterator[GroupLease]:
        return iter(list(self._open))

    async def take(self, consumer: str, limit: int, *, step: int, max_staleness: int | None) -> LeaseBatch:
        """As `GroupFeed.lease`, staleness counted from `step`. What is taken is written down before it is returned."""
        offer = await self._feed.lease(
            consumer, limit, self._seconds, policy_version=str(step), max_staleness=max_staleness
        )
        if offer.leases:
            self._open += offer.leases
            self._write()
        return offer

    async def acknowledge(self, lease: GroupLease) -> bool:
        """The group is done with. False: the lease had run out, and the group will be offered again."""
        try:
            await self._feed.acknowledge(lease.lease_id)
        except FEED_ERRORS as error:
            self._note(f"group {lease.group_id} cannot be acknowledged: {error}")
            return False
        finally:
            self._open.remove(lease)
            self._write()
        return True

    async def after_a_kill(self, trained: Collection[str]) -> None:
        """End what the process before had open: `trained` groups are acknowledged, the others offered again. A lease
        that it took and could not write down any more runs out by itself."""
        for row in orjson.loads(self._file.read_bytes()) if self._file.exists() else []:
            end = self._feed.acknowledge if row["group_id"] in trained else self._feed.release
            try:
                await end(row["lease_id"])
            except FEED_ERRORS as error:  # it has run out already
                self._note(f"group {row['group_id']}: {error}")
        self._write()

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Extended for as long as the block runs."""
        task = asyncio.create_task(self._extend_forever(), name="polar-leases")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _extend_forever(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 3)
            for lease in self:
                try:
                    await self._feed.extend(lease.lease_id, self._seconds)
                except FEED_ERRORS as error:
                    log.warning("group %s: %s", lease.group_id, error)

    def _write(self) -> None:
        rows = [{"lease_id": lease.lease_id, "group_id": lease.group_id} for lease in self._open]
        write_file(self._file, orjson.dumps(rows))
