"""Detects whether the records that a page shows have changed since the page was made.

The state of a record, or of a list of records, is a number: the hash of some rows. After a change, the number is
different. An index finds the rows, so a state is read in about a millisecond in a database of any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import BindParameter, Connection, Select, bindparam, func, select

from polar_proxy.store import schema
from polar_proxy.store.database import Repository

Followed = Literal["lists", "rollout", "session", "group", "training"]
"""The subject of a page: `lists` for the lists of the newest records, otherwise the kind of the one record shown."""

_LISTED = 50
"""Number of sessions and rollouts that the first page of a list shows."""

_s, _r, _g = schema.sessions.c, schema.rollouts.c, schema.groups.c
_e, _je, _l = schema.rollout_events.c, schema.job_events.c, schema.training_lines.c
_id: BindParameter[str] = bindparam("record_id")

_session = (_s.session_id, _s.label, _s.incomplete, _s.calls, _s.failed_calls, _s.reward, _s.closed_at)
_rollout = (_r.rollout_id, _r.label, _r.incomplete, _r.status, _r.attempt, _r.reward, _r.rating)
_rollouts = select(*_rollout, *_session).outerjoin(schema.sessions, _s.session_id == _r.session_id)
_last_line = select(func.max(_l.position)).where(_l.run_id == schema.training_runs.c.run_id).scalar_subquery()
_runs = select(schema.training_runs.c.run_id, _last_line)

_QUERIES: Mapping[Followed, Sequence[Select[Any]]] = {
    "lists": (
        select(func.max(_e.event_id)),
        select(func.max(_je.job_event_id)),
        select(*_session).order_by(_s.session_id.desc()).limit(_LISTED),
        _rollouts.order_by(_r.rollout_id.desc()).limit(_LISTED),
        _runs,
    ),
    "rollout": (_rollouts.where(_r.rollout_id == _id), select(func.max(_e.event_id)).where(_e.rollout_id == _id)),
    "session": (select(*_session).where(_s.session_id == _id),),
    "group": (select(_g.status, _g.delivery).where(_g.group_id == _id), _rollouts.where(_r.group_id == _id)),
    "training": (_runs.where(schema.training_runs.c.run_id == _id),),
}


class ChangeRepository(Repository):
    """Computes the states of records. Reads the database each time, because other processes may write to it."""

    async def state(self, followed: Followed, record_id: str) -> int:
        """Return the state of a record or, if `followed` is `lists`, of the lists of the newest records.

        Compare only states from the same process: other processes hash differently.
        """

        def read(connection: Connection) -> int:
            rows = [connection.execute(query, {"record_id": record_id}).all() for query in _QUERIES[followed]]
            return hash(tuple(tuple(map(tuple, found)) for found in rows))

        return await self._database.read(read)
