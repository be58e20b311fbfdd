"""Groups: cancelling, settling (ending a group whose rollouts have all ended), and overflow.

A group starts n + k rollouts, and n of them complete it. Rollouts that still run then are its overflow. As
in APRIL (arXiv:2509.18521), overflow can be carried over to a later group of the same task instead of being cancelled,
so that its work is not lost.

A carried-over rollout changes places with a rollout of the later group that has not started. The replaced rollout moves
to the earlier group and is cancelled. So every group keeps its size and each rollout counts in one group. If no
rollout can be replaced now, overflow waits in a holding group, which has no job and is not for training. Later
`carry_over` moves the overflow from there to a new group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update

from polar_proxy.store import json_codec, schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.repositories.rollouts import insert_event, update_rollouts
from polar_proxy.store.service.job_events import CallbackKind, insert_job_event, queue_callback
from polar_proxy.store.service.queue import cancel_rollouts, not_ending, unowned, version_number
from polar_proxy.types import Json, new_id

KEEP_OVERFLOW = {"overflow": "keep"}
"""An entry in a group's configuration. The overflow of a group with this entry is carried over, and the group accepts
overflow of other groups."""
HOLDING_FOR = "holding_for"
"""Key in the configuration of a holding group. The value is the id of the group from which its rollouts come."""

_r = schema.rollouts.c
_g = schema.groups.c
_j = schema.jobs.c
_final = schema.rollout_is_final
_not_started = and_(_r.status == "queued", _r.claimed_by.is_(None), _r.attempt == 1)


@dataclass(frozen=True, slots=True)
class GroupRow:
    group_id: str
    job_id: str | None
    task_id: str
    rollout_count: int
    """Number of rollouts that were queued for the group."""
    group_size: int
    """Number of rollouts that complete the group."""
    config: Json
    status: str
    reason: str | None
    delivery: str | None
    created_at: float
    ended_at: float | None


_select_groups = select(*row_columns(GroupRow, schema.groups))


class GroupRepository(Repository):
    """Groups of rollouts of one task."""

    async def get(self, group_id: str) -> GroupRow | None:
        return await self._row(GroupRow, _select_groups.where(_g.group_id == group_id))

    async def recent(self, limit: int = 50, before: str | None = None) -> list[GroupRow]:
        """Return a page of groups, newest first. `before`: the last group id of the previous page."""
        query = _select_groups.order_by(_g.group_id.desc()).limit(limit)
        return await self._rows(GroupRow, query if before is None else query.where(_g.group_id < before))

    async def of_job(self, job_id: str) -> list[GroupRow]:
        """Return the groups of a job in the order of submission."""
        return await self._rows(GroupRow, _select_groups.where(_g.job_id == job_id).order_by(_g.group_id))

    async def cancel(self, group_id: str, *, reason: str) -> list[str]:
        """Cancel the remaining rollouts of a group. Returns the claimed rollouts, which only their workers can end."""
        still_open = and_(_g.group_id == group_id, _g.status == "open")

        def write(connection: Connection) -> list[str]:
            update_groups(connection, still_open, reason=json_codec.clean_text(reason))
            return cancel_rollouts(connection, _r.group_id == group_id, time.time())

        return await self._database.write(write)

    async def unsettled(self) -> list[str]:
        """Return the open groups whose rollouts have all ended. Groups without a job are left out.

        A group stays unsettled if the process that ended its last rollout was killed before it could settle the group.
        """
        busy = select(_r.group_id).where(~_final)
        query = select(_g.group_id).where(_g.job_id.is_not(None), _g.status == "open", _g.group_id.not_in(busy))
        return await self._scalars(query)

    async def settle(self, group_id: str) -> tuple[GroupRow, bool] | None:
        """End a group whose rollouts have all ended. If it was the last open group of its job, end the job too.

        A group for training then waits for a consumer, or is dropped if none of its rollouts finished. Returns the
        group, and True if it was ended now or False if it had ended before. Returns None, and changes nothing, if a
        rollout has not ended.
        """
        now = time.time()
        mine = _g.group_id == group_id

        def write(connection: Connection) -> tuple[GroupRow, bool] | None:
            found = GroupRow(*connection.execute(_select_groups.where(mine).with_for_update()).one())
            if found.status != "open":
                return found, False
            statuses = set(connection.scalars(select(_r.status).where(_r.group_id == group_id).distinct()))
            if statuses - schema.FINAL_STATUSES:
                return None
            finished = not statuses.isdisjoint(("done", "timed_out"))
            delivery = found.delivery
            if delivery not in (None, "dropped"):  # dropped: too stale
                delivery = "waiting" if finished else "dropped"
            group = replace(
                found,
                status="finished" if finished else "cancelled",
                ended_at=now,
                delivery=delivery,
                reason=found.reason or (None if finished else "no rollout of the group finished"),
            )
            changes: Json = {"status": group.status, "reason": group.reason, "delivery": delivery}
            update_groups(connection, mine, ended_at=now, **changes)
            insert_job_event(connection, group.job_id, group_id, now, "group", changes)
            if group.job_id is not None:
                kind: CallbackKind = "group.finished" if finished else "group.cancelled"
                queue_callback(connection, group.job_id, kind, group_id, now)
                _end_job(connection, group.job_id, now)
            return group, True

        return await self._database.write(write)

    async def keep_overflow(self, group_id: str, *, reason: str) -> dict[str, str]:
        """Move a complete group's running rollouts to other groups. Cancel its rollouts that are not claimed yet.

        Returns the moved rollouts: rollout id -> id of the new group. The old group can be settled afterwards.
        """
        now = time.time()

        def write(connection: Connection) -> dict[str, str]:
            mine = _g.group_id == group_id
            query = select(_g.status, _g.task_id, _g.rollout_count).where(mine).with_for_update()
            group = connection.execute(query).one()
            if group.status != "open":
                return {}
            update_groups(connection, mine, reason=json_codec.clean_text(reason))
            cancel_rollouts(connection, and_(_r.group_id == group_id, _r.claimed_by.is_(None)), now)
            running = select(schema.rollouts).where(_r.group_id == group_id, ~_final, not_ending)
            overflow = connection.execute(running.order_by(_r.group_index).with_for_update()).all()
            if not overflow:
                return {}
            moved = _replace_unstarted(connection, overflow, group.task_id, _g.group_id != group_id, now)
            waiting = [row for row in overflow if row.rollout_id not in moved]
            if waiting:
                holding_group = _add_holding_group(connection, group.task_id, group_id, len(waiting), now)
                for index, row in enumerate(waiting):
                    _move(connection, row, holding_group, index, None, now)
                    moved[row.rollout_id] = holding_group
            return moved

        return await self._database.write(write)

    async def carry_over(
        self, group_id: str, *, policy_version: str | None = None, max_staleness: int = 1
    ) -> list[str]:
        """Move waiting overflow of the same task to a new group (see the top of this module).

        Each moved rollout takes the place of a rollout of the new group that has not started. Returns the ids of the
        moved rollouts.

        If policy versions are numbers, overflow that is more than `max_staleness` versions older than `policy_version`
        is left out, because one such rollout would make the whole group stale.
        """
        now = time.time()

        def write(connection: Connection) -> list[str]:
            query = select(_g.task_id).where(_g.group_id == group_id).with_for_update()
            task_id = connection.scalars(query).one()
            without_job = select(_g.group_id, _g.config).where(_g.task_id == task_id, _g.job_id.is_(None))
            holding_groups = [row.group_id for row in connection.execute(without_job) if HOLDING_FOR in row.config]
            if not holding_groups:
                return []
            usable = or_(_r.status.in_(("done", "timed_out")), ~_final)
            waiting = (
                select(schema.rollouts)
                .where(_r.group_id.in_(holding_groups), usable, not_ending, ~_r.incomplete, ~_not_started)
                .order_by(_r.rollout_id)
            )
            rows = connection.execute(waiting.with_for_update(skip_locked=True)).all()
            fresh = [row for row in rows if not _is_stale(row.policy_version, policy_version, max_staleness)]
            return list(_replace_unstarted(connection, fresh, task_id, _g.group_id == group_id, now))

        return await self._database.write(write)


def _end_job(connection: Connection, job_id: str, now: float) -> None:
    """End the job if none of its groups is open."""
    open_groups = select(func.count()).where(_g.job_id == job_id, _g.status == "open")
    if connection.scalar(open_groups):
        return
    running = and_(_j.job_id == job_id, _j.status.in_(("open", "paused")))
    end = update(schema.jobs).where(running).values(status="done", ended_at=now, paused_until=None)
    if connection.execute(end).rowcount:
        insert_job_event(connection, job_id, None, now, "job", {"status": "done"})
        queue_callback(connection, job_id, "job.ended", None, now)


def _replace_unstarted(
    connection: Connection, overflow: Sequence[Any], task_id: str, which: ColumnElement[bool], now: float
) -> dict[str, str]:
    """Let each overflow rollout replace the first rollout in queue order that it can replace.

    The replaced rollout has the same task, agent and configuration, and has not started. Its group is open, accepts
    overflow and meets `which`. Returns the moved rollouts: rollout id -> id of the new group.
    """
    query = (
        select(schema.rollouts, _g.config.label("group_config"))
        .join(schema.groups, _g.group_id == _r.group_id)
        .where(_g.task_id == task_id, _g.status == "open", which, _not_started, unowned)
        .order_by(_r.group_id, _r.group_index)
        .with_for_update(skip_locked=True)
    )
    rows = connection.execute(query).all()
    unstarted = [row for row in rows if KEEP_OVERFLOW.items() <= row.group_config.items()]
    moved: dict[str, str] = {}
    for rollout in overflow:
        replaced = next((row for row in unstarted if _may_replace(rollout, row)), None)
        if replaced is not None:
            unstarted.remove(replaced)
            _swap(connection, rollout, replaced, now)
            moved[rollout.rollout_id] = replaced.group_id
    return moved


def _may_replace(rollout: Any, other: Any) -> bool:
    # The sandbox is not compared: it may be chosen later. The model is empty if the engine was not known yet.
    models = {rollout.model, other.model} - {""}
    return (rollout.harness, rollout.config) == (other.harness, other.config) and len(models) < 2


def _swap(connection: Connection, rollout: Any, replaced: Any, now: float) -> None:
    """Exchange the groups of two rollouts, and cancel `replaced`, which has not started."""
    _move(connection, rollout, replaced.group_id, replaced.group_index, replaced.job_id, now)
    which = _r.rollout_id == replaced.rollout_id
    update_rollouts(
        connection, which, group_id=rollout.group_id, group_index=rollout.group_index, job_id=rollout.job_id
    )
    cancel_rollouts(connection, which, now)
    error = f"replaced by {rollout.rollout_id}, which was carried over from another group"
    update_rollouts(connection, which, error=error)


def _move(connection: Connection, rollout: Any, group_id: str, index: int, job_id: str | None, now: float) -> None:
    mine = _r.rollout_id == rollout.rollout_id
    update_rollouts(connection, mine, group_id=group_id, group_index=index, job_id=job_id)
    insert_event(connection, rollout.rollout_id, now, "moved", {"from": rollout.group_id, "to": group_id})


def _add_holding_group(connection: Connection, task_id: str, for_group: str, size: int, now: float) -> str:
    group_id = new_id("group")
    values = {"rollout_count": size, "group_size": size, "config": {HOLDING_FOR: for_group}, "created_at": now}
    connection.execute(insert(schema.groups).values(group_id=group_id, task_id=task_id, **values))
    return group_id


def update_groups(connection: Connection, which: ColumnElement[bool], **values: Any) -> None:
    connection.execute(update(schema.groups).where(which).values(values))


def _is_stale(version: str | None, current: str | None, max_staleness: int) -> bool:
    then, now = version_number(version), version_number(current)
    return then is not None and now is not None and now - then > max_staleness
