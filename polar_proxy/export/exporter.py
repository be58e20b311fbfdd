"""Going through the store, one rollout at a time, and writing rows. Memory stays that of one rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from polar_proxy.errors import UsageError
from polar_proxy.export.datasets import DATASET_FORMATS, SessionExport
from polar_proxy.store import FINAL_STATUSES, RolloutRow, Store, json_codec
from polar_proxy.store.rescores import RESCORED_BUILDER as RESCORED
from polar_proxy.store.rescores import apply_rescores
from polar_proxy.traces import BUILDERS, TRAINABLE, CertificateError, certificates, expand
from polar_proxy.types import CallRecord, Json, Trace

_PAGE = 500
_META = (
    "rollout_id",
    "session_id",
    "group_id",
    "task_id",
    "seed",
    "harness",
    "sandbox",
    "engine",
    "model",
    "status",
    "masked",
    "reward",
    "exit_code",
)


@dataclass(slots=True)
class ExportReport:
    """What an export wrote and what it left out."""

    rows: int = 0
    rollouts: int = 0
    sessions: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Calls by reason (`not_built_yet`: of a rollout that still runs; `certificate_broken`: of a session of which a
    trace is no longer what its certificate says); traces by grade, and those that branch from one left out
    (`parent_left_out`)."""

    def to_json(self) -> Json:
        return {**asdict(self), "left_out": dict(self.left_out)}


async def export(
    store: Store,
    form: str,
    write: Callable[[bytes], object],
    *,
    where: str | None = None,
    session_ids: Sequence[str] = (),
    builder: str = "merged",
    all_grades: bool = False,
    convert: Callable[[list[Json]], list[Json]] | None = None,
) -> ExportReport:
    """Write rows of `form` through `write`, a line at a time. `convert` makes other rows of those of each rollout.

    With `where` the rollouts that fulfil it; with `session_ids` just these sessions; with neither, every rollout and
    every session that belongs to none. Raises UsageError for an unknown format, builder, condition or session.
    """
    _check(form, builder)
    if where is not None and session_ids:
        raise UsageError("Conditions choose rollouts: give either conditions or sessions.")
    report = ExportReport()
    async for selection in _selections(store, where, session_ids, builder, report):
        report.left_out.update(selection.excluded.values())
        placed = {call_id for trace in selection.traces for call_id in trace.call_ids} | set(selection.excluded)
        # A rollout's traces are built when it ends.
        if unplaced := sum(call.call_id not in placed for call in selection.calls):
            report.left_out["not_built_yet"] += unplaced
        chosen = replace(selection, traces=_fit(selection.traces, all_grades, report))
        lines = await asyncio.to_thread(_lines, form, chosen, convert)
        for line in lines:
            write(line)
        report.rows += len(lines)
    return report


async def rollout_lines(
    store: Store, rollout: RolloutRow, form: str, *, builder: str = "merged", all_grades: bool = False
) -> list[bytes]:
    """The rows of one rollout, as `export` writes them; none of one that has not ended."""
    _check(form, builder)
    if rollout.session_id is None or not rollout.final:
        return []
    meta: Json = {name: getattr(rollout, name) for name in _META}
    selection = await _of_session(store, meta, rollout.session_id, builder, rollout)
    chosen = replace(selection, traces=_fit(selection.traces, all_grades, ExportReport()))
    return await asyncio.to_thread(_lines, form, chosen, None)


def _check(form: str, builder: str) -> None:
    if form not in DATASET_FORMATS:
        raise UsageError(f"There is no format {form!r}: choose {', '.join(DATASET_FORMATS)}.")
    if builder not in (*BUILDERS, RESCORED):
        raise UsageError(f"There is no builder {builder!r}: choose {', '.join((*BUILDERS, RESCORED))}.")


