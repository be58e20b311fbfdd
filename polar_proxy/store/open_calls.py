"""Calls that several gateways of one database are answering, so that each knows of the others'.

Promises:

* a call is announced only while its session is open: once that is closed no further call of it begins, on any gateway;
* its row goes in the transaction that commits the call. A row that nobody holds any more is a call that is lost: its
  gateway was killed, or could not commit it;
* whoever ends a session takes the rows that are left. A call that is committed after its row was taken came too late
  for the traces: the same transaction excludes it and marks its rollout incomplete, so that the books add up.

A gateway that is alone announces nothing, and its commits look for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from sqlalchemy import and_, delete, or_, select, update

from polar_proxy.store import schema
from polar_proxy.store.announce import CallAnnouncer, OpenCall
from polar_proxy.store.base import Repository
from polar_proxy.store.database import Database
from polar_proxy.store.group_commit import GroupCommit

_o = schema.open_calls.c
_r = schema.rollouts.c
_final = schema.rollout_is_final
_row = (_o.call_id, _o.session_id, _o.gateway, _o.started_at, _o.lease_expires_at)


class OpenCallRepository(Repository):
    def __init__(self, database: Database, announcer: CallAnnouncer, writer: GroupCommit) -> None:
        super().__init__(database)
        self._announcer = announcer
        self._commits = writer

    async def announce(self, gateway: str, session_id: str, call_ids: Sequence[str], seconds: float) -> bool:
        """Say that `gateway` is about to answer these calls, which it holds for so long unless it renews them. Returns
        when every gateway can see it; False: the session is closed, and nothing may be answered."""
        self._commits.shared = True
        now = time.time()
        return await self._announcer.announce(
            [OpenCall(call_id, session_id, gateway, now, now + seconds) for call_id in call_ids]
        )

    async def renew(self, gateway: str, call_ids: Collection[str], seconds: float) -> None:
        """It is still answering these."""
        ids = list(call_ids)
        async with self._database.writing() as connection:
            for first in range(0, len(ids), 1000):
                mine = and_(_o.gateway == gateway, _o.call_id.in_(ids[first : first + 1000]))
                await connection.execute(
                    update(schema.open_calls).where(mine).values(lease_expires_at=time.time() + seconds)
                )

    async def of_session(self, session_id: str, *, but: str | None = None) -> list[OpenCall]:
        """What is being answered of a session, or was lost of it, oldest first; not by the gateway `but`."""
        query = select(*_row).where(_o.session_id == session_id).order_by(_o.started_at, _o.call_id)
        if but is not None:
            query = query.where(_o.gateway != but)
        async with self._database.reading() as connection:
            return [OpenCall(*row) for row in await connection.execute(query)]

    async def take(self, session_id: str) -> list[OpenCall]:
        """Take away what is left of a session that has ended: what comes of it later comes too late."""
        if not await self.of_session(session_id):
            return []
        taken = delete(schema.open_calls).where(_o.session_id == session_id).returning(*_row)
        async with self._database.writing() as connection:
            return [OpenCall(*row) for row in (await connection.execute(taken)).all()]

    async def gateways(self) -> set[str]:
        """The gateways that have calls open, or died with some."""
        async with self._database.reading() as connection:
            return set((await connection.execute(select(_o.gateway).distinct())).scalars())

    async def sweep(self, dead: Collection[str] = ()) -> list[OpenCall]:
        """Remove the rows of gateways that are `dead` or fell silent, and return them. Those of a rollout that goes on
        stay: its end has to know what was lost."""
        now = time.time()
        goes_on = select(_r.rollout_id).where(_r.session_id == _o.session_id, ~_final).exists()
        over = or_(_o.lease_expires_at < now, _o.gateway.in_(list(dead)))
        async with self._database.writing() as connection:
            gone = delete(schema.open_calls).where(over, ~goes_on).returning(*_row)
            removed = [OpenCall(*row) for row in (await connection.execute(gone)).all()]
            await connection.execute(
                update(schema.open_calls)
                .where(_o.gateway.in_(list(dead)), _o.lease_expires_at > now)
                .values(lease_expires_at=now)
            )
        return removed
