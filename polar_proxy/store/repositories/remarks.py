"""Labels, notes and ratings that people give to rollouts and sessions: who gave which, and when."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import get_args

from sqlalchemy import Connection, insert, select, update

from polar_proxy.errors import UsageError
from polar_proxy.store import schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.secrets import storable_text
from polar_proxy.types import RemarkKind, new_id

REMARK_KINDS: dict[str, RemarkKind] = {kind: kind for kind in get_args(RemarkKind)}
LOWEST_RATING, HIGHEST_RATING = 1, 5
_LONGEST_NOTE = 20_000
_a = schema.remarks.c


@dataclass(frozen=True, slots=True)
class RemarkRow:
    """One remark. `text`: the label or the note. `value`: the rating, 1 to 5."""

    remark_id: str
    rollout_id: str | None
    session_id: str | None
    kind: RemarkKind
    text: str | None
    value: float | None
    author: str
    created_at: float


class RemarkRepository(Repository):
    """Remarks of rollouts, and of sessions without a rollout. All are kept."""

    async def add(
        self,
        kind: RemarkKind,
        author: str,
        *,
        rollout_id: str | None = None,
        session_id: str | None = None,
        text: str = "",
        rating: float | None = None,
    ) -> str:
        """Store a remark and return its id. The newest label and rating are also in the row of the rollout or session.

        Raises UsageError for an empty or too long text, and for a rating that is not from 1 to 5.
        """
        if (rollout_id is None) == (session_id is None):
            raise UsageError("Give either rollout_id or session_id.")
        text = text.strip()
        if kind == "rating":
            if rating is None or not LOWEST_RATING <= rating <= HIGHEST_RATING:
                raise UsageError(f"A rating is a number from {LOWEST_RATING} to {HIGHEST_RATING}.")
            text = ""
        elif not text:
            raise UsageError(f"The {kind} is empty.")
        elif len(text) > _LONGEST_NOTE:
            raise UsageError(f"The {kind} has {len(text)} characters; at most {_LONGEST_NOTE} are allowed.")
        row = RemarkRow(
            new_id("rem"),
            rollout_id,
            session_id,
            kind,
            storable_text(text) if text else None,
            rating if kind == "rating" else None,
            storable_text(author) or "",
            time.time(),
        )
        table, key = (schema.sessions, session_id) if rollout_id is None else (schema.rollouts, rollout_id)
        shown = {"label": row.text, "rating": row.value}

        def write(connection: Connection) -> None:
            connection.execute(insert(schema.remarks).values(asdict(row)))
            if kind in shown:
                (identity,) = table.primary_key.columns
                connection.execute(update(table).where(identity == key).values({kind: shown[kind]}))

        await self._database.write(write)
        return row.remark_id

    async def get(self, remark_id: str) -> RemarkRow | None:
        return next(iter(await self._rows(RemarkRow, _select.where(_a.remark_id == remark_id))), None)

    async def of_rollout(self, rollout_id: str) -> list[RemarkRow]:
        """Return the remarks of a rollout, oldest first."""
        return await self._rows(RemarkRow, _select.where(_a.rollout_id == rollout_id))

    async def of_session(self, session_id: str) -> list[RemarkRow]:
        """Return the remarks of a session, oldest first."""
        return await self._rows(RemarkRow, _select.where(_a.session_id == session_id))


_select = select(*row_columns(RemarkRow, schema.remarks)).order_by(_a.remark_id)
