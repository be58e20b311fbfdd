"""Taking up after a process that was killed.

Its sandboxes are removed. What it ran for itself (`polar run`) gets a final status; what it ran of a service's job goes
back into the queue at once, where another process would only take it when its hold runs out.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from polar_proxy.rollouts.traces import exclude_orphaned_calls, take_calls_in_flight
from polar_proxy.store import RolloutRow, Store
from polar_proxy.traces.operations import build_traces
from sandboxes import orphans


async def recover(store: Store, *, attempts: int = 3) -> list[str]:
    """Clean up after dead owners; returns one line for people per thing that was done. The living are left alone.

    To be called before this process makes or takes its first rollout.
    """
    lines = leftovers(await orphans.sweep())
    groups: set[str] = set()
    for rollout in await store.rollouts.interrupted():
        if not _owner_is_dead(rollout):
            continue
        if rollout.session_id is not None:
            await store.sessions.close(rollout.session_id)
            # What was answered is kept and can be trained on; the reward stays null, which is not 0.
            lost = await take_calls_in_flight(store, rollout.session_id, rollout.rollout_id)
            await build_traces(store, rollout.session_id, rollout.rollout_id, reward=None, incomplete=lost)
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
    return [*lines, *await _lost_calls(store)]


async def _lost_calls(store: Store) -> list[str]:
    """Sweep what dead gateways of this database had in flight, but for rollouts that go on: their end tells of it."""
    dead = [gateway for gateway in await store.open_calls.gateways() if _worker_is_dead(gateway)]
    swept = Counter(call.gateway for call in await store.open_calls.sweep(dead))
    return [f"{count} calls were in flight on the gateway {name} when it died" for name, count in sorted(swept.items())]


def leftovers(removed: Sequence[orphans.RemovedItem]) -> list[str]:
    """One line for people about everything that was left of killed processes' sandboxes; none where nothing was."""
    if not removed:
        return []
    kinds = Counter(item.what for item in removed if item.what != "record")
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    count = len({item.sandbox for item in removed})
    return [f"removed what was left of {count} sandbox{'es' if count > 1 else ''} of a killed process ({what})"]


def _worker_is_dead(worker: str) -> bool:
    """Whether the process of this name (see `Scheduler.worker`, `InFlight.name`) is gone; if that cannot be told, its
    hold runs out."""
    host, pid, _ = worker.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    return int(pid) == os.getpid() or _is_gone(int(pid))


def _owner_is_dead(rollout: RolloutRow) -> bool:
    """Whether the process that ran this rollout is gone. Other machines' processes cannot be seen: they live."""
    if rollout.owner_host != socket.gethostname() or rollout.owner_pid is None:
        return False
    if rollout.owner_pid == os.getpid():
        return True  # recovery comes before this process makes its first rollout: the number was used again
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
    """When a process began, in seconds since the epoch; None where /proc does not tell (not Linux, or just gone)."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return None
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
