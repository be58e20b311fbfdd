"""A leased group with all its rollouts and traces: from the store of this machine, or over HTTP from a server's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from polar_proxy.api_models import LeaseRequest
from polar_proxy.client import AsyncClient, UnavailableError, UnreachableError
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.feed import GroupLease, LeaseBatch
from polar_proxy.traces import build
from polar_proxy.traces.rows import read_row
from polar_proxy.training.batch import GroupRollout, TrainingGroup
from polar_proxy.training.config import BuilderName
from polar_proxy.types import Trace

_STORED = "merged"
"""The builder whose traces are stored when a rollout ends; any other's are built when they are asked for."""


class GroupReader(Protocol):
    async def read_group(self, group_id: str, builder: BuilderName, staleness: int | None) -> TrainingGroup:
        """A finished group with the traces of its rollouts, as `builder` makes them."""
        ...


class StoreGroupReader:
    """Of a database at hand."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read_group(self, group_id: str, builder: BuilderName, staleness: int | None) -> TrainingGroup:
        rows = await self._store.rollouts.find(group_id=group_id)
        members = [GroupRollout(row, tuple(await self._traces(row, builder))) for row in rows]
        return TrainingGroup(group_id, rows[0].task_id if rows else "", tuple(members), staleness)

    async def _traces(self, row: RolloutRow, builder: BuilderName) -> Sequence[Trace]:
        found = await self._store.traces.find(rollout_id=row.rollout_id, builder=builder)
        if found or builder == _STORED or row.session_id is None:
            return found
        calls = await self._store.calls.of_session(row.session_id, text=False)
        return (await asyncio.to_thread(build, calls, builder, rollout_id=row.rollout_id, reward=row.reward)).traces


class HttpFeed:
    """Feed and reader over a server's API: a `GroupFeed` and a `GroupReader`.

    A row says all that training reads, in float32 as recorded: a step is the same as from the store.
    """

    def __init__(self, client: AsyncClient, note: Callable[[str], None], *, wait: float = 2.0) -> None:
        """`wait`: seconds for which the server may keep back the answer that there is no group yet."""
        self._client, self._note, self._wait = client, note, wait
        self._away = False

    async def lease(
        self, consumer: str, limit: int, seconds: float, *, policy_version: str | None, max_staleness: int | None
    ) -> LeaseBatch:
        """As the store's. A server that does not answer offers nothing, and is told of once: the trainer asks again,
        for as long as it would wait for a group. Raises ApiError for what is refused."""
        request = LeaseRequest(
            consumer=consumer,
            limit=limit,
            seconds=seconds,
            policy_version=policy_version,
            max_staleness=max_staleness,
            wait=self._wait,
        )
        try:
            offer = await self._client.lease(request)
        except (UnreachableError, UnavailableError) as error:
            if not self._away:
                self._note(f"the feed cannot be reached: {error}")
            self._away = True
            return LeaseBatch((), ())
        self._away = False
        leases = [
            GroupLease(
                lease.lease_id,
                lease.group_id,
                lease.consumer,
                lease.expires_at,
                lease.staleness,
                lease.policy_version,
            )
            for lease in offer.leases
        ]
        return LeaseBatch(tuple(leases), tuple(offer.dropped))

    async def acknowledge(self, lease_id: str) -> None:
        await self._client.acknowledge(lease_id)

    async def release(self, lease_id: str) -> None:
        await self._client.give_back(lease_id)

    async def extend(self, lease_id: str, seconds: float) -> float:
        return (await self._client.extend(lease_id, seconds)).expires_at

    async def read_group(self, group_id: str, builder: BuilderName, staleness: int | None) -> TrainingGroup:
        found = await self._client.group(group_id)
        # Of all grades: which of them are trained, and how the others are counted, is the trainer's to say.
        traces: dict[str, list[Trace]] = {rollout.rollout_id: [] for rollout in found.rollouts}
        async for row in self._client.group_trajectories(group_id, builder=builder, all_grades=True):
            traces[row["rollout_id"]].append(read_row(row).trace)
        members = [GroupRollout(rollout, tuple(traces[rollout.rollout_id])) for rollout in found.rollouts]
        return TrainingGroup(group_id, found.task_id, tuple(members), staleness)
