"""Cleans up after processes that were killed and attempts that were repeated.

The sandboxes of a killed process are removed. The rollouts of a killed `polar run` get a final status. Rollouts of a
killed server go back into the queue at once; other workers would reclaim them only when their leases expire. Each call
of an interrupted or repeated attempt is put into a trace, or excluded with a reason.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar_proxy.store import RolloutRow, Store
from polar_proxy.temporary import abandoned_folders, process_exists
from polar_proxy.traces.operations import build_traces, exclude_session
from sandboxes import orphans
from sandboxes.remove_tree import remove_tree

MAX_ATTEMPTS = 3
"""Maximum number of attempts at a rollout whose infrastructure fails."""


async def recover(store: Store) -> list[str]:
    """Clean up after dead processes of this machine; return one readable line for each action.

    Call it before this process creates or claims its first rollout.
    """
    lines = describe_removed(await orphans.sweep())
    for folder in abandoned_folders():
        await asyncio.to_thread(remove_tree, folder)
    groups: set[str] = set()
    for rollout in await store.rollouts.interrupted():
        if _owner_is_dead(rollout):
            await _end_interrupted(store, rollout)
            groups.add(rollout.group_id)
            lines.append(f"rollout {rollout.rollout_id} was interrupted; its {rollout.calls} recorded calls are kept")
    for worker in await store.queue.workers():
        if _worker_is_dead(worker):
            reclaimed = await store.queue.reclaim_from(worker, attempts=MAX_ATTEMPTS)
            groups.update(await account_for_reclaimed(store, reclaimed))
            for rollout_id, attempt in reclaimed.items():
                lines.append(
                    f"rollout {rollout_id} "
                    + ("is queued again" if attempt else "has ended: it was cancelled, or has no attempt left")
                )
    for group_id in groups | set(await store.groups.unsettled()):
        await store.groups.settle(group_id)
    return [*lines, *await _remove_lost_calls(store)]


def describe_removed(removed: Sequence[orphans.RemovedItem]) -> list[str]:
    """Return one readable line about the removed sandboxes of killed processes; no line if `removed` is empty."""
    if not removed:
        return []
    kinds = Counter(item.what for item in removed if item.what != "record")
    what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    count = len({item.sandbox for item in removed})
    return [f"removed the remains of {count} sandbox{'es' if count > 1 else ''} of a killed process ({what})"]


async def _end_interrupted(store: Store, rollout: RolloutRow) -> None:
    rollout_id, session_id = rollout.rollout_id, rollout.session_id
    if session_id is not None:
        await store.sessions.close(session_id)
        # The recorded calls are kept and can be trained on; the reward stays null, which is not 0.
        incomplete = await _take_calls_in_flight(store, session_id, rollout_id)
        await build_traces(store, session_id, rollout_id, reward=None, incomplete=incomplete)
    await store.rollouts.end_open_stage(rollout_id, "failed", "interrupted")
    error = "interrupted: the process that ran it was killed"
    await store.rollouts.update(rollout_id, status="failed", error=error)
    await exclude_orphaned_calls(store, rollout_id)


async def _remove_lost_calls(store: Store) -> list[str]:
    """Delete the announcements of calls that were lost with a dead gateway; return one readable line for each gateway.

    The announcements of a rollout that still runs are kept, so that its lost calls are known when it ends.
    """
    dead = [gateway for gateway in await store.open_calls.gateways() if _worker_is_dead(gateway)]
    swept = Counter(call.gateway for call in await store.open_calls.sweep(dead))
    return [f"{count} calls were in flight on the gateway {name} when it died" for name, count in sorted(swept.items())]


# ---------------------------------------------------------------- calls of earlier attempts


async def account_for_reclaimed(store: Store, reclaimed: Mapping[str, int]) -> list[str]:
    """Put the calls of rollouts that were reclaimed from a worker into traces, or exclude them with a reason.

    `reclaimed`: rollout id -> number of its next attempt, or 0 if the rollout has ended (see
    `store.queue.reclaim_expired`). Returns the group id of each rollout that has ended."""
    for rollout_id in reclaimed:
        await exclude_orphaned_calls(store, rollout_id)
    return [await store.rollouts.group_id(rollout_id) for rollout_id, attempt in reclaimed.items() if not attempt]


async def exclude_orphaned_calls(store: Store, rollout_id: str) -> None:
    """Put each call of a rollout's interrupted attempts into a trace, or exclude it with a reason.

    If the rollout has ended, the calls of its last attempt become traces, unless they are traces already. The calls of
    earlier attempts, and all calls of a rollout that is tried again, are excluded as `superseded_attempt`. The calls of
    an attempt that still runs (its session is open) stay as they are.
    """
    sessions = await store.sessions.ids_of_rollout(rollout_id, closed=True)
    row = await store.rollouts.get(rollout_id)
    for session_id in sessions:
        if row is None or session_id != row.session_id:
            await exclude_session(store, session_id, rollout_id)
        elif row.final and not row.traces:
            incomplete = row.incomplete or await _take_calls_in_flight(store, session_id, rollout_id)
            await build_traces(store, session_id, rollout_id, reward=row.reward, incomplete=incomplete)


async def exclude_earlier_attempts(store: Store, rollout_id: str, session_id: str) -> None:
    """Exclude the calls of all attempts except the attempt with the session `session_id`.

    This is necessary because the last call of an earlier attempt may be recorded after `exclude_orphaned_calls`.
    """
    for other in await store.sessions.ids_of_rollout(rollout_id):
        if other != session_id:
            await exclude_session(store, other, rollout_id)


async def _take_calls_in_flight(store: Store, session_id: str, rollout_id: str) -> bool:
    """Delete an ended session's announcements: the rows of calls that began but are not committed.

    If there are any, mark the rollout as incomplete, because its traces lack these calls, and return True. If such a
    call is committed later, the commit excludes it.
    """
    left = await store.open_calls.take(session_id)
    if left:
        await store.rollouts.update(rollout_id, incomplete=True)
    return bool(left)


# ---------------------------------------------------------------- dead processes


def _worker_is_dead(worker: str) -> bool:
    """Return whether the process of a worker or gateway is gone; `worker` is its name, host:pid:random.

    False for processes of other machines, which cannot be checked: their claims expire instead."""
    host, pid, _ = worker.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    return int(pid) == os.getpid() or not process_exists(int(pid))


def _owner_is_dead(rollout: RolloutRow) -> bool:
    """Return whether the process that ran this rollout is gone; False for processes of other machines."""
    pid = rollout.owner_pid
    if rollout.owner_host != socket.gethostname() or pid is None:
        return False
    # This process has created no rollout yet, so its own process id was reused.
    if pid == os.getpid() or not process_exists(pid):
        return True
    began = _process_start(pid)
    return began is not None and began > rollout.created_at + 1.0


def _process_start(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch; None without /proc, or if it just ended."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return None
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
