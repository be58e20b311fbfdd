"""Whether this machine has the memory for one more sandbox.

A sandbox uses little when it is opened and much when its agent runs its tests, so free memory alone lets in too many at
once: what was let in within the last minute is counted as still to come, until it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from polar_proxy.rollouts.stage_limits import AdmissionRequest

TOO_LITTLE_MEMORY = "too little memory"
RESERVATION_SECONDS = 60.0
"""By then what a sandbox needs shows in the machine's free memory."""

_NO_LIMIT = 1 << 60
"""A control group without a limit says one of this order (version 1), or `max` (version 2)."""
_GROUPS = (
    # (usage, limit, statistics, the name of what could be dropped)
    ("memory.current", "memory.max", "memory.stat", "inactive_file"),
    ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def free_memory_mb(root: Path = Path("/")) -> int | None:
    """MiB that processes can still be given, by the machine and by the control group that this one is in, whichever is
    less; None where the system does not say (it is no Linux)."""
    try:
        meminfo = _fields((root / "proc/meminfo").read_text())
    except OSError:
        return None
    if "MemAvailable" not in meminfo:
        return None
    free = meminfo["MemAvailable"] << 10
    for usage, limit, statistics, droppable in _GROUPS:
        folder = root / "sys/fs/cgroup"
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            dropped = _fields((folder / statistics).read_text()).get(droppable, 0)
        except (OSError, ValueError):
            continue
        if most < _NO_LIMIT:
            free = min(free, most - used + dropped)
    return max(0, free >> 20)


def _fields(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


class MemoryAdmission:
    """`room.refusal` is a `Crowded`; whom it does not refuse it counts as let in, until it is told that they left."""

    def __init__(
        self,
        need_mb: int,
        reserve_mb: int,
        *,
        free: Callable[[], int | None] = free_memory_mb,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`need_mb`: of a rollout whose ticket does not say; 0: memory is not looked at. `reserve_mb` stays free."""
        self._need = need_mb
        self._reserve = reserve_mb
        self._free = free
        self._clock = clock
        self._promised: dict[str, tuple[float, int]] = {}
        """What is still to come, by rollout: until when, and MiB."""

    def refusal(self, ticket: AdmissionRequest) -> str | None:
        """Why there is no room for its sandbox, or None."""
        if self._need == 0 or (free := self._free()) is None:
            return None
        now = self._clock()
        need = ticket.memory_mb or self._need
        self._promised = {name: one for name, one in self._promised.items() if one[0] > now}
        to_come = sum(size for name, (_, size) in self._promised.items() if name != ticket.rollout_id)
        if free - to_come - need < self._reserve:
            return TOO_LITTLE_MEMORY
        self._promised[ticket.rollout_id] = now + RESERVATION_SECONDS, need
        return None

    def left(self, rollout_id: str) -> None:
        """Its sandbox is gone: nothing of it is still to come."""
        self._promised.pop(rollout_id, None)
