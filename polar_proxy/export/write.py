"""Going through the store, one rollout at a time, and writing rows. Memory stays that of one rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import orjson

from polar_proxy.errors import UsageError
from polar_proxy.export.rows import FORMATS, Selection
from polar_proxy.store import RolloutRow, Store
from polar_proxy.trajectories import BUILDERS
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
    "reward",
    "exit_code",
)
TRAINABLE = frozenset({"exact", "spliced"})


@dataclass(slots=True)
class Report:
    """What an export wrote and what it left out."""

    rows: int = 0
    rollouts: int = 0
    sessions: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Traces by grade and calls by reason (`not_built_yet`: of a rollout that still runs)."""

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
) -> Report:
    """Write rows of `form` through `write`, a line at a time.

    With `where` the rollouts that fulfil it; with `session_ids` just these sessions; with neither, every rollout and
    every session that belongs to none. Raises UsageError for an unknown format, builder, condition or session.
    """
    if form not in FORMATS:
        raise UsageError(f"There is no format {form!r}: choose {', '.join(FORMATS)}.")
    if builder not in BUILDERS:
        raise UsageError(f"There is no builder {builder!r}: choose {', '.join(BUILDERS)}.")
    if where is not None and session_ids:
        raise UsageError("Conditions choose rollouts: give either conditions or sessions.")
    report = Report()
    async for selection in _selections(store, where, session_ids, builder, report):
        report.left_out.update(selection.excluded.values())
        placed = {call_id for trace in selection.traces for call_id in trace.call_ids} | set(selection.excluded)
        # A rollout's traces are built when it ends.
        if unplaced := sum(call.call_id not in placed for call in selection.calls):
            report.left_out["not_built_yet"] += unplaced
        kept: list[Trace] = []
        for trace in selection.traces:
            if all_grades or trace.grade in TRAINABLE:
                kept.append(trace)
            else:
                report.left_out[f"grade_{trace.grade}"] += 1
        chosen = Selection(selection.meta, selection.calls, kept, selection.excluded)
        lines = await asyncio.to_thread(_lines, form, chosen)
        for line in lines:
            write(line)
        report.rows += len(lines)
    return report


def _lines(form: str, selection: Selection) -> list[bytes]:
    return [orjson.dumps(row) + b"\n" for row in FORMATS[form](selection)]


async def _selections(
    store: Store, where: str | None, session_ids: Sequence[str], builder: str, report: Report
) -> AsyncIterator[Selection]:
    if not session_ids:
        before: str | None = None
        while rows := await store.rollouts(where=where, limit=_PAGE, before=before, builder=builder):
            for row in rows:
                report.rollouts += 1
                yield await _of_rollout(store, row, builder)
            before = rows[0].rollout_id  # a page comes oldest first
    if session_ids or where is None:
        async for session_id in _loose_sessions(store, session_ids):
            report.sessions += 1
            calls = await store.calls(session_id)
            yield await _of_calls({"session_id": session_id}, calls, builder)


async def _of_rollout(store: Store, row: RolloutRow, builder: str) -> Selection:
    meta: Json = {name: getattr(row, name) for name in _META}
    if row.session_id is None:
        return Selection(meta, (), (), {})
    calls = await store.calls(row.session_id)
    traces = await store.traces(session_id=row.session_id, builder=builder)
    excluded: Mapping[str, str] = await store.exclusions(row.session_id, builder=builder)
    return Selection(meta, calls, traces, excluded)


async def _of_calls(meta: Json, calls: Sequence[CallRecord], builder: str) -> Selection:
    """A session of `polar serve` never ends, so its traces are built as it stands now."""
    built = await asyncio.to_thread(BUILDERS[builder], calls)
    return Selection(meta, calls, built.traces, built.excluded)


async def _loose_sessions(store: Store, session_ids: Sequence[str]) -> AsyncIterator[str]:
    if session_ids:
        for session_id in session_ids:
            if await store.session(session_id) is None:
                raise UsageError(f"There is no session {session_id}. `polar sessions` lists them.")
            yield session_id
        return
    before: str | None = None
    while page := await store.sessions(limit=_PAGE, before=before):
        for summary in page:
            if summary.rollout_id is None and summary.calls:
                yield summary.session_id
        before = page[-1].session_id
