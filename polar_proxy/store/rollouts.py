"""Tasks, groups and rollouts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, func, insert, select, update

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import json_codec, schema
from polar_proxy.store.artifacts import insert_event
from polar_proxy.store.base import Repository
from polar_proxy.store.filters import parse_where
from polar_proxy.store.rows import (
    FINAL_STATUSES,
    ROLLOUT_STATUSES,
    RolloutRow,
    RolloutStatus,
    TaskRow,
)
from polar_proxy.store.secrets import without_secrets
from polar_proxy.types import Json, new_id

_c = schema.rollouts.c
_s = schema.sessions.c
_DEFAULT_BUILDER = "merged"


def _query(builder: str) -> Select[Any]:
    t = schema.traces.c
    of_rollout = (t.rollout_id == _c.rollout_id) & (t.builder == builder)
    own = (
        *(_c.rollout_id, _c.group_id, _c.task_id, _c.group_index, _c.session_id, _c.status, _c.incomplete),
        *(_c.reward, _c.exit_code, _c.error, _c.harness, _c.sandbox, _c.engine, _c.model, _c.seed, _c.config),
        *(_c.owner_host, _c.owner_pid, _c.created_at, _c.started_at, _c.ended_at),
        *(_c.job_id, _c.attempt, _c.cause, _c.masked),
    )
    counts = (
        *(func.coalesce(column, 0) for column in (_s.calls, _s.prompt_tokens, _s.completion_tokens)),
        select(func.count()).select_from(schema.traces).where(of_rollout).scalar_subquery(),
        select(func.coalesce(func.sum(t.trained_tokens), 0)).where(of_rollout).scalar_subquery(),
    )
    return select(*own, *counts).outerjoin(schema.sessions, _s.session_id == _c.session_id)


class RolloutRepository(Repository):
    async def put_task(self, task_id: str, family: str, seed: int | None, instruction: str, spec: Json) -> None:
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

    async def task(self, task_id: str) -> TaskRow | None:
        t = schema.tasks.c
        columns = (t.task_id, t.family, t.seed, t.instruction, t.spec, t.created_at)
        async with self._database.reading() as connection:
            row = (await connection.execute(select(*columns).where(t.task_id == task_id))).one_or_none()
        return None if row is None else TaskRow(*row)

    async def create_group(self, task_id: str, size: int, config: Json) -> str:
        group_id = new_id("group")
        statement = insert(schema.groups).values(
            group_id=group_id, task_id=task_id, size=size, config=config, created_at=time.time()
        )
        async with self._database.writing() as connection:
            await connection.execute(statement)
        return group_id

    async def create_rollout(
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

    async def set_rollout(
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
            query = select(_c.status, _c.started_at).where(_c.rollout_id == rollout_id).with_for_update()
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
                await connection.execute(update(schema.rollouts).where(_c.rollout_id == rollout_id).values(**values))

    async def rollout(self, rollout_id: str, *, builder: str = _DEFAULT_BUILDER) -> RolloutRow | None:
        rows = await self._rollouts(_query(builder).where(_c.rollout_id == rollout_id))
        return rows[0] if rows else None

    async def rollouts(
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
        given = ((_c.group_id, group_id), (_c.job_id, job_id), (_c.task_id, task_id), (_c.session_id, session_id))
        for column, value in given:
            if value is not None:
                conditions.append(column == value)
        if rollout_ids is not None:
            conditions.append(_c.rollout_id.in_(list(rollout_ids)))
        if statuses is not None:
            conditions.append(_c.status.in_(sorted(statuses)))
        if before is not None:
            conditions.append(_c.rollout_id < before)
        query = _query(builder).where(*conditions).order_by(_c.rollout_id.desc())
        return (await self._rollouts(query.limit(limit)))[::-1]

    async def interrupted_rollouts(self) -> list[RolloutRow]:
        """Those without a final status, oldest first. Whether `owner_pid` on `owner_host` still works on one is for
        the caller to find out."""
        return await self.rollouts(statuses=ROLLOUT_STATUSES - FINAL_STATUSES)

    async def _rollouts(self, query: Select[Any]) -> list[RolloutRow]:
        async with self._database.reading() as connection:
            return [RolloutRow(*row) for row in await connection.execute(query)]
