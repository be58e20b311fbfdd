"""How far a rollout is: its stages, attempt by attempt, and its end.

Promise: who does not hold a rollout any more changes nothing of it. A process that slept while another one took over
is told so (`ClaimLostError`) the next time that it wants to write.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import json_codec, schema
from polar_proxy.store.artifacts import insert_event
from polar_proxy.store.base import Repository
from polar_proxy.store.rows import FINAL_STATUSES, RolloutStatus
from polar_proxy.store.secrets import without_secrets
from polar_proxy.types import Json

_r = schema.rollouts.c
_s = schema.sessions.c
_st = schema.stages.c


class ClaimLostError(StoreError):
    """The rollout has ended, or another worker has it now."""


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
    """A stage of an attempt. `outcome`: ok, failed, timed_out, cancelled; None while it lasts."""

    rollout_id: str
    attempt: int
    stage: str
    started_at: float
    ended_at: float | None
    outcome: str | None
    cause: str | None
    worker: str | None


class StageRepository(Repository):
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

    async def end_rollout(
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

    async def sessions_of(self, rollout_id: str, *, closed: bool = False) -> list[str]:
        """The sessions of all its attempts, oldest first; with `closed`, those that are closed."""
        query = select(_s.session_id).where(_s.rollout_id == rollout_id).order_by(_s.session_id)
        query = query.where(_s.closed_at.is_not(None)) if closed else query
        async with self._database.reading() as connection:
            return list((await connection.execute(query)).scalars())

    async def _begin(
        self, connection: AsyncConnection, rollout_id: str, attempt: int, stage: str, now: float, worker: str | None
    ) -> None:
        await connection.execute(
            self._database.insert_new(schema.stages).values(
                rollout_id=rollout_id, attempt=attempt, stage=stage, started_at=now, worker=worker
            )
        )


async def end_stages(
    connection: AsyncConnection, which: Any, now: float, outcome: str, cause: str | None = None
) -> None:
    """End those of `which` that are open."""
    values = {"ended_at": now, "outcome": outcome, "cause": json_codec.clean_text(cause)}
    await connection.execute(update(schema.stages).where(which, _st.ended_at.is_(None)).values(**values))


async def close_sessions(connection: AsyncConnection, rollout_ids: Sequence[str], now: float) -> None:
    """The keys of all their attempts open nothing any more."""
    mine = and_(_s.rollout_id.in_(rollout_ids), _s.closed_at.is_(None))
    await connection.execute(update(schema.sessions).where(mine).values(closed_at=now))


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
