"""Pause, resume and drain of all servers on a database, by the one row that each of their claims reads.

Whoever waits pauses with an end, so that a server that is killed while it waits leaves nothing paused.
"""

from __future__ import annotations

import time

from polar_proxy.api.jobs import until
from polar_proxy.client.errors import ApiError
from polar_proxy.store import Store
from polar_proxy.store.fleet import FleetRow

_WORKING = FleetRow(None, None)
_AHEAD = 60.0
"""Seconds for which a pause outlives whoever holds it up while waiting."""
_ROUND = 30.0
"""Seconds of a wait without an end, until its pause is renewed."""


async def pause(store: Store, seconds: float | None, wait_idle: float | None) -> None:
    """Raises ApiError `pause_timed_out` where something is still in hand after `wait_idle` seconds; then all
    is as it was before."""
    if wait_idle is not None and (left := await _idle(store, wait_idle)):
        raise pause_timed_out(wait_idle, len(left))
    now = time.time()
    await store.fleet.update(FleetRow(now, None if seconds is None else now + seconds))


async def resume(store: Store) -> None:
    await store.fleet.update(_WORKING)


async def drain(store: Store, timeout: float | None) -> list[str]:
    """Returns what is still in hand after `timeout` seconds; then it is as it was before. Else all stay paused."""
    if left := await _idle(store, timeout):
        return left
    await store.fleet.update(FleetRow(time.time(), None))
    return []


def pause_timed_out(seconds: float, in_flight: int) -> ApiError:
    message = f"After {seconds:g} s {in_flight} rollouts are still in hand: nothing stays paused."
    return ApiError(message, status=409, code="pause_timed_out", detail={"in_flight": in_flight})


async def _idle(store: Store, seconds: float | None) -> list[str]:
    """Pause and wait until nothing is in hand. What is left is returned, and this pause, if nobody has changed it
    meanwhile, is undone."""
    before = await store.fleet.get()
    deadline = None if seconds is None else time.monotonic() + seconds
    left: list[str] = []

    async def idle() -> bool:
        nonlocal left
        left = await store.fleet.in_flight()
        return not left

    mine = before
    done = False
    try:
        while not done and (deadline is None or mine is before or time.monotonic() < deadline):
            rest = _ROUND if deadline is None else min(_ROUND, max(0.0, deadline - time.monotonic()))
            held = FleetRow(time.time(), time.time() + rest + _AHEAD)
            if not await store.fleet.update(held, only_if=mine):
                raise ApiError("Somebody else paused or resumed all servers meanwhile.", status=409, code="conflict")
            mine = held
            done = await until(idle, rest)
    finally:
        if not done and mine is not before:
            await store.fleet.update(before, only_if=mine)
    return left
