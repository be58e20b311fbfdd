"""The trainer's side of the feed: its open leases, and reading a leased group with its traces."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import orjson

from polar_proxy.client import ApiError, UnreachableError
from polar_proxy.errors import StoreError
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.service.feed import GroupLease, LeaseBatch
from polar_proxy.traces import build
from polar_proxy.training.batch import GroupRollout, TrainingGroup
from polar_proxy.training.checkpoint import write_file
from polar_proxy.training.config import BuilderName
from polar_proxy.types import Trace

log = logging.getLogger(__name__)

FEED_ERRORS = (StoreError, ApiError, UnreachableError)
"""Errors that a feed may raise when a lease is ended or extended. The lease then expires, and its group is offered
again."""

STORED_BUILDER = "merged"
"""The builder whose traces are stored when a rollout ends. Traces of other builders are built when they are read."""


class GroupFeed(Protocol):
    """The feed of finished groups, of a local store or of a server."""

    async def lease(
        self, consumer: str, limit: int, seconds: float, *, policy_version: str | None, max_staleness: int | None
    ) -> LeaseBatch: ...
    async def acknowledge(self, lease_id: str) -> None: ...
    async def release(self, lease_id: str) -> None: ...
    async def extend(self, lease_id: str, seconds: float) -> float: ...


class GroupReader(Protocol):
    async def read_group(self, group_id: str, builder: BuilderName, staleness: int | None) -> TrainingGroup:
        """Return a finished group with the traces of its rollouts as `builder` makes them."""
        ...


class OpenLeases:
    """The open leases of one run, oldest first: extended while the process lives, and recorded on disk for the process
    that resumes after a kill."""

    def __init__(self, feed: GroupFeed, run: Path, seconds: float, report: Callable[[str], None]) -> None:
        self._feed, self._seconds, self._report = feed, seconds, report
        self._file = run / "leases.json"
        self._open: list[GroupLease] = []

    def __iter__(self) -> Iterator[GroupLease]:
        return iter(list(self._open))

    async def take(self, consumer: str, limit: int, *, step: int, max_staleness: int | None) -> LeaseBatch:
        """Lease groups; staleness is counted from `step`. The leases are on disk before this returns."""
        offer = await self._feed.lease(
            consumer, limit, self._seconds, policy_version=str(step), max_staleness=max_staleness
        )
        if offer.leases:
            self._open += offer.leases
            self._write()
        return offer

    async def acknowledge(self, lease: GroupLease) -> bool:
        """Mark the group as done. Returns False when the lease had expired, and the group will be offered again."""
        try:
            await self._feed.acknowledge(lease.lease_id)
        except FEED_ERRORS as error:
            self._report(f"group {lease.group_id} cannot be acknowledged: {error}")
            return False
        finally:
            self._open.remove(lease)
            self._write()
        return True

    async def settle_previous(self, trained: Collection[str]) -> None:
        """End the leases that the previous process held: acknowledge `trained` groups, give the others back.

        A lease that it took and could not record before it was killed expires by itself.
        """
        for row in orjson.loads(self._file.read_bytes()) if self._file.exists() else []:
            end = self._feed.acknowledge if row["group_id"] in trained else self._feed.release
            try:
                await end(row["lease_id"])
            except FEED_ERRORS as error:  # it has expired already
                self._report(f"group {row['group_id']}: {error}")
        self._write()

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Extend all open leases while the block runs."""
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


class StoreGroupReader:
    """Reads groups from a local store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read_group(self, group_id: str, builder: BuilderName, staleness: int | None) -> TrainingGroup:
        rows = await self._store.rollouts.find(group_id=group_id)
        members = [GroupRollout(row, tuple(await self._traces(row, builder))) for row in rows]
        return TrainingGroup(group_id, rows[0].task_id if rows else "", tuple(members), staleness)

    async def _traces(self, row: RolloutRow, builder: BuilderName) -> Sequence[Trace]:
        stored = await self._store.traces.find(rollout_id=row.rollout_id, builder=builder)
        if stored or builder == STORED_BUILDER or row.session_id is None:
            return stored
        calls = await self._store.calls.of_session(row.session_id, text=False)
        return (await asyncio.to_thread(build, calls, builder, rollout_id=row.rollout_id, reward=row.reward)).traces
