"""Cleans up after a process that was killed.

Its sandboxes are removed. The rollouts of its own job (`polar run`) get a final status. Rollouts of a server's job go
back into the queue at once; other workers would reclaim them only when their leases expire.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from polar_proxy.rollouts.orphaned_calls import exclude_orphaned_calls, take_calls_in_flight
from polar_proxy.store import RolloutRow, Store
from polar_proxy.traces.operations import build_traces
from sandboxes import orphans


async def recover(store: Store, *, attempts: int = 3) -> list[str]:
    """Clean up after dead processes of this machine; return one readable line for each action.

    Call it before this process creates or claims its first rollout.
    """
    lines = describe_removed(await orphans.sweep())
    groups: set[str] = set()
    for rollout in await store.rollouts.interrupted():
        if not _owner_is_dead(rollout):
            continue
        if rollout.session_id is not None:
            await store.sessions.close(rollout.session_id)
            # The recorded calls are kept and can be trained on; the reward stays null, which is not 0.
            incomplete = await take_calls_in_flight(store, rollout.session_id, rollout.rollout_id)
            await build_traces(store, rollout.session_id, rollout.rollout_id, reward=None, incomplete=incomplete)
        await store.rollouts.end_open_stage(rollout.rollout_id, "failed", "interrupted")
        await store.rollouts.update(
            rollout.rollout_id, status="failed", error="interrupted: the process that ran it was killed"
        )
        await exclude_orphaned_calls(store, rollout.rollout_id)
        groups.add(rollout.group_id)
        lines.append(f"rollout {rollout.rollout_id} was interrupted; its {rollout.calls} recorded calls are kept")
    for worker in await store.queue.workers():
        if not _worker_is_dead(worker):
            continue
        for rollout_id, attempt in (await store.queue.reclaim_from(worker, attempts=attempts)).items():
            await exclude_orphaned_calls(store, rollout_id)
            lines.append(f"rollout {rollout_id} " + ("is queued again" if attempt else "has been tried too often"))
    groups.update(await store.groups.unsettled())
    for group_id in groups:
        await store.groups.settle(group_id)
    return [*lines, *await _remove_lost_calls(store)]


async def _remove_lost_calls(store: Store) -> list[str]:
    """Remove the calls that dead gateways had in flight; those of a rollout that continues are reported at its end."""
    dead = [gateway for gateway in await store.open_calls.gateways() if _worker_is_dead(gateway)]
    swept = Counter(call.gateway for call in await store.open_calls.sweep(dead))
    return [f"{count} calls were in flight on the gateway {name} when it died" for name, count in sorted(swept.items())]


def describe_removed(removed: Sequence[orphans.RemovedItem]) -> list[str]:
    """Return a readable line about the removed sandboxes of killed processes; no line if there were none."""
    if not removed:
        return []
    kinds = Counter(item.what for item in removed if item.what != "record")
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    count = len({item.sandbox for item in removed})
    return [f"removed the remains of {count} sandbox{'es' if count > 1 else ''} of a killed process ({what})"]


def _worker_is_dead(worker: str) -> bool:
    """Return whether the process of a worker or gateway is gone; `worker` is its name, host:pid:random.

    False for other machines, whose processes cannot be seen: their leases expire."""
    host, pid, _ = worker.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    return int(pid) == os.getpid() or _is_gone(int(pid))


def _owner_is_dead(rollout: RolloutRow) -> bool:
    """Return whether the process that ran this rollout is gone; False for processes of other machines."""
    if rollout.owner_host != socket.gethostname() or rollout.owner_pid is None:
        return False
    if rollout.owner_pid == os.getpid():
        return True  # this process has created no rollout yet, so the process id was reused
    if _is_gone(rollout.owner_pid):
        return True
    began = _process_start(rollout.owner_pid)
    return began is not None and began > rollout.created_at + 1.0


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _process_start(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None without /proc, or if it just ended."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return None
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
