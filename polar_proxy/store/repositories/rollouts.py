"""Tasks and rollouts: the status of each rollout, the stages of its attempts, and its events.

Promise: a worker that lost its claim changes nothing. If another worker has taken the rollout over, the next write of
the first worker raises ClaimLostError.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, func, insert, select, update

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import json_codec, schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.filters import column_of, is_number, parse_conditions, parse_where, rollouts_with_sessions
from polar_proxy.store.schema import FINAL_STATUSES, ROLLOUT_STATUSES, RolloutStatus
from polar_proxy.store.secrets import storable_text
from polar_proxy.types import Json

log = logging.getLogger(__name__)

_DEFAULT_BUILDER = "merged"

_t = schema.tasks.c
_r = schema.rollouts.c
_s = schema.sessions.c
_st = schema.stages.c
_e = schema.rollout_events.c


class ClaimLostError(StoreError):
    """The rollout has ended, or another worker claimed it."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"The rollout {rollout_id} has ended, or another worker claimed it")


@dataclass(frozen=True, slots=True)
class TaskRow:
    task_id: str
    family: str
    seed: int | None
    instruction: str
    spec: Json
    created_at: float


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout with its counts. `traces` and `trained_tokens` count the traces of one builder (default `merged`)."""

    rollout_id: str
    group_id: str
    task_id: str
    group_index: int
    session_id: str | None
    status: RolloutStatus
    incomplete: bool
    reward: float | None
    label: str | None
    """The newest label that a person gave."""
    rating: float | None
    """The newest rating, 1 to 5."""
    exit_code: int | None
    error: str | None
    harness: str
    sandbox: str
    engine: str
    model: str
    seed: int | None
    config: Json
    owner_host: str | None
    owner_pid: int | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    job_id: str | None
    attempt: int
    cause: str | None
    """Machine-readable cause of the failure or of the last retry."""
    masked: bool
    """True if the rollout counts in its group's baseline but is not trained on."""
    calls: int
    prompt_tokens: int
    completion_tokens: int
    price_usd: float | None
    """Price of the session's calls in US dollars, without calls of unknown price; None if no price is known."""
    traces: int
    trained_tokens: int

    @property
    def final(self) -> bool:
        return self.status in FINAL_STATUSES

    @property
    def wall_seconds(self) -> float | None:
        """Seconds from the start of the agent to the end of the rollout."""
        return None if self.started_at is None or self.ended_at is None else round(self.ended_at - self.started_at, 3)


@dataclass(frozen=True, slots=True)
class Claim:
    """A rollout that a worker has claimed."""

    rollout_id: str
    group_id: str
    job_id: str | None
    task_id: str
    group_index: int
    attempt: int
    harness: str
    sandbox: str
    seed: int | None
    config: Json
    claimed_by: str


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of an attempt. `outcome`: ok, failed, timed_out, cancelled; None while the stage runs."""

    rollout_id: str
    attempt: int
    stage: str
    started_at: float
    ended_at: float | None
    outcome: str | None
    cause: str | None
    worker: str | None


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event of a rollout. Status changes have the kind `status`."""

    event_id: int
    rollout_id: str
    at: float
    kind: str
    data: Json


class TaskRepository(Repository):
    """Tasks of rollouts."""

    async def put(self, task_id: str, family: str, seed: int | None, instruction: str, spec: Json) -> None:
        """Insert the task. If the task is stored already, replace all of its columns except `created_at`."""
        values = {"family": family, "seed": seed, "instruction": json_codec.clean_text(instruction), "spec": spec}
        new = self._database.insert_new(schema.tasks).values(task_id=task_id, created_at=time.time(), **values)

        def write(connection: Connection) -> None:
            connection.execute(new)
            connection.execute(update(schema.tasks).where(_t.task_id == task_id).values(**values))

        await self._database.write(write)

    async def get(self, task_id: str) -> TaskRow | None:
        return await self._row(TaskRow, select(*row_columns(TaskRow, schema.tasks)).where(_t.task_id == task_id))


