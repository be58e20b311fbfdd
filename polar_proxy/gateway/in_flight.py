"""What the gateways of one database are answering, each for the others to see.

A gateway that is one of several announces each call in the database before it asks the engine, and renews what is long.
So the end of a session waits for the calls that are in flight on any gateway, and knows of those that were lost with
one. A gateway that is alone has none of this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from polar_proxy.errors import StoreError
from polar_proxy.store import Store
from polar_proxy.types import new_id

log = logging.getLogger(__name__)

_RENEW_SECONDS = 5.0
LEASE_SECONDS = 15.0
"""A gateway that renews nothing for so long is dead, or cannot write."""
_POLL_SECONDS = (0.05, 0.5)
"""The first pause before what others are answering is looked at again, and the longest."""


class InFlightCalls:
    """`async with InFlight(store) as in_flight:` renews what is announced until the block ends."""

    def __init__(self, store: Store) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{new_id('g')[-8:]}"
        self._store = store
        self._mine: set[str] = set()

    async def __aenter__(self) -> Self:
        self._renewing = asyncio.create_task(self._renew_forever(), name="polar-renew-calls")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)

    # Of this gateway

    async def announce(self, session_id: str, call_ids: Sequence[str]) -> bool:
        """Whether these calls may begin: the session is open, and every gateway can see them. A database that cannot be
        written keeps no agent from its answer; the commit sees to what that means."""
        self._mine.update(call_ids)
        try:
            begins = await self._store.open_calls.announce(self.name, session_id, call_ids, LEASE_SECONDS)
        except StoreError:
            log.exception("call %s could not be announced to the other gateways", call_ids[0])
            return True
        if not begins:
            self.over(call_ids)
        return begins

    def over(self, call_ids: Sequence[str]) -> None:
        """They are committed, or lost: a row that is still there is renewed no more, and tells of the loss."""
        self._mine.difference_update(call_ids)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            if self._mine:
                try:
                    await self._store.open_calls.renew(self.name, set(self._mine), LEASE_SECONDS)
                except StoreError as error:
                    log.warning("the calls in flight cannot be renewed, trying again: %s", error)

    # Of the others

    async def wait(self, session_id: str, patience: float) -> Sequence[Any]:
        """Wait, `patience` seconds at most, until no other gateway is answering a call of this session. What is left is
        returned: calls that still run, or whose gateway is dead."""
        deadline = time.monotonic() + patience
        pause, silent_since = _POLL_SECONDS[0], None
        while calls := await self._store.open_calls.of_session(session_id, but=self.name):
            now = time.monotonic()
            if any(call.lease_expires_at >= time.time() for call in calls):
                silent_since = None
            else:  # believed once its gateway had time to renew it: the database may have been away
                silent_since = now if silent_since is None else silent_since
                if now - silent_since > _RENEW_SECONDS + 1.0:
                    break
            if now >= deadline:
                break
            await asyncio.sleep(min(pause, max(0.0, deadline - now)))
            pause = min(2 * pause, _POLL_SECONDS[1])
        return calls

    async def ended(self, session_id: str, patience: float, *, own: bool) -> str | None:
        """As `wait`, of a session that has been closed; what is left is taken away, and told in one line. `own`: some
        of it is this gateway's, which was waited for in vain."""
        if not await self.wait(session_id, patience) and not own:
            return None
        now = time.time()
        taken = [call for call in await self._store.open_calls.take(session_id) if call.gateway != self.name]
        return describe_lost_calls(taken, now)


def describe_lost_calls(calls: Sequence[Any], now: float) -> str | None:
    """What was lost of these calls of other gateways, or is still being answered; None where there are none."""
    lines = []
    for gateway in sorted({call.gateway for call in calls}):
        its = [call for call in calls if call.gateway == gateway]
        if dead := sum(call.lease_expires_at < now for call in its):
            lines.append(
                f"{dead} call(s) were lost on the gateway {gateway}, which was killed or could not record them"
            )
        if running := len(its) - dead:
            lines.append(f"{running} call(s) were still being answered on the gateway {gateway} when the rollout ended")
    return "; ".join(lines) or None
