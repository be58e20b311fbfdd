"""The calls of interrupted or repeated attempts: each is put into a trace, or excluded with a reason."""

from __future__ import annotations

from polar_proxy.store import Store
from polar_proxy.traces.operations import build_traces, exclude_session


async def exclude_orphaned_calls(store: Store, rollout_id: str) -> None:
    """Put the calls of a rollout that was taken from its worker into traces, or exclude them, so that the counts add
    up.

    If the rollout has ended, the calls of its last attempt become traces, without a reward, unless they are traces
    already. Those of earlier attempts, and all calls of a rollout that is tried again, are excluded as
    `superseded_attempt`. An attempt that still runs (its session is open) is left alone.
    """
    sessions = await store.sessions.ids_of_rollout(rollout_id, closed=True)
    row = await store.rollouts.get(rollout_id)
    for session_id in sessions:
        if row is None or session_id != row.session_id:
            await exclude_session(store, session_id, rollout_id)
        elif row.final and not row.traces:
            incomplete = row.incomplete or await take_calls_in_flight(store, session_id, rollout_id)
            await build_traces(store, session_id, rollout_id, reward=row.reward, incomplete=incomplete)


async def take_calls_in_flight(store: Store, session_id: str, rollout_id: str) -> bool:
    """Return whether calls of a session that has ended are still in flight on a gateway, or were lost with one.

    Nothing receives their answers any more: the rollout is incomplete, and a call recorded later is excluded when it
    is committed.
    """
    left = await store.open_calls.take(session_id)
    if left:
        await store.rollouts.update(rollout_id, incomplete=True)
    return bool(left)


async def supersede_earlier(store: Store, rollout_id: str, session_id: str) -> None:
    """Exclude the calls of all attempts except that of `session_id`.

    A last call of an earlier attempt may have been recorded after `exclude_orphaned_calls`.
    """
    for other in await store.sessions.ids_of_rollout(rollout_id):
        if other != session_id:
            await exclude_session(store, other, rollout_id)
