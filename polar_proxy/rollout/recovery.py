"""Taking up after a process that was killed: its sandboxes are removed, its rollouts get a final status."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from polar_proxy.rollout.traces import build_traces
from polar_proxy.store import RolloutRow, Store
from sandboxes import orphans


async def recover(store: Store) -> list[str]:
    """Clean up after dead owners; returns one line for people per thing that was done. The living are left alone."""
    lines = [f"removed a leftover {item}" for item in await orphans.sweep()]
    for rollout in await store.interrupted_rollouts():
        if not _owner_is_dead(rollout):
            continue
        if rollout.session_id is not None:
            await store.close_session(rollout.session_id)
            # What was answered is kept and can be trained on; the reward stays null, which is not 0.
            await build_traces(store, rollout.session_id, rollout.rollout_id, reward=None, incomplete=False)
        await store.set_rollout(
            rollout.rollout_id, status="failed", error="interrupted: the process that ran it was killed"
        )
        lines.append(f"rollout {rollout.rollout_id} was interrupted; its {rollout.calls} recorded calls are kept")
    return lines


def _owner_is_dead(rollout: RolloutRow) -> bool:
    """Whether the process that ran this rollout is gone. Other machines' processes cannot be seen: they live."""
    if rollout.owner_host != socket.gethostname() or rollout.owner_pid is None:
        return False
    if rollout.owner_pid == os.getpid():
        return True  # recovery comes before this process makes its first rollout: the number was used again
    try:
        os.kill(rollout.owner_pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    began = _process_start(rollout.owner_pid)
    return began is not None and began > rollout.created_at + 1.0


def _process_start(pid: int) -> float | None:
    """When a process began, in seconds since the epoch; None where /proc does not tell (not Linux, or just gone)."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return None
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
