"""Stalls of an event loop: how long no callback ran, and whether the loop's own work or the machine was the reason.

A watched loop calls a function every few milliseconds, which writes a line whenever it is called late. During this
stall, the loop's thread had a processor for `cpu` seconds, and waited for one for `queued` seconds, because other
processes used them. In the rest it waited for another thread of its process, or for a blocking call.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_PERIOD_SECONDS = 0.01
_LATE_SECONDS = 0.02
"""Shorter stalls are not written."""


@dataclass(frozen=True)
class Stall:
    ended: float
    """End of the stall, as a value of `time.monotonic`."""
    seconds: float
    cpu: float
    queued: float

    @property
    def own(self) -> float:
        """The seconds of the stall in which the loop's thread did not wait for a processor."""
        return max(0.0, self.seconds - self.queued)


NO_STALL = Stall(0.0, 0.0, 0.0, 0.0)


def read_stalls(file: Path, since: float) -> list[Stall]:
    """Return the stalls that ended after `since` (of `time.monotonic`)."""
    stalls = [Stall(*json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    return [stall for stall in stalls if stall.ended >= since]


def watch_new_loops(file: str) -> None:
    """Watch every event loop that uvloop makes in this process from now on."""
    import uvloop

    make = uvloop.new_event_loop

    def make_watched() -> uvloop.Loop:
        loop = make()
        loop.call_soon(_Watch(loop, file).start)
        return loop

    uvloop.new_event_loop = make_watched


class _Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop, file: str) -> None:
        self._loop = loop
        self._out: TextIO = open(file, "a", buffering=1)  # noqa: SIM115 (open as long as the loop)
        self._last = (0.0, 0.0, 0.0)

    def start(self) -> None:
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._plan()

    def _plan(self) -> None:
        self._last = self._now()
        self._loop.call_later(_PERIOD_SECONDS, self._check)

    def _check(self) -> None:
        now, cpu, queued = (after - before for after, before in zip(self._now(), self._last, strict=True))
        if now - _PERIOD_SECONDS > _LATE_SECONDS:
            stall = (time.monotonic(), now - _PERIOD_SECONDS, cpu, min(queued, now))
            self._out.write(json.dumps([round(value, 4) for value in stall]) + "\n")
        self._plan()

    def _now(self) -> tuple[float, float, float]:
        _, queued, _ = os.pread(self._schedstat, 100, 0).split()
        return time.monotonic(), time.thread_time(), int(queued) / 1e9
