"""Calls in flight are announced to the other gateways of a database.

A gateway that shares its database (setting `gateway.shared`) announces each call: before it asks the engine, it writes
a row with a lease to the database, and renews the lease as long as the call runs. So a gateway that ends a session can
wait for calls in flight on any gateway, and report calls whose gateway died.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from typing import Self

from polar_proxy.errors import StoreError
from polar_proxy.gateway.health import OutageLog
from polar_proxy.sessions.registry import SessionClosedError
from polar_proxy.store import Store
from polar_proxy.store.repositories.calls import OpenCall
from polar_proxy.types import new_id

RENEW_SECONDS = 5.0
LEASE_SECONDS = 15.0
"""A gateway that has not renewed a lease for this many seconds is dead, or cannot write to the database."""
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.05, 0.5


class InFlightCalls:
    """`async with InFlightCalls(store) as in_flight:` renews the leases of announced calls until the block ends."""

    def __init__(self, store: Store) -> None:
        self.gateway = f"{socket.gethostname()}:{os.getpid()}:{new_id('g')[-8:]}"
        self._store = store
        self._announced: set[str] = set()

    async def __aenter__(self) -> Self:
        self._renewing = asyncio.create_task(self._renew_forever(), name="polar-renew-calls")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)

    async def announce(self, session_id: str, call_ids: Sequence[str], max_calls: int | None) -> bool:
        """Announce to the other gateways of the database that this one is about to answer these calls.

        Returns False if the session would then have more than `max_calls` calls, including calls in flight. Do not
        answer the calls in this case. Raises SessionClosedError if another gateway closed the session, and StoreError
        if the store fails. If a call is answered although it could not be announced, it counts as lost only if its
        commit fails too.
        """
        self._announced.update(call_ids)
        announce = self._store.open_calls.announce
        result = await announce(self.gateway, session_id, call_ids, LEASE_SECONDS, max_calls=max_calls)
        if result == "announced":
            return True
        self.finished(call_ids)
        if result == "closed":
            raise SessionClosedError
        return False

    def finished(self, call_ids: Sequence[str]) -> None:
        """Stop renewing the leases of calls that ended.

        The commit of a call removes the call's row. A row that stays counts as a lost call once its lease expires.
        """
        self._announced.difference_update(call_ids)

    async def wait(self, session_id: str, timeout: float) -> Sequence[OpenCall]:
        """Wait until no other gateway is answering a call of this session, at most `timeout` seconds.

        Returns the calls that are left: they still run, or their gateway is dead.
        """
        deadline = time.monotonic() + timeout
        pause, expired_since = _FIRST_POLL_SECONDS, None
        while calls := await self._store.open_calls.of_session(session_id, without_gateway=self.gateway):
            now = time.monotonic()
            if any(call.lease_expires_at >= time.time() for call in calls):
                expired_since = None
            else:  # wait for one more renewal: the database may have been unreachable
                expired_since = now if expired_since is None else expired_since
                if now - expired_since > RENEW_SECONDS + 1.0:
                    break
            if now >= deadline:
                break
            await asyncio.sleep(min(pause, max(0.0, deadline - now)))
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        return calls

    async def wait_and_take(self, session_id: str, timeout: float, *, own: bool) -> str | None:
        """Wait until other gateways have answered their calls of a closed session, then delete the rows of the
        session's calls.

        Returns one line about the calls that other gateways lost or still answer after `timeout` seconds; None if there
        are none. `own`: True if this gateway itself lost or still answers calls of the session. The rows of its calls
        are deleted, too, but the line does not mention its calls.
        """
        if not await self.wait(session_id, timeout) and not own:
            return None
        now = time.time()
        taken = [call for call in await self._store.open_calls.take(session_id) if call.gateway != self.gateway]
        return describe_lost_calls(taken, now)

    async def _renew_forever(self) -> None:
        outage = OutageLog("the leases of calls in flight cannot be renewed")
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            if self._announced:
                try:
                    await self._store.open_calls.renew(self.gateway, set(self._announced), LEASE_SECONDS)
                    outage.worked()
                except StoreError as error:
                    outage.failed(error)


def describe_lost_calls(calls: Sequence[OpenCall], now: float) -> str | None:
    """Return one line about the calls that other gateways lost or are still answering; None without calls."""
    lines = []
    for gateway in sorted({call.gateway for call in calls}):
        of_gateway = [call for call in calls if call.gateway == gateway]
        if dead := sum(call.lease_expires_at < now for call in of_gateway):
            lines.append(
                f"{dead} call(s) were lost on the gateway {gateway}, which was killed or could not record them"
            )
        if running := len(of_gateway) - dead:
            lines.append(f"{running} call(s) were still being answered on the gateway {gateway} when the rollout ended")
    return "; ".join(lines) or None
