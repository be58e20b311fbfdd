"""Find a rollout, a session or a call by its id, its label, the beginning of its id or label, or `last`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, func, literal, select

from polar_proxy.errors import UsageError
from polar_proxy.store import schema
from polar_proxy.store.database import Repository
from polar_proxy.store.urls import database_location

RecordKind = Literal["rollout", "session", "call"]
LAST = "last"
"""A name that means the session that was used last."""

_LISTED = 5
"""Number of candidates that the error for an ambiguous name lists."""
_s = schema.sessions.c
_KINDS: tuple[tuple[RecordKind, str, ColumnElement[str]], ...] = (
    ("rollout", "roll_", schema.rollouts.c.rollout_id),
    ("session", "sess_", _s.session_id),
    ("call", "call_", schema.calls.c.call_id),
)


class UnknownNameError(UsageError):
    """No record has this name."""


@dataclass(frozen=True, slots=True)
class RecordName:
    kind: RecordKind
    record_id: str
    label: str | None = None


class NameRepository(Repository):
    """Names of rollouts, sessions and calls."""

    async def find(self, name: str) -> RecordName:
        """Return the record that `name` means.

        `name` is its id, `last`, its label, or the beginning of its id or label, tried in this order. Raises
        UnknownNameError if no record has the name, and UsageError if several have it.
        """
        for kind, prefix, column in _KINDS:
            if name.startswith(prefix) and (found := await self._names(_of_id(kind, column).where(column == name))):
                return found[0]
        if name == LAST and (found := await self._names(_by_label.order_by(_used.desc()).limit(1))):
            return found[0]
        candidates = await self._names(_newest(_by_label.where(_s.label == name))) or await self._begins(name)
        if len(candidates) > 1:
            raise UsageError(_ambiguous(name, candidates))
        if candidates:
            return candidates[0]
        place = database_location(self._database.url)
        raise UnknownNameError(
            f"No rollout, session or call in {place} has an id or a label that begins with {name!r}. "
            "`polar sessions` lists the sessions."
        )

    async def _begins(self, name: str) -> list[RecordName]:
        """Return the newest few records of each kind whose id or label begins with `name`."""
        if not name:
            return []
        found = await self._names(_newest(_by_label.where(_s.label.startswith(name, autoescape=True))))
        for kind, prefix, column in _KINDS:
            if name.startswith(prefix) or prefix.startswith(name):
                query = _of_id(kind, column).where(column.startswith(name, autoescape=True))
                found += await self._names(query.order_by(column.desc()).limit(_LISTED + 1))
        return list({one.record_id: one for one in found}.values())

    async def _names(self, query: Select[Any]) -> list[RecordName]:
        return await self._rows(RecordName, query)


def _select_names(kind: RecordKind, record_id: ColumnElement[str], label: ColumnElement[Any]) -> Select[Any]:
    columns: list[ColumnElement[Any]] = [literal(kind), record_id, label]
    return select(*columns)


_by_label = _select_names("session", _s.session_id, _s.label)
_used = func.coalesce(_s.last_call_at, _s.created_at)


def _of_id(kind: RecordKind, column: ColumnElement[str]) -> Select[Any]:
    return _select_names(kind, column, literal(None))


def _newest(query: Select[Any]) -> Select[Any]:
    return query.order_by(_s.session_id.desc()).limit(_LISTED + 1)


def _ambiguous(name: str, candidates: list[RecordName]) -> str:
    lines = [f"{one.record_id} {one.label}" if one.label else one.record_id for one in candidates[:_LISTED]]
    more = ["..."] if len(candidates) > _LISTED else []
    return "\n".join([f"{name!r} matches several names. Write one of these ids, or more of its label:", *lines, *more])
