"""The trainer's side of the feed: hold the leases of groups, and read a leased group with its traces from a store or
over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import orjson

from polar_proxy.api_models import LeaseRequest, TrainingLine, TrainingLinesRequest, TrainingRunRequest
from polar_proxy.client import (
    ApiError,
    AsyncClient,
    ConflictError,
    NotFoundError,
    UnavailableError,
    UnreachableError,
)
from polar_proxy.errors import StoreError
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.service.feed import GroupLease, LeaseBatch
from polar_proxy.traces.builders import build
from polar_proxy.traces.operations import STORED_BUILDER
from polar_proxy.traces.rows import read_row
from polar_proxy.training.batch import GroupRollout, TrainingGroup
from polar_proxy.training.config import BuilderName
from polar_proxy.training.policy.checkpoint import write_file
from polar_proxy.types import Json, Trace

log = logging.getLogger(__name__)

FEED_ERRORS = (StoreError, ApiError, UnreachableError)
"""Errors that a feed may raise when a lease is ended or extended. The lease then expires, and its group is offered
again."""

FEED_WAIT_SECONDS = 2.0
"""Maximum time in seconds that a server waits for a finished group before it answers without a group."""


class GroupFeed(Protocol):
    """A feed of finished groups. It belongs to a local store or to a server."""

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
    """The open leases of one training run, oldest first.

    They are extended while `kept_alive` runs. They are also recorded on disk, so that a process that resumes the run
    after a kill can end them (`settle_previous`)."""

    def __init__(self, feed: GroupFeed, run: Path, seconds: float, report: Callable[[str], None]) -> None:
        self._feed, self._seconds, self._report = feed, seconds, report
        self._file = run / "leases.json"
        self._open: list[GroupLease] = []

    def __iter__(self) -> Iterator[GroupLease]:
        return iter(list(self._open))

    async def take(self, consumer: str, limit: int, *, step: int, max_staleness: int | None) -> LeaseBatch:
        """Lease at most `limit` groups, with staleness counted from `step`. The leases are on disk before this
        returns."""
        offer = await self._feed.lease(
            consumer, limit, self._seconds, policy_version=str(step), max_staleness=max_staleness
        )
        if offer.leases:
            self._open += offer.leases
            self._write()
        return offer

    async def acknowledge(self, lease: GroupLease) -> bool:
        """Mark the group as done. Returns False if that fails, for example because the lease has expired; the group is
        then offered again."""
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
        """End the leases that the previous process held: acknowledge the groups in `trained`, give the others back.

        A lease that the previous process took but did not record before it was killed expires by itself.
        """
        for row in orjson.loads(self._file.read_bytes()) if self._file.exists() else []:
            end = self._feed.acknowledge if row["group_id"] in trained else self._feed.release
            try:
                await end(row["lease_id"])
            except FEED_ERRORS as error:  # usually: it has expired already
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
        members = [GroupRollout(row, tuple(await read_traces(self._store, row, builder))) for row in rows]
        return TrainingGroup(group_id, rows[0].task_id if rows else "", tuple(members), staleness)


async def read_traces(store: Store, row: RolloutRow, builder: BuilderName) -> Sequence[Trace]:
    """Return the traces of a rollout. If none are stored and `builder` is not `STORED_BUILDER`, build the traces from
    the rollout's calls."""
    stored = await store.traces.find(rollout_id=row.rollout_id, builder=builder)
    if stored or builder == STORED_BUILDER or row.session_id is None:
        return stored
    calls = await store.calls.of_session(row.session_id, text=False)
    return (await asyncio.to_thread(build, calls, builder, rollout_id=row.rollout_id, reward=row.reward)).traces


class HttpFeed:
    """Feed and reader of groups over a server's API: a `GroupFeed` and a `GroupReader`.

    The rows of a group have all the data that training needs, with log-probabilities in float32 as recorded. So a step
    gives the same result as with groups from the store.
    """

    def __init__(self, client: AsyncClient, report: Callable[[str], None]) -> None:
        self._client, self._report = client, report
        self._unreachable = False

    async def lease(
        self, consumer: str, limit: int, seconds: float, *, policy_version: str | None, max_staleness: int | None
    ) -> LeaseBatch:
        """Lease finished groups from the server, which waits up to `FEED_WAIT_SECONDS` for a group.

        If the server cannot be reached or cannot answer now, return no leases: the trainer calls this method again
        until it has its groups. Of several such failures in a row, only the first is reported. Raises ApiError for any
        other error of the server.
        """
        request = LeaseRequest(
            consumer=consumer,
            limit=limit,
            seconds=seconds,
            policy_version=policy_version,
            max_staleness=max_staleness,
            wait=FEED_WAIT_SECONDS,
        )
        try:
            response = await self._client.lease(request)
        except (UnreachableError, UnavailableError) as error:
            if not self._unreachable:
                self._report(f"the feed cannot be reached: {error}")
            self._unreachable = True
            return LeaseBatch((), ())
        self._unreachable = False
        leases = [GroupLease(**lease.model_dump()) for lease in response.leases]
        return LeaseBatch(tuple(leases), tuple(response.dropped))

    async def acknowledge(self, lease_id: str) -> None:
        await self._client.acknowledge(lease_id)

    async def release(self, lease_id: str) -> None:
        await self._client.give_back(lease_id)

    async def extend(self, lease_id: str, seconds: float) -> float:
        return (await self._client.extend(lease_id, seconds)).expires_at

    async def read_group(self, group_id: str, builder: BuilderName, staleness: int | None) -> TrainingGroup:
        group = await self._client.group(group_id)
        traces: dict[str, list[Trace]] = {rollout.rollout_id: [] for rollout in group.rollouts}
        # Traces of all grades: the trainer decides which are trained, and counts the others.
        async for row in self._client.group_trajectories(group_id, builder=builder, all_grades=True):
            traces[row["rollout_id"]].append(read_row(row))
        members = [GroupRollout(rollout, tuple(traces[rollout.rollout_id])) for rollout in group.rollouts]
        return TrainingGroup(group_id, group.task_id, tuple(members), staleness)


class HttpSink:
    """Sends a run's metrics to the server. After an outage the server gets all lines that it missed.

    If the server has no route for training runs, it gets no lines, and this is reported once.
    """

    def __init__(
        self, client: AsyncClient, run_id: str, name: str, config: Json, report: Callable[[str], None]
    ) -> None:
        self._client, self._run_id, self._name, self._config, self._report = client, run_id, name, config, report
        self._unsupported = False

    async def store(self, first: int, lines: Sequence[Json]) -> bool:
        if self._unsupported:
            return True
        models = [TrainingLine(**line) for line in lines]
        try:
            if first == 0:
                request = TrainingRunRequest(name=self._name, config=self._config, lines=models)
                await self._client.put_training_run(self._run_id, request)
            else:
                await self._client.add_training_lines(self._run_id, TrainingLinesRequest(first=first, lines=models))
        except NotFoundError:
            if first > 0:
                return False  # the server lost the run
            self._unsupported = True
            self._report("the server does not store training runs: their curves are in the run's folder only")
        except (UnreachableError, UnavailableError, ConflictError):
            return False  # unreachable, or it lost the lines that these follow
        return True
