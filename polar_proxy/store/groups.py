"""Groups: cancelling, settling, and the rollouts that outlive their group.

Surplus rollouts: those still under way when their group is decided, kept for a later group of the same task.

As in APRIL (arXiv:2509.18521): n + k are begun, n decide, and the work that the others have done is not thrown away.
Keeping one is a change of places: it takes the place of a rollout of a later group that has not begun, which is
cancelled where it came from. So every group keeps its size, and each rollout counts in one group. While there is no
such place it waits in a group of its own (`config.kept`), of no job and for no trainer, until `adopt_kept` finds it
one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.store import json_codec, schema
from polar_proxy.store.artifacts import insert_event
from polar_proxy.store.base import Repository
from polar_proxy.store.callbacks import CallbackKind, queue_callback
from polar_proxy.store.job_events import insert_job_event
from polar_proxy.store.queue import CANCEL_REQUESTED, cancel_rollouts
from polar_proxy.types import Json, new_id

KEPT = "kept"
KEEP = {"surplus": "keep"}
"""In the configuration of a group whose surplus is kept, and which takes in what others kept."""

_r = schema.rollouts.c
_g = schema.groups.c
_place = (_r.rollout_id, _r.group_id, _r.group_index, _r.job_id, _r.task_id, _r.harness, _r.sandbox, _r.model)
_rows = select(*_place, _r.config, _r.policy_version, _r.status, _r.claimed_by)
_not_ending = or_(_r.cause.is_(None), _r.cause != CANCEL_REQUESTED)
_free = and_(_r.status == "queued", _r.claimed_by.is_(None), _r.attempt == 1)
_final = schema.rollout_is_final
_j = schema.jobs.c


@dataclass(frozen=True, slots=True)
class GroupRow:
    group_id: str
    job_id: str | None
    task_id: str
    size: int
    wanted: int
    config: Json
    status: str
    reason: str | None
    delivery: str | None
    created_at: float
    ended_at: float | None


class GroupRepository(Repository):
    async def cancel(self, group_id: str, *, reason: str) -> list[str]:
        """Cancel what is left of a group; returns the ids of its rollouts that workers have in hand."""
        now = time.time()
        async with self._database.writing() as connection:
            await connection.execute(
                update(schema.groups)
                .where(_g.group_id == group_id, _g.status == "open")
                .values(reason=json_codec.clean_text(reason))
            )
            return await cancel_rollouts(connection, _r.group_id == group_id, now)

    async def get(self, group_id: str) -> GroupRow | None:
        async with self._database.reading() as connection:
            row = (await connection.execute(_groups.where(_g.group_id == group_id))).one_or_none()
        return None if row is None else GroupRow(*row)

    async def of_job(self, job_id: str) -> list[GroupRow]:
        """Of a job, in the order of submission."""
        async with self._database.reading() as connection:
            rows = await connection.execute(_groups.where(_g.job_id == job_id).order_by(_g.group_id))
            return [GroupRow(*row) for row in rows]

    async def unsettled(self) -> list[str]:
        """Groups of jobs that are open though all of their rollouts have ended: whoever ended the last was killed."""
        busy = select(_r.group_id).where(~_final)
        query = select(_g.group_id).where(_g.job_id.is_not(None), _g.status == "open", _g.group_id.not_in(busy))
        async with self._database.reading() as connection:
            return list((await connection.execute(query)).scalars())

    async def settle(self, group_id: str) -> tuple[GroupRow, bool] | None:
        """End a group all of whose rollouts have ended, and its job with the last group; and whether it
        was this call that did. None: it is still open.

        An offered group then waits for a consumer, unless none of its rollouts came to an end of its own.
        """
        now = time.time()
        async with self._database.writing() as connection:
            found = (await connection.execute(_groups.where(_g.group_id == group_id).with_for_update())).one()
            if found.status != "open":
                return GroupRow(*found), False
            left = select(func.count()).where(_r.group_id == group_id, ~_final)
            if (await connection.execute(left)).scalar_one():
                return None
            useful = select(func.count()).where(_r.group_id == group_id, _r.status.in_(("done", "timed_out")))
            finished = bool((await connection.execute(useful)).scalar_one())
            await connection.execute(
                update(schema.groups)
                .where(_g.group_id == group_id)
                .values(
                    status="finished" if finished else "cancelled",
                    ended_at=now,
                    delivery=case(
                        (_g.delivery.is_(None), None),
                        (_g.delivery == "dropped", "dropped"),  # it was too stale
                        else_="waiting" if finished else "dropped",
                    ),
                    reason=func.coalesce(_g.reason, None if finished else "no rollout of it came to an end"),
                )
            )
            group = GroupRow(*(await connection.execute(_groups.where(_g.group_id == group_id))).one())
            told = {"status": group.status, "reason": group.reason, "delivery": group.delivery}
            await insert_job_event(connection, found.job_id, group_id, now, "group", told)
            if found.job_id is not None:
                kind: CallbackKind = "group.finished" if finished else "group.cancelled"
                await queue_callback(connection, found.job_id, kind, group_id, now)
                await _end_job(connection, found.job_id, now)
            return group, True

    async def keep_overflow(self, group_id: str, *, reason: str) -> dict[str, str]:
        """The group is decided: what workers have in hand goes on, in another group; what has not begun is cancelled.

        Returns where each went: rollout id -> group id. The group can be settled then.
        """
        now = time.time()
        async with self._database.writing() as connection:
            mine = _g.group_id == group_id
            query = select(_g.status, _g.task_id, _g.size).where(mine).with_for_update()
            group = (await connection.execute(query)).one()
            if group.status != "open":
                return {}
            await connection.execute(update(schema.groups).where(mine).values(reason=json_codec.clean_text(reason)))
            await cancel_rollouts(connection, and_(_r.group_id == group_id, _r.claimed_by.is_(None)), now)
            left = _rows.where(_r.group_id == group_id, ~_final, _not_ending).order_by(_r.group_index)
            under_way = list((await connection.execute(left.with_for_update())).all())
            places = await _places(connection, group.task_id, _g.group_id != group_id) if under_way else []
            gone: dict[str, str] = {}
            for row in under_way:
                place = next((place for place in places if _alike(row, place)), None)
                if place is not None:
                    places.remove(place)
                    await _swap(connection, row, place, now)
                    gone[row.rollout_id] = place.group_id
            waiting = [row for row in under_way if row.rollout_id not in gone]
            if waiting:
                shelf = await _shelf(connection, group.task_id, group_id, len(waiting), now)
                for index, row in enumerate(waiting):
                    await _move(connection, row, shelf, index, None, now)
                    gone[row.rollout_id] = shelf
            return gone

    async def carry_over(
        self, group_id: str, *, policy_version: str | None = None, max_staleness: int = 1
    ) -> list[str]:
        """Give a new group the rollouts of its task that were kept, in the places of its own that have not begun.

        Those of an older policy than `max_staleness` versions before `policy_version` are left, where both are
        numbers: one of them would make the whole group stale. Returns the ids of those that it got.
        """
        now = time.time()
        async with self._database.writing() as connection:
            query = select(_g.task_id).where(_g.group_id == group_id).with_for_update()
            task_id = (await connection.execute(query)).scalar_one()
            places = await _places(connection, task_id, _g.group_id == group_id)
            shelves = select(_g.group_id, _g.config).where(_g.task_id == task_id, _g.job_id.is_(None))
            kept = [row.group_id for row in await connection.execute(shelves) if KEPT in row.config]
            if not places or not kept:
                return []
            usable = or_(_r.status.in_(("done", "timed_out")), ~_final)
            query = _rows.where(_r.group_id.in_(kept), usable, _not_ending, ~_r.incomplete, ~_free).order_by(
                _r.rollout_id
            )
            rows = (await connection.execute(query.with_for_update(skip_locked=True))).all()
            got = []
            for row in rows:
                place = next((place for place in places if _alike(row, place)), None)
                if place is None or _too_old(row.policy_version, policy_version, max_staleness):
                    continue
                places.remove(place)
                await _swap(connection, row, place, now)
                got.append(row.rollout_id)
            return got


_groups = select(
    *(_g.group_id, _g.job_id, _g.task_id, _g.size, func.coalesce(_g.wanted, _g.size), _g.config, _g.status),
    *(_g.reason, _g.delivery, _g.created_at, _g.ended_at),
)


async def _end_job(connection: AsyncConnection, job_id: str, now: float) -> None:
    """When none of its groups is open any more."""
    open_groups = select(func.count()).where(_g.job_id == job_id, _g.status == "open")
    if (await connection.execute(open_groups)).scalar_one():
        return
    ended = await connection.execute(
        update(schema.jobs)
        .where(_j.job_id == job_id, _j.status.in_(("open", "paused")))
        .values(status="done", ended_at=now, paused_until=None)
    )
    if ended.rowcount:
        await insert_job_event(connection, job_id, None, now, "job", {"status": "done"})
        await queue_callback(connection, job_id, "job.ended", None, now)


async def _places(connection: AsyncConnection, task_id: str, which: ColumnElement[bool]) -> list[Any]:
    """Rollouts of this task that have not begun, in open groups that take in what was kept; in the queue's order."""
    query = (
        _rows.add_columns(_g.config.label("group_config"))
        .join(schema.groups, _g.group_id == _r.group_id)
        .where(_g.task_id == task_id, _g.status == "open", which, _free, _r.owner_pid.is_(None))
        .order_by(_r.group_id, _r.group_index)
        .with_for_update(skip_locked=True)
    )
    rows = (await connection.execute(query)).all()
    return [row for row in rows if KEEP.items() <= row.group_config.items()]


