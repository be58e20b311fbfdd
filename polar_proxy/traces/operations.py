"""Operations on a store that read calls and write traces: build, rebuild, audit, rescore.

Each reads one session at a time, so the memory used does not grow with the number of sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, UsageError
from polar_proxy.store import Store
from polar_proxy.store.repositories.rescores import apply_rescores
from polar_proxy.traces.audit import UNKNOWN, AuditReference, AuditReport, audit
from polar_proxy.traces.builders import BuildResult, build
from polar_proxy.traces.certificate import certify, stored_form
from polar_proxy.traces.grades import REJECTED
from polar_proxy.traces.scoring import RescoreReport, Scorer, build_rescored, rescore, rescore_calls
from polar_proxy.traces.validation import count_calls
from polar_proxy.types import CallRecord, Json

STORED_BUILDER = "merged"
"""The builder whose traces are stored when a rollout ends. Traces of any other builder are made from the calls on
request. If the traces of `per_call` were stored too, they alone would be a third of a rollout's size."""

SUPERSEDED = "superseded_attempt"
"""The reason for excluding the calls of a rollout's earlier attempts: only the last attempt counts."""

_PAGE = 500


# ---------------------------------------------------------------- choosing sessions


@dataclass(frozen=True, slots=True)
class SessionTarget:
    """A session with its reward: the reward of its rollout, or the session's own if it belongs to no rollout."""

    session_id: str
    rollout_id: str | None = None
    harness: str | None = None
    reward: float | None = None


async def find_targets(
    store: Store, *, where: str | None = None, session_ids: Sequence[str] = (), limit: int | None = None
) -> list[SessionTarget]:
    """Return the named sessions, or the sessions of the rollouts that match `where`.

    With neither argument, return the session of every rollout, newest first, then the sessions that have calls but no
    rollout, newest first. Sessions of models that play a user are left out. `limit` bounds the total. Raise UsageError
    if the condition is invalid, if a session is unknown, or if both arguments are given.
    """
    if where is not None and session_ids:
        raise UsageError("Give either --where, which selects rollouts, or --session, not both.")
    if session_ids:
        return [await _target_of(store, session_id) for session_id in session_ids][:limit]
    targets: list[SessionTarget] = []
    async for target in _all_targets(store, where):
        if limit is not None and len(targets) >= limit:
            break
        targets.append(target)
    return targets


async def _all_targets(store: Store, where: str | None) -> AsyncIterator[SessionTarget]:
    before: str | None = None
    while rollouts := await store.rollouts.find(where=where, limit=_PAGE, before=before):
        for rollout in reversed(rollouts):  # a page is ordered oldest first
            if rollout.session_id is not None:
                yield SessionTarget(rollout.session_id, rollout.rollout_id, rollout.harness, rollout.reward)
        before = rollouts[0].rollout_id
    before = None
    while where is None and (sessions := await store.sessions.recent(_PAGE, before)):
        for session in sessions:
            if session.rollout_id is None and session.calls and session.origin != "user":
                yield SessionTarget(session.session_id, reward=session.reward)
        before = sessions[-1].session_id


async def _target_of(store: Store, session_id: str) -> SessionTarget:
    session = await store.sessions.summary(session_id)
    if session is None:
        raise UsageError(f"There is no session {session_id}. `polar sessions` lists them.")
    row = None if session.rollout_id is None else await store.rollouts.get(session.rollout_id)
    if row is None:
        return SessionTarget(session_id, session.rollout_id, reward=session.reward)
    return SessionTarget(session_id, row.rollout_id, row.harness, row.reward)


# ---------------------------------------------------------------- building


async def build_traces(
    store: Store, session_id: str, rollout_id: str | None, *, reward: float | None, incomplete: bool
) -> None:
    """Build and store the traces of a session that has ended. `incomplete`: a call was lost, so no call is trained."""
    incomplete = incomplete or await store.sessions.is_incomplete(session_id)
    calls = await store.calls.of_session(session_id, text=False)
    result = await asyncio.to_thread(build, calls, STORED_BUILDER, rollout_id=rollout_id, reward=reward)
    await _save(store, session_id, rollout_id, calls, _without_traces(result, calls) if incomplete else result)


async def exclude_session(store: Store, session_id: str, rollout_id: str) -> None:
    """Exclude all calls of an earlier attempt as `superseded_attempt`, and remove the traces of that attempt."""
    reasons = dict.fromkeys([call.call_id for call in await store.calls.summaries(session_id)], SUPERSEDED)
    await store.traces.put((), reasons, STORED_BUILDER, session_id, rollout_id)


@dataclass(slots=True)
class RebuildReport:
    sessions: list[Json] = field(default_factory=list)
    """One entry for each session: ids, traces, tokens, calls, traces by grade, drift by outcome."""
    skipped: dict[str, str] = field(default_factory=dict)
    """rollout id -> status. Only rollouts that still run are skipped; their traces are built when they end."""

    def to_json(self) -> Json:
        return {"sessions": self.sessions, "skipped": self.skipped}


