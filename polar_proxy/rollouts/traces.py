"""Building the traces of sessions and storing them with their certificates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.traces import BuildResult, build, certificates, count_calls, rescore, stored
from polar_proxy.traces.rescore import ScoringEngine
from polar_proxy.traces.targets import SessionTarget
from polar_proxy.types import CallRecord, Json

_STORED_BUILDERS = ("merged",)
"""Of a rollout. Any other builder's traces are made from the calls whenever they are wanted; stored for each rollout,
those of `per_call` alone would be a third of its size."""

SUPERSEDED = "superseded_attempt"
"""Why the calls of an attempt are not trained on that was followed by another: only one attempt is the rollout."""


async def build_traces(
    store: Store, session_id: str, rollout_id: str | None, *, reward: float | None, incomplete: bool
) -> None:
    """Build and store the traces of a session that has ended. `incomplete`: a call was lost, so none is trained."""
    calls = await store.calls.of_session(session_id, text=False)
    for builder in _STORED_BUILDERS:
        built = await asyncio.to_thread(build, calls, builder, rollout_id=rollout_id, reward=reward)
        await _put(store, session_id, rollout_id, calls, _without_traces(built, calls) if incomplete else built)


async def exclude_orphaned_calls(store: Store, rollout_id: str) -> None:
    """See to the calls of a rollout that was taken from whoever worked on it, so that the counts add up.

    Where it has ended the calls of its last attempt are kept and become traces, without a reward, unless they are
    traces already. Those of earlier attempts, and all of a rollout that is tried again, are excluded as
    `superseded_attempt`. An attempt that goes on (its session is open) is left alone.
    """
    sessions = await store.sessions.ids_of_rollout(rollout_id, closed=True)
    row = await store.rollouts.get(rollout_id)
    for session_id in sessions:
        if row is None or session_id != row.session_id:
            await _supersede(store, session_id, rollout_id)
        elif row.final and not row.traces:
            incomplete = row.incomplete or await take_calls_in_flight(store, session_id, rollout_id)
            await build_traces(store, session_id, rollout_id, reward=row.reward, incomplete=incomplete)


async def take_calls_in_flight(store: Store, session_id: str, rollout_id: str) -> bool:
    """Whether calls of a session that has ended are still in flight on any gateway, or died with one. Nobody waits for
    them any more: the rollout is incomplete, and what is recorded later is excluded by its commit."""
    left = await store.open_calls.take(session_id)
    if left:
        await store.rollouts.update(rollout_id, incomplete=True)
    return bool(left)


async def supersede_earlier(store: Store, rollout_id: str, session_id: str) -> None:
    """Exclude the calls of all attempts but that of `session_id`: a last one may have come after
    `exclude_orphaned_calls`."""
    for other in await store.sessions.ids_of_rollout(rollout_id):
        if other != session_id:
            await _supersede(store, other, rollout_id)


async def _supersede(store: Store, session_id: str, rollout_id: str) -> None:
    reasons = dict.fromkeys([call.call_id for call in await store.calls.summaries(session_id)], SUPERSEDED)
    for builder in _STORED_BUILDERS:
        await store.traces.put((), reasons, builder, session_id, rollout_id)


@dataclass(slots=True)
class RebuildReport:
    """What `rebuild` made."""

    sessions: list[Json] = field(default_factory=list)
    """Of each session: its ids, its traces and tokens, the books of its calls, traces by grade, drift by outcome."""
    skipped: dict[str, str] = field(default_factory=dict)
    """rollout id -> its status: it still runs, and its end will build its traces"""

    def to_json(self) -> Json:
        return {"sessions": self.sessions, "skipped": self.skipped}


async def rebuild(
    store: Store,
    targets: Iterable[SessionTarget],
    *,
    builder: str,
    on_drift: str = "split",
    engine: ScoringEngine | None = None,
) -> RebuildReport:
    """Build the traces of these sessions anew, in place of what this builder made of them before.

    `engine` gives the log-probabilities of `on_drift = rescore`. Raises UsageError for a builder or a policy that is
    none, and for `rescore` without an engine.
    """
    if on_drift == "rescore" and engine is None:
        raise UsageError("--on-drift rescore asks an engine: name it with --engine.")
    done = RebuildReport()
    for target in targets:
        row = None if target.rollout_id is None else await store.rollouts.get(target.rollout_id)
        if row is not None and not row.final:
            done.skipped[row.rollout_id] = row.status
            continue
        calls = await store.calls.of_session(target.session_id, text=False)
        built = await asyncio.to_thread(
            build, calls, builder, on_drift=on_drift, rollout_id=target.rollout_id, reward=target.reward
        )
        if row is not None and row.incomplete:
            built = _without_traces(built, calls)
        elif on_drift == "rescore" and engine is not None:
            built = await rescore(built, engine)
        await _put(store, target.session_id, target.rollout_id, calls, built)
        done.sessions.append(_told(target, calls, built))
    return done


def _without_traces(built: BuildResult, calls: Sequence[CallRecord]) -> BuildResult:
    """Of a rollout in which a call was lost nothing is trained."""
    excluded = {call.call_id: built.excluded.get(call.call_id, "incomplete") for call in calls}
    return BuildResult(built.builder, (), excluded, built.on_drift)


async def _put(
    store: Store, session_id: str, rollout_id: str | None, calls: Sequence[CallRecord], built: BuildResult
) -> None:
    proofs = await asyncio.to_thread(certificates, calls, built)
    kept = {trace_id: stored(proof) for trace_id, proof in proofs.items()}
    await store.traces.put(built.traces, built.excluded, built.builder, session_id, rollout_id, kept, calls=calls)


def _told(target: SessionTarget, calls: Sequence[CallRecord], built: BuildResult) -> Json:
    return {
        "session_id": target.session_id,
        "rollout_id": target.rollout_id,
        "traces": len(built.traces),
        "tokens": sum(len(trace.token_ids) for trace in built.traces),
        "trained_tokens": sum(int(trace.loss_mask.sum()) for trace in built.traces),
        "calls": count_calls(calls, built),
        "grades": dict(Counter(trace.grade for trace in built.traces)),
        "drift": dict(Counter(found.outcome for found in built.findings)),
    }