def _fit(traces: Sequence[Trace], all_grades: bool, report: ExportReport) -> list[Trace]:
    """Those that may be trained. A branch is of no use without what it branches from, which comes before it."""
    kept: dict[str, Trace] = {}
    for trace in traces:
        if not all_grades and trace.grade not in TRAINABLE:
            report.left_out[f"grade_{trace.grade}"] += 1
        elif trace.parent_trace_id is not None and trace.parent_trace_id not in kept:
            report.left_out["parent_left_out"] += 1
        else:
            kept[trace.trace_id] = trace
    return list(kept.values())


def _lines(form: str, selection: SessionExport, convert: Callable[[list[Json]], list[Json]] | None) -> list[bytes]:
    rows = list(DATASET_FORMATS[form](selection))
    return [json_codec.dumps(row) + b"\n" for row in (rows if convert is None else convert(rows))]


async def _selections(
    store: Store, where: str | None, session_ids: Sequence[str], builder: str, report: ExportReport
) -> AsyncIterator[SessionExport]:
    if not session_ids:
        before: str | None = None
        while rows := await store.rollouts.find(where=where, limit=_PAGE, before=before, builder=builder):
            for row in rows:
                report.rollouts += 1
                meta: Json = {name: getattr(row, name) for name in _META}
                if row.session_id is None:
                    yield SessionExport(meta, (), (), {})
                else:
                    yield await _of_session(store, meta, row.session_id, builder, row)
            before = rows[0].rollout_id  # a page comes oldest first
    if session_ids or where is None:
        async for session_id in _loose_sessions(store, session_ids):
            report.sessions += 1
            yield await _of_session(store, {"session_id": session_id}, session_id, builder, None)


async def _of_session(
    store: Store, meta: Json, session_id: str, builder: str, rollout: RolloutRow | None
) -> SessionExport:
    """The stored traces of a session, with whole certificates.

    Where this builder's are not stored, they are built now; so are those of a session of `polar serve`, which never
    ends, once calls have come that the stored ones do not know. A rollout that still runs has none yet.
    """
    traces = await store.traces.find(session_id=session_id, builder=builder)
    excluded = await store.traces.exclusions(session_id, builder=builder)
    kept = await store.traces.certificates(session_id=session_id, builder=builder)
    calls = await store.calls.of_session(
        session_id
    )  # last: a call that comes meanwhile is one too many, never one too few
    known = {call_id for trace in traces for call_id in trace.call_ids} | set(excluded)
    if builder == RESCORED:  # made by `polar rescore` alone, for it takes an engine
        stale = False
    elif rollout is None:
        stale = any(call.call_id not in known for call in calls)
    else:
        stale = not known and rollout.status in FINAL_STATUSES and not rollout.incomplete
        if not known and rollout.incomplete:
            excluded = {call.call_id: "incomplete" for call in calls}
    if stale:
        rewards: Json = {} if rollout is None else {"rollout_id": rollout.rollout_id, "reward": rollout.reward}
        return await asyncio.to_thread(_built_now, meta, calls, builder, rewards)
    told = apply_rescores(calls, await store.rescores.of_session(session_id)) if builder == RESCORED else calls
    try:
        whole = await asyncio.to_thread(expand, kept, traces, told)
    except CertificateError:
        excluded |= {call_id: "certificate_broken" for trace in traces for call_id in trace.call_ids}
        traces, whole = [], {}
    return SessionExport(meta, calls, traces, excluded, whole)


def _built_now(meta: Json, calls: Sequence[CallRecord], builder: str, rewards: Json) -> SessionExport:
    built = BUILDERS[builder](calls, **rewards)
    return SessionExport(meta, calls, built.traces, built.excluded, certificates(calls, built))


async def _loose_sessions(store: Store, session_ids: Sequence[str]) -> AsyncIterator[str]:
    if session_ids:
        for session_id in session_ids:
            if await store.sessions.get(session_id) is None:
                raise UsageError(f"There is no session {session_id}. `polar sessions` lists them.")
            yield session_id
        return
    before: str | None = None
    while page := await store.sessions.recent(limit=_PAGE, before=before):
        for summary in page:
            if summary.rollout_id is None and summary.calls:
                yield summary.session_id
        before = page[-1].session_id
