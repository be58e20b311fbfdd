"""Which sessions a command that goes through the store is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polar_proxy.errors import UsageError
from polar_proxy.store import Store

_PAGE = 500


@dataclass(frozen=True, slots=True)
class SessionTarget:
    """A session with what its rollout, if it has one, says about it."""

    session_id: str
    rollout_id: str | None = None
    harness: str | None = None
    reward: float | None = None


async def find_targets(
    store: Store, *, where: str | None = None, session_ids: Sequence[str] = (), limit: int | None = None
) -> list[SessionTarget]:
    """With `where` the sessions of the rollouts that fulfil it; with `session_ids` just these; with neither, all with
    calls. `limit`: the newest so many. Rollouts first, each kind newest first; a target is small, so all fit.

    Raises UsageError for a condition or a session that does not exist, and for both at once.
    """
    if where is not None and session_ids:
        raise UsageError("Conditions choose rollouts: give either --where or --session.")
    if session_ids:
        return [await _of_session(store, session_id) for session_id in session_ids][:limit]
    found: list[SessionTarget] = []
    before: str | None = None
    while (limit is None or len(found) < limit) and (
        rows := await store.rollouts.find(where=where, limit=_PAGE, before=before)
    ):
        found += [
            SessionTarget(row.session_id, row.rollout_id, row.harness, row.reward)
            for row in reversed(rows)
            if row.session_id is not None
        ]
        before = rows[0].rollout_id  # a page comes oldest first
    before = None
    while (
        where is None and (limit is None or len(found) < limit) and (page := await store.sessions.recent(_PAGE, before))
    ):
        found += [SessionTarget(row.session_id) for row in page if row.rollout_id is None and row.calls]
        before = page[-1].session_id
    return found[:limit]


async def _of_session(store: Store, session_id: str) -> SessionTarget:
    session = await store.sessions.get(session_id)
    if session is None:
        raise UsageError(f"There is no session {session_id}. `polar sessions` lists them.")
    row = None if session.rollout_id is None else await store.rollouts.get(session.rollout_id)
    if row is None:
        return SessionTarget(session_id, session.rollout_id)
    return SessionTarget(session_id, row.rollout_id, row.harness, row.reward)
