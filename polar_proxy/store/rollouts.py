"""Tasks, groups and rollouts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import json_codec, schema
from polar_proxy.store.artifacts import insert_event
from polar_proxy.store.base import Repository
from polar_proxy.store.filters import parse_where
from polar_proxy.store.rows import (
    FINAL_STATUSES,
    ROLLOUT_STATUSES,
    EventRow,
    RolloutRow,
    RolloutStatus,
    TaskRow,
)
from polar_proxy.store.secrets import without_secrets
from polar_proxy.store.stages import Claim, ClaimLostError, StageRow, end_stages
from polar_proxy.types import Json, new_id

_r = schema.rollouts.c
_s = schema.sessions.c
_st = schema.stages.c
_DEFAULT_BUILDER = "merged"


def _query(builder: str) -> Select[Any]:
    t = schema.traces.c
    of_rollout = (t.rollout_id == _r.rollout_id) & (t.builder == builder)
    own = (
        *(_r.rollout_id, _r.group_id, _r.task_id, _r.group_index, _r.session_id, _r.status, _r.incomplete),
        *(_r.reward, _r.exit_code, _r.error, _r.harness, _r.sandbox, _r.engine, _r.model, _r.seed, _r.config),
        *(_r.owner_host, _r.owner_pid, _r.created_at, _r.started_at, _r.ended_at),
        *(_r.job_id, _r.attempt, _r.cause, _r.masked),
    )
    counts = (
        *(func.coalesce(column, 0) for column in (_s.calls, _s.prompt_tokens, _s.completion_tokens)),
        select(func.count()).select_from(schema.traces).where(of_rollout).scalar_subquery(),
        select(func.coalesce(func.sum(t.trained_tokens), 0)).where(of_rollout).scalar_subquery(),
    )
    return select(*own, *counts).outerjoin(schema.sessions, _s.session_id == _r.session_id)


class TaskRepository(Repository):
    async def put(self, task_id: str, family: str, seed: int | None, instruction: str, spec: Json) -> None:
        """Insert or replace. The first time of storing stays."""
        values = {
            "family": family,
            "seed": seed,
            "instruction": json_codec.clean_text(instruction),
            "spec": spec,
        }
        async with self._database.writing() as connection:
            await connection.execute(
                self._database.insert_new(schema.tasks).values(task_id=task_id, created_at=time.time(), **values)
            )
            await connection.execute(update(schema.tasks).where(schema.tasks.c.task_id == task_id).values(**values))

    async def get(self, task_id: str) -> TaskRow | None:
        t = schema.tasks.c
        columns = (t.task_id, t.family, t.seed, t.instruction, t.spec, t.created_at)
        async with self._database.reading() as connection:
            row = (await connection.execute(select(*columns).where(t.task_id == task_id))).one_or_none()
        return None if row is None else TaskRow(*row)


class RolloutRepository(Repository):
    async def create_group(self, task_id: str, size: int, config: Json) -> str:
        group_id = new_id("group")
        statement = insert(schema.groups).values(
            group_id=group_id, task_id=task_id, size=size, config=config, created_at=time.time()
        )
        async with self._database.writing() as connection:
            await connection.execute(statement)
        return group_id

    async def create(
        self,
        group_id: str,
        task_id: str,
        index: int,
        harness: str,
        sandbox: str,
        engine: str,
        model: str,
        seed: int | None,
        config: Json,
    ) -> str:
        """A rollout with status `queued`, owned by this process. `index`: its place in the group."""
        rollout_id = new_id("roll")
        now = time.time()
        statement = insert(schema.rollouts).values(
            rollout_id=rollout_id,
            group_id=group_id,
            task_id=task_id,
            group_index=index,
            status="queued",
            harness=harness,
            sandbox=sandbox,
            engine=engine,
            model=model,
            seed=seed,
            config=config,
            owner_host=socket.gethostname(),
            owner_pid=os.getpid(),
            created_at=now,
        )
        async with self._database.writing() as connection:
            await connection.execute(statement)
            await insert_event(connection, rollout_id, now, "status", {"from": None, "to": "queued"})
        return rollout_id

    async def update(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus | None = None,
        session_id: str | None = None,
        exit_code: int | None = None,
        error: str | None = None,
        incomplete: bool | None = None,
        sandbox: str | None = None,
        claim: bool = False,
    ) -> None:
        """Change what is given. A new status is an event too; a final one stays (StoreError on leaving it).

        `claim` makes this process the owner, as a restart does with what another one left behind.
        """
        if status is not None and status not in ROLLOUT_STATUSES:
            raise UsageError(f"{status!r} is not a rollout status: {', '.join(sorted(ROLLOUT_STATUSES))}")
        now = time.time()
        given = {
            "session_id": session_id,
            "exit_code": exit_code,
            "error": None if error is None else json_codec.clean_text(without_secrets(error)),
            "incomplete": incomplete,
            "sandbox": sandbox,
        }
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if claim:
            values |= {"owner_host": socket.gethostname(), "owner_pid": os.getpid()}
        async with self._database.writing() as connection:
            # FOR UPDATE matters on PostgreSQL; on SQLite the transaction holds the write lock already.
            query = select(_r.status, _r.started_at).where(_r.rollout_id == rollout_id).with_for_update()
            found = (await connection.execute(query)).one_or_none()
            if found is None:
                raise UsageError(f"There is no rollout {rollout_id}")
            if status is not None and status != found.status:
                if found.status in FINAL_STATUSES:
                    raise StoreError(f"The rollout {rollout_id} is {found.status} already and cannot become {status}")
                values["status"] = status
                if status == "running" and found.started_at is None:
                    values["started_at"] = now
                if status in FINAL_STATUSES:
                    values["ended_at"] = now
                data: Json = {"from": found.status, "to": status}
                await insert_event(connection, rollout_id, now, "status", data)
            if values:
                await connection.execute(update(schema.rollouts).where(_r.rollout_id == rollout_id).values(**values))

    async def get(self, rollout_id: str, *, builder: str = _DEFAULT_BUILDER) -> RolloutRow | None:
        rows = await self._rollouts(_query(builder).where(_r.rollout_id == rollout_id))
        return rows[0] if rows else None

    async def find(
        self,
        *,
        rollout_ids: Collection[str] | None = None,
        group_id: str | None = None,
        job_id: str | None = None,
        task_id: str | None = None,
        session_id: str | None = None,
        statuses: Collection[str] | None = None,
        where: str | None = None,
        limit: int | None = None,
        before: str | None = None,
        builder: str = _DEFAULT_BUILDER,
    ) -> list[RolloutRow]:
        """Oldest first; with `limit`, the newest of them. `where` is text such as `reward>=1, harness=codex`
        (see `where.parse_where`). `builder`: whose traces are counted."""
        conditions: list[ColumnElement[bool]] = parse_where(where) if where else []
        given = ((_r.group_id, group_id), (_r.job_id, job_id), (_r.task_id, task_id), (_r.session_id, session_id))
        for column, value in given:
            if value is not None:
                conditions.append(column == value)
        if rollout_ids is not None:
            conditions.append(_r.rollout_id.in_(list(rollout_ids)))
        if statuses is not None:
            conditions.append(_r.status.in_(sorted(statuses)))
        if before is not None:
            conditions.append(_r.rollout_id < before)
        query = _query(builder).where(*conditions).order_by(_r.rollout_id.desc())
        return (await self._rollouts(query.limit(limit)))[::-1]

    async def interrupted(self) -> list[RolloutRow]:
        """Those without a final status, oldest first. Whether `owner_pid` on `owner_host` still works on one is for
        the caller to find out."""
        return await self.find(statuses=ROLLOUT_STATUSES - FINAL_STATUSES)

    async def _rollouts(self, query: Select[Any]) -> list[RolloutRow]:
        async with self._database.reading() as connection:
            return [RolloutRow(*row) for row in await connection.execute(query)]

    async def group_id(self, rollout_id: str) -> str:
        """The group that it is in now."""
        async with self._database.reading() as connection:
            query = select(_r.group_id).where(_r.rollout_id == rollout_id)
            return str((await connection.execute(query)).scalar_one())

    async def begin_stage(self, rollout_id: str, attempt: int, stage: str, worker: str | None = None) -> None:
        async with self._database.writing() as connection:
            await self._begin(connection, rollout_id, attempt, stage, time.time(), worker)

    async def end_stage(
        self, rollout_id: str, attempt: int, stage: str, outcome: str, cause: str | None = None
    ) -> None:
        async with self._database.writing() as connection:
            mine = and_(_st.rollout_id == rollout_id, _st.attempt == attempt, _st.stage == stage)
            await end_stages(connection, mine, time.time(), outcome, cause)

    async def end_open_stage(self, rollout_id: str, outcome: str, cause: str | None = None) -> None:
        """Of whichever attempt: its worker is gone."""
        async with self._database.writing() as connection:
            await end_stages(connection, _st.rollout_id == rollout_id, time.time(), outcome, cause)

    async def enter_stage(
        self,
        held: Claim,
        stage: RolloutStatus,
        *,
        outcome: str = "ok",
        session_id: str | None = None,
        exit_code: int | None = None,
        sandbox: str | None = None,
    ) -> None:
        """End the attempt's open stage with `outcome` and begin this one, which is the rollout's status from now on.

        Raises NotHeldError where `held` is no longer held.
        """
        now = time.time()
        given = {"session_id": session_id, "exit_code": exit_code, "sandbox": sandbox}
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        async with self._database.writing() as connection:
            await _change(connection, held, stage, now, values)
            await end_stages(connection, _of(held), now, outcome)
            await self._begin(connection, held.rollout_id, held.attempt, stage, now, held.claimed_by)

    async def end(
        self,
        held: Claim,
        status: RolloutStatus,
        *,
        outcome: str = "ok",
        cause: str | None = None,
        error: str | None = None,
        incomplete: bool = False,
        masked: bool = False,
    ) -> None:
        """Give it a final status and end its open stage with `outcome`.

        `masked`: counted in the group, not trained on. Raises NotHeldError where `held` is no longer held.
        """
        now = time.time()
        values: dict[str, Any] = {"ended_at": now, "cause": cause, "incomplete": incomplete, "masked": masked}
        if error is not None:
            values["error"] = json_codec.clean_text(without_secrets(error))
        async with self._database.writing() as connection:
            await _change(connection, held, status, now, values)
            await end_stages(connection, _of(held), now, outcome, cause)

    async def stages(self, rollout_id: str) -> list[StageRow]:
        """In the order in which they began."""
        columns = (
            *(_st.rollout_id, _st.attempt, _st.stage, _st.started_at),
            *(_st.ended_at, _st.outcome, _st.cause, _st.worker),
        )
        query = select(*columns).where(_st.rollout_id == rollout_id).order_by(_st.started_at, _st.attempt)
        async with self._database.reading() as connection:
            return [StageRow(*row) for row in await connection.execute(query)]

    async def add_event(self, rollout_id: str, kind: str, data: Json) -> None:
        async with self._database.writing() as connection:
            await insert_event(connection, rollout_id, time.time(), kind, data)

    async def events(self, rollout_id: str) -> list[EventRow]:
        """In the order in which they were stored; status changes have the kind `status`."""
        c = schema.events.c
        columns = (c.event_id, c.rollout_id, c.at, c.kind, c.data)
        query = select(*columns).where(c.rollout_id == rollout_id).order_by(c.event_id)
        async with self._database.reading() as connection:
            return [EventRow(*row) for row in await connection.execute(query)]

    async def _begin(
        self, connection: AsyncConnection, rollout_id: str, attempt: int, stage: str, now: float, worker: str | None
    ) -> None:
        await connection.execute(
            self._database.insert_new(schema.stages).values(
                rollout_id=rollout_id, attempt=attempt, stage=stage, started_at=now, worker=worker
            )
        )


def _of(held: Claim) -> Any:
    return and_(_st.rollout_id == held.rollout_id, _st.attempt == held.attempt)


async def _change(
    connection: AsyncConnection, held: Claim, status: RolloutStatus, now: float, values: dict[str, Any]
) -> None:
    mine = _r.rollout_id == held.rollout_id
    query = select(_r.status, _r.attempt, _r.claimed_by, _r.started_at).where(mine).with_for_update()
    found = (await connection.execute(query)).one_or_none()
    if (
        found is None
        or found.status in FINAL_STATUSES
        or (found.attempt, found.claimed_by) != (held.attempt, held.claimed_by)
    ):
        raise ClaimLostError(f"The rollout {held.rollout_id} has ended, or another worker has it")
    if status == "running" and found.started_at is None:
        values |= {"started_at": now}
    await insert_event(connection, held.rollout_id, now, "status", {"from": found.status, "to": status})
    await connection.execute(update(schema.rollouts).where(mine).values(status=status, **values))
