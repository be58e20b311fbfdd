"""What holds for all servers on a database: whether their rollout services take anything new.

A claim reads the row in its own transaction, so a pause holds on every server from the moment at which it is
committed.
It says nothing of a job that a process runs for itself (`polar run`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, or_, select, update

from polar_proxy.store import schema
from polar_proxy.store.base import Repository

_f = schema.fleet.c
_r = schema.rollouts.c
_in_hand = and_(_r.claimed_by.is_not(None), _r.owner_pid.is_(None), ~schema.rollout_is_final)


@dataclass(frozen=True, slots=True)
class FleetRow:
    """Times in seconds since the epoch."""

    paused_at: float | None
    """None: work is taken. A pause that has ended by itself may still stand here."""
    paused_until: float | None

    @property
    def paused(self) -> bool:
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > time.time())


def fleet_paused(now: float) -> ColumnElement[bool]:
    """Whether a row of `fleet` says that nothing new is begun."""
    return and_(_f.paused_at.is_not(None), or_(_f.paused_until.is_(None), _f.paused_until > now))


class FleetRepository(Repository):
    async def get(self) -> FleetRow:
        async with self._database.reading() as connection:
            row = (await connection.execute(select(_f.paused_at, _f.paused_until).where(_f.fleet_id == 1))).one()
        return FleetRow(*row)

    async def update(self, wanted: FleetRow, *, only_if: FleetRow | None = None) -> bool:
        """Pause all servers, or let them go on. `only_if`: only where it stands so. Returns whether it was done.

        When this returns, whatever was being claimed meanwhile is claimed: `fleet_in_hand` counts it."""
        which = _f.fleet_id == 1
        async with self._database.writing() as connection:
            found = (
                await connection.execute(select(_f.paused_at, _f.paused_until).where(which).with_for_update())
            ).one()
            if only_if is not None and FleetRow(*found) != only_if:
                return False
            await connection.execute(
                update(schema.fleet)
                .where(which)
                .values(paused_at=wanted.paused_at, paused_until=wanted.paused_until if wanted.paused_at else None)
            )
        return True

    async def in_flight(self) -> list[str]:
        """The rollouts that services have in hand, whichever server it is."""
        async with self._database.reading() as connection:
            query = select(_r.rollout_id).where(_in_hand).order_by(_r.rollout_id)
            return list((await connection.execute(query)).scalars())