class RolloutRepository(Repository):
    """Rollouts, their stages and their events."""

    async def get(self, rollout_id: str) -> RolloutRow | None:
        rows = await self.find(rollout_ids=[rollout_id])
        return rows[0] if rows else None

    async def find(
        self,
        *,
        rollout_ids: Collection[str] | None = None,
        group_id: str | None = None,
        job_id: str | None = None,
        statuses: Collection[str] | None = None,
        where: str | None = None,
        limit: int | None = None,
        before: str | None = None,
        builder: str = _DEFAULT_BUILDER,
    ) -> list[RolloutRow]:
        """Return the rollouts that meet all conditions, oldest first. `limit`: return only the newest `limit` rollouts.

        `where`: text such as `reward>=1, harness=codex` (see `filters.parse_where`). `before`: only rollouts created
        before this one. `builder`: the builder whose traces are counted.
        """
        conditions: list[ColumnElement[bool]] = parse_where(where) if where else []
        if group_id is not None:
            conditions.append(_r.group_id == group_id)
        if job_id is not None:
            conditions.append(_r.job_id == job_id)
        if rollout_ids is not None:
            conditions.append(_r.rollout_id.in_(list(rollout_ids)))
        if statuses is not None:
            conditions.append(_r.status.in_(sorted(statuses)))
        if before is not None:
            conditions.append(_r.rollout_id < before)
        query = _select_rollouts(builder).where(*conditions).order_by(_r.rollout_id.desc())
        return (await self._rows(RolloutRow, query.limit(limit)))[::-1]

    async def explain_no_match(self, where: str) -> str:
        """Return a text that explains why no rollout matches. It states how many rollouts meet each condition. If no
        rollout meets a condition, it lists the values of the condition's field."""
        total = await self._count()
        if not total:
            return "The database has no rollouts."
        found = []
        for condition in parse_conditions(where):
            if number := await self._count(condition.clause):
                found.append(f"{condition.text} matches {number} of {total} rollouts.")
            else:
                found.append(f"{condition.text} matches no rollout. {await self._describe_values(condition.name)}")
        return " ".join(["No rollout matches all conditions.", *found])

    async def _count(self, *conditions: ColumnElement[bool]) -> int:
        query = select(func.count(_r.rollout_id)).select_from(rollouts_with_sessions).where(*conditions)
        (number,) = await self._scalars(query)
        return int(number)

    async def _describe_values(self, name: str) -> str:
        """Return the range of a numeric field, or the most frequent values of another field, each with its count."""
        column = column_of(name)
        joined = rollouts_with_sessions.join(schema.tasks, _t.task_id == _r.task_id)
        if is_number(name):
            (row,) = await self._rows(lambda *row: row, select(func.min(column), func.max(column)).select_from(joined))
            return f"No rollout has a {name}." if row[0] is None else f"Values of {name}: {row[0]:g} to {row[1]:g}."
        number = func.count().label("number")
        query = select(column, number).select_from(joined).group_by(column).order_by(number.desc(), column)
        rows = await self._rows(lambda *row: row, query.limit(_LISTED_VALUES + 1))
        values = [f"{'none' if value is None else value} ({count})" for value, count in rows[:_LISTED_VALUES]]
        return f"Values of {name}: {', '.join(values)}{' and others' if len(rows) > _LISTED_VALUES else ''}."

    async def interrupted(self) -> list[RolloutRow]:
        """Return the rollouts without a final status, oldest first.

        The caller must find out whether `owner_pid` on `owner_host` still runs them.
        """
        return await self.find(statuses=ROLLOUT_STATUSES - FINAL_STATUSES)

    async def group_id(self, rollout_id: str) -> str:
        """Return the id of the rollout's current group.

        A rollout that still runs when its group is complete may be carried over to another group.
        """
        (group_id,) = await self._scalars(select(_r.group_id).where(_r.rollout_id == rollout_id))
        return str(group_id)

    async def update(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus | None = None,
        error: str | None = None,
        incomplete: bool | None = None,
        sandbox: str | None = None,
    ) -> None:
        """Change the given columns without a claim. Raises StoreError if `status` would change a final status."""
        if status is not None and status not in ROLLOUT_STATUSES:
            raise UsageError(f"{status!r} is not a rollout status. Statuses: {', '.join(sorted(ROLLOUT_STATUSES))}")
        values = _given(error=storable_text(error), incomplete=incomplete, sandbox=sandbox)

        def write(connection: Connection) -> None:
            found = connection.execute(_lock_rollout.where(_r.rollout_id == rollout_id)).one_or_none()
            if found is None:
                raise UsageError(f"There is no rollout {rollout_id}")
            if status is not None and status != found.status:
                if found.status in FINAL_STATUSES:
                    raise StoreError(f"The rollout {rollout_id} is {found.status} already and cannot become {status}")
                values.update(_status_values(connection, found, status, time.time()))
            if values:
                update_rollouts(connection, _r.rollout_id == rollout_id, **values)

        await self._database.write(write)

    async def enter_stage(
        self,
        claim: Claim,
        stage: RolloutStatus,
        *,
        outcome: str = "ok",
        session_id: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        """End the attempt's open stage with `outcome`, start `stage` and make it the rollout's status.

        Raises ClaimLostError if the claim was lost.
        """
        now = time.time()
        values = _given(session_id=session_id, exit_code=exit_code)
        new_stage = self._database.insert_new(schema.stages).values(
            rollout_id=claim.rollout_id, attempt=claim.attempt, stage=stage, started_at=now, worker=claim.claimed_by
        )

        def write(connection: Connection) -> None:
            _change_status(connection, claim, stage, now, values)
            end_stages(connection, _stages_of(claim), now, outcome)
            connection.execute(new_stage)

        await self._database.write(write)
        _log_status(claim, stage)

    async def end(
        self,
        claim: Claim,
        status: RolloutStatus,
        *,
        outcome: str = "ok",
        cause: str | None = None,
        error: str | None = None,
        incomplete: bool = False,
        masked: bool = False,
    ) -> None:
        """Set a final status and end the open stage with `outcome`. Raises ClaimLostError if the claim was lost.

        `masked`: the rollout counts in its group's baseline but is not trained on.
        """
        now = time.time()
        values = {"cause": cause, "incomplete": incomplete, "masked": masked, **_given(error=storable_text(error))}

        def write(connection: Connection) -> None:
            _change_status(connection, claim, status, now, values)
            end_stages(connection, _stages_of(claim), now, outcome, cause)

        await self._database.write(write)
        _log_status(claim, status, cause)

    async def end_open_stage(self, rollout_id: str, outcome: str, cause: str | None = None) -> None:
        """End the open stage of a rollout whose worker died, whichever attempt the stage belongs to."""

        def write(connection: Connection) -> None:
            end_stages(connection, _st.rollout_id == rollout_id, time.time(), outcome, cause)

        await self._database.write(write)

    async def stages(self, rollout_id: str) -> list[StageRow]:
        """Return the stages of all attempts, ordered by start."""
        query = select(*row_columns(StageRow, schema.stages)).where(_st.rollout_id == rollout_id)
        return await self._rows(StageRow, query.order_by(_st.started_at, _st.attempt))

    async def events(self, rollout_id: str) -> list[EventRow]:
        """Return the events of a rollout in the order in which they were stored."""
        query = select(*row_columns(EventRow, schema.rollout_events)).where(_e.rollout_id == rollout_id)
        return await self._rows(EventRow, query.order_by(_e.event_id))


_LISTED_VALUES = 8
_lock_rollout = select(_r.rollout_id, _r.status, _r.attempt, _r.claimed_by, _r.started_at).with_for_update()
"""Query that reads a rollout's status and claim, and locks its row. FOR UPDATE matters on PostgreSQL. On SQLite the
transaction already holds the write lock."""


def _select_rollouts(builder: str) -> Select[Any]:
    t = schema.traces.c
    of_rollout = (t.rollout_id == _r.rollout_id) & (t.builder == builder)
    trained_tokens = select(func.coalesce(func.sum(t.trained_tokens), 0)).where(of_rollout)
    columns = row_columns(
        RolloutRow,
        schema.rollouts,
        **{name: func.coalesce(_s[name], 0) for name in ("calls", "prompt_tokens", "completion_tokens")},
        price_usd=_s.price_usd,
        traces=select(func.count()).select_from(schema.traces).where(of_rollout).scalar_subquery(),
        trained_tokens=trained_tokens.scalar_subquery(),
    )
    return select(*columns).select_from(rollouts_with_sessions)


def _stages_of(claim: Claim) -> ColumnElement[bool]:
    return and_(_st.rollout_id == claim.rollout_id, _st.attempt == claim.attempt)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _log_status(claim: Claim, status: RolloutStatus, cause: str | None = None) -> None:
    because = f" ({cause})" if cause else ""
    fields = {"rollout_id": claim.rollout_id, "attempt": claim.attempt, "status": status, "cause": cause}
    log.info("rollout %s: %s%s", claim.rollout_id, status, because, extra={"fields": fields})


def _change_status(
    connection: Connection, claim: Claim, status: RolloutStatus, now: float, values: dict[str, Any]
) -> None:
    mine = _r.rollout_id == claim.rollout_id
    found = connection.execute(_lock_rollout.where(mine)).one_or_none()
    if (
        found is None
        or found.status in FINAL_STATUSES
        or (found.attempt, found.claimed_by) != (claim.attempt, claim.claimed_by)
    ):
        raise ClaimLostError(claim.rollout_id)
    update_rollouts(connection, mine, **values, **_status_values(connection, found, status, now))


def _status_values(connection: Connection, rollout: Any, status: RolloutStatus, now: float) -> dict[str, Any]:
    """Record the new status of a rollout as an event. Return the new values of the rollout's columns."""
    insert_status_event(connection, rollout.rollout_id, now, rollout.status, status)
    values: dict[str, Any] = {"status": status}
    if status == "running" and rollout.started_at is None:
        values["started_at"] = now
    if status in FINAL_STATUSES:
        values["ended_at"] = now
    return values


def end_stages(
    connection: Connection, which: ColumnElement[bool], now: float, outcome: str, cause: str | None = None
) -> None:
    """End the open stages for which the condition `which` holds."""
    values = {"ended_at": now, "outcome": outcome, "cause": json_codec.clean_text(cause)}
    connection.execute(update(schema.stages).where(which, _st.ended_at.is_(None)).values(**values))


def update_rollouts(connection: Connection, which: ColumnElement[bool], **values: Any) -> None:
    connection.execute(update(schema.rollouts).where(which).values(values))


def close_sessions(connection: Connection, rollout_ids: Sequence[str], now: float) -> None:
    """Close the sessions of all attempts at these rollouts."""
    mine = and_(_s.rollout_id.in_(rollout_ids), _s.closed_at.is_(None))
    connection.execute(update(schema.sessions).where(mine).values(closed_at=now))


def insert_status_event(
    connection: Connection, rollout_id: str, at: float, old: str | None, new: str, cause: str | None = None
) -> None:
    data: Json = {"from": old, "to": new} | ({} if cause is None else {"cause": cause})
    insert_event(connection, rollout_id, at, "status", data)


def insert_event(connection: Connection, rollout_id: str, at: float, kind: str, data: Json) -> None:
    connection.execute(insert(schema.rollout_events).values(rollout_id=rollout_id, at=at, kind=kind, data=data))
