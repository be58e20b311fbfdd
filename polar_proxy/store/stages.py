"""How far a rollout is: its stages, attempt by attempt, and its end.

Promise: who does not hold a rollout any more changes nothing of it. A process that slept while another one took over
is told so (`ClaimLostError`) the next time that it wants to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import json_codec, schema
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
