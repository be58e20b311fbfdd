"""Calls in progress, announced to the other gateways that share the database.

Promises:

* A call is announced only while its session is open: once the session is closed, no gateway starts another call of it.
* The transaction that commits a call deletes its row. A row whose lease has expired is a lost call: its gateway was
  killed or could not commit it.
* The end of a session removes the remaining rows. A call that is committed after its row was removed is too late for
  the traces: the same transaction excludes it and marks its rollout incomplete, so that every call stays accounted for.

A gateway that does not share its database announces nothing, and its commits check nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from sqlalchemy import and_, delete, or_, select, update

from polar_proxy.store import schema
from polar_proxy.store.base import Repository
from polar_proxy.store.database import Database
from polar_proxy.store.group_commit import CallAnnouncer, GroupCommit, OpenCall

_o = schema.open_calls.c
_r = schema.rollouts.c
_columns = (_o.call_id, _o.session_id, _o.gateway, _o.started_at, _o.lease_expires_at)


class OpenCallRepository(Repository):
    """Calls in progress."""

    def __init__(self, database: Database, announcer: CallAnnouncer, writer: GroupCommit) -> None:
        super().__init__(database)
        self._announcer = announcer
        self._writer = writer

    async def announce(self, gateway: str, session_id: str, call_ids: Sequence[str], seconds: float) -> bool:
        """Announce calls that `gateway` is about to answer, with a lease of `seconds`.

        Returns True when every gateway can see them, False if the session is closed and they must not be answered.
        """
        self._writer.shared = True
        now = time.time()
        return await self._announcer.announce(
            [OpenCall(call_id, session_id, gateway, now, now + seconds) for call_id in call_ids]
        )

    async def renew(self, gateway: str, call_ids: Collection[str], seconds: float) -> None:
        """Extend the leases of calls that the gateway is still answering."""
        ids = list(call_ids)
        async with self._database.writing() as connection:
            for first in range(0, len(ids), 1000):
                mine = and_(_o.gateway == gateway, _o.call_id.in_(ids[first : first + 1000]))
                expires_at = time.time() + seconds
                await connection.execute(update(schema.open_calls).where(mine).values(lease_expires_at=expires_at))

    async def of_session(self, session_id: str, *, but: str | None = None) -> list[OpenCall]:
        """Return the session's calls in progress and lost calls, oldest first, except those of the gateway `but`."""
        query = select(*_columns).where(_o.session_id == session_id).order_by(_o.started_at, _o.call_id)
        if but is not None:
            query = query.where(_o.gateway != but)
        async with self._database.reading() as connection:
            return [OpenCall(*row) for row in await connection.execute(query)]

    async def take(self, session_id: str) -> list[OpenCall]:
        """Delete and return the remaining calls of a session that has ended."""
        if not await self.of_session(session_id):
            return []
        deleted = delete(schema.open_calls).where(_o.session_id == session_id).returning(*_columns)
        async with self._database.writing() as connection:
            return [OpenCall(*row) for row in (await connection.execute(deleted)).all()]

    async def gateways(self) -> set[str]:
        """Return the gateways that have calls in progress or died with some."""
        async with self._database.reading() as connection:
            return set((await connection.execute(select(_o.gateway).distinct())).scalars())

    async def sweep(self, dead: Collection[str] = ()) -> list[OpenCall]:
        """Delete and return the calls of `dead` gateways and those whose lease has expired.

        Calls of a rollout that still runs stay, because its end must know what was lost.
        """
        now = time.time()
        still_runs = select(_r.rollout_id).where(_r.session_id == _o.session_id, ~schema.rollout_is_final).exists()
        of_dead = _o.gateway.in_(list(dead))
        lost = or_(_o.lease_expires_at < now, of_dead)
        async with self._database.writing() as connection:
            deleted = delete(schema.open_calls).where(lost, ~still_runs).returning(*_columns)
            removed = [OpenCall(*row) for row in (await connection.execute(deleted)).all()]
            expire = update(schema.open_calls).where(of_dead, _o.lease_expires_at > now)
            await connection.execute(expire.values(lease_expires_at=now))
        return removed
