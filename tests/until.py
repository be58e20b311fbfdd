"""Waiting for an event. The time limit prevents waiting forever and does not measure speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

GUARD_SECONDS = 120.0


async def until(happened: Callable[[], object], what: str = "what the test waits for") -> None:
    """Return once `happened()` is true. Raises AssertionError after GUARD_SECONDS."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GUARD_SECONDS
    while not happened():
        assert loop.time() < deadline, f"{what} did not happen within {GUARD_SECONDS:.0f} s"
        await asyncio.sleep(0.005)