async def rebuild(
    store: Store,
    targets: Iterable[SessionTarget],
    *,
    builder: str,
    on_drift: str = "split",
    engine: Engine | None = None,
) -> RebuildReport:
    """Build the traces of the sessions in `targets` again, and replace the earlier traces that `builder` made of them.

    `engine` gives the log-probabilities for `on_drift = rescore`. Raise UsageError for an unknown builder or drift
    policy, and for `rescore` without an engine.
    """
    if on_drift == "rescore" and engine is None:
        raise UsageError("--on-drift rescore needs an engine: name it with --engine.")
    report = RebuildReport()
    for target in targets:
        row = None if target.rollout_id is None else await store.rollouts.get(target.rollout_id)
        if row is not None and not row.final:
            report.skipped[row.rollout_id] = row.status
            continue
        calls = await store.calls.of_session(target.session_id, text=False)
        result = await asyncio.to_thread(
            build, calls, builder, on_drift=on_drift, rollout_id=target.rollout_id, reward=target.reward
        )
        if await _is_incomplete(store, target):
            result = _without_traces(result, calls)
        elif on_drift == "rescore" and engine is not None:
            result = await rescore(result, engine)
        await _save(store, target.session_id, target.rollout_id, calls, result)
        report.sessions.append(_summary(target, calls, result))
    return report


async def _is_incomplete(store: Store, target: SessionTarget) -> bool:
    """Return whether a call of the session or of its rollout was lost."""
    row = None if target.rollout_id is None else await store.rollouts.get(target.rollout_id)
    return (row is not None and row.incomplete) or await store.sessions.is_incomplete(target.session_id)


def _without_traces(result: BuildResult, calls: Sequence[CallRecord]) -> BuildResult:
    """Exclude all calls of a session in which a call was lost, because such a session is not trained."""
    excluded = {call.call_id: result.excluded.get(call.call_id, "incomplete") for call in calls}
    return BuildResult(result.builder, (), excluded, result.on_drift)


async def _save(
    store: Store, session_id: str, rollout_id: str | None, calls: Sequence[CallRecord], result: BuildResult
) -> None:
    certificates = await asyncio.to_thread(certify, calls, result)
    await store.traces.put(
        result.traces,
        result.excluded,
        result.builder,
        session_id,
        rollout_id,
        {trace_id: stored_form(certificate) for trace_id, certificate in certificates.items()},
        # The builder has validated its traces; only rescoring changes them afterwards.
        validated=result.rescored_by is None,
    )


def _summary(target: SessionTarget, calls: Sequence[CallRecord], result: BuildResult) -> Json:
    return {
        "session_id": target.session_id,
        "rollout_id": target.rollout_id,
        "traces": len(result.traces),
        "tokens": sum(len(trace.token_ids) for trace in result.traces),
        "trained_tokens": sum(trace.trained_tokens for trace in result.traces),
        "calls": count_calls(calls, result),
        "grades": dict(Counter(trace.grade for trace in result.traces)),
        "drift": dict(Counter(event.outcome for event in result.drift_events)),
    }


# ---------------------------------------------------------------- auditing


async def audit_store(
    store: Store,
    engine: Engine,
    reference: AuditReference,
    targets: Sequence[SessionTarget],
    *,
    builder: str = "merged",
    at_once: int = 4,
    progress: Callable[[AuditReport], object] = lambda report: None,
) -> AuditReport:
    """Audit the traces that `builder` made of the sessions in `targets` (see `traces/audit.py`).

    If tokens of a trace could be compared, or if the trace is rejected, store the grade and the findings in the trace's
    certificate. Raise UsageError if the engine cannot score or serves another model, and EngineError if the engine's
    weights change meanwhile.
    """
    report = AuditReport(reference)
    scorer = Scorer(engine, at_once)
    started = time.monotonic()
    loaded = await engine.weight_version()
    for target in targets:
        await _audit_session(store, scorer, target, builder, report)
        report.sessions += 1
        report.scored_tokens = scorer.tokens
        report.seconds = time.monotonic() - started
        progress(report)
        if (now := await engine.weight_version()) != loaded:
            raise EngineError(f"The engine's weights changed from version {loaded} to {now}: audit again.")
    return report


async def _audit_session(
    store: Store, scorer: Scorer, target: SessionTarget, builder: str, report: AuditReport
) -> None:
    stored = await store.traces.of_session(target.session_id, builder=builder, text=False)
    if not stored.traces:
        report.skipped["not_built"] += 1
        return
    audits = await audit(scorer, report.reference, stored.traces, stored.trace_calls, stored.certificates)
    for one in audits:
        if one.tokens or one.grade == REJECTED:
            await store.traces.set_audit(one.trace_id, one.grade, one.to_json(time.time()))
        report.add(one, target.harness or UNKNOWN)


# ---------------------------------------------------------------- rescoring


async def rescore_session(store: Store, scorer: Scorer, target: SessionTarget, report: RescoreReport) -> None:
    """Encode and score a session's answers that were recorded without tokens. Then build the session's `rescored`
    traces again."""
    calls = await store.calls.of_session(target.session_id)
    rescores, skipped = await rescore_calls(calls, scorer)
    report.scored_tokens = scorer.tokens
    if not rescores and not await store.rescores.of_session(target.session_id):
        report.add(len(calls), rescores, skipped, 0)
        return
    result = build_rescored(calls, rescores, skipped=skipped, rollout_id=target.rollout_id, reward=target.reward)
    if await _is_incomplete(store, target):
        result = _without_traces(result, calls)
    await store.rescores.put(target.session_id, rescores)
    await _save(store, target.session_id, target.rollout_id, apply_rescores(calls, rescores), result)
    report.add(len(calls), rescores, skipped, len(result.traces))