def _alike(one: Any, other: Any) -> bool:
    """Whether they would be made in the same way. The sandbox's kind may have been left open."""
    models = {one.model, other.model} - {""}  # empty: submitted before the engine was known
    return (one.harness, one.config) == (other.harness, other.config) and len(models) < 2


async def _swap(connection: AsyncConnection, kept: Any, place: Any, now: float) -> None:
    await _move(connection, kept, place.group_id, place.group_index, place.job_id, now)
    values = {"group_id": kept.group_id, "group_index": kept.group_index, "job_id": kept.job_id}
    await connection.execute(update(schema.rollouts).where(_r.rollout_id == place.rollout_id).values(**values))
    which = _r.rollout_id == place.rollout_id
    await cancel_rollouts(connection, which, now)
    error = f"its place was taken by {kept.rollout_id}, which had been kept"
    await connection.execute(update(schema.rollouts).where(which).values(error=error))


async def _move(
    connection: AsyncConnection, row: Any, group_id: str, index: int, job_id: str | None, now: float
) -> None:
    values = {"group_id": group_id, "group_index": index, "job_id": job_id}
    await connection.execute(update(schema.rollouts).where(_r.rollout_id == row.rollout_id).values(**values))
    told: Any = {"from": row.group_id, "to": group_id}
    await insert_event(connection, row.rollout_id, now, KEPT, told)


async def _shelf(connection: AsyncConnection, task_id: str, group_id: str, size: int, now: float) -> str:
    shelf = new_id("group")
    config: Any = {KEPT: group_id}
    await connection.execute(
        insert(schema.groups).values(
            group_id=shelf, task_id=task_id, size=size, wanted=size, config=config, created_at=now
        )
    )
    return shelf


def _too_old(version: str | None, current: str | None, bound: int) -> bool:
    if version is None or current is None or not (version.isdecimal() and current.isdecimal()):
        return False
    return int(current) - int(version) > bound
