"""Exports: choose rollouts and sessions from a store, write their rows, and count the calls and traces left out.

An export goes through the store one rollout at a time, and reads the calls of each session once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from polar_proxy.errors import UsageError
from polar_proxy.export.datasets import DATASET_FORMATS, SessionExport
from polar_proxy.export.formats import TRAINER_FORMATS, RecordConverter, with_advantages
from polar_proxy.export.formats.training_rows import RewardsByGroup
from polar_proxy.export.preferences import PreferencePairs
from polar_proxy.export.reasons import explain
from polar_proxy.export.text_conversations import text_conversations
from polar_proxy.store import FINAL_STATUSES, RolloutRow, Store, json_codec
from polar_proxy.store.repositories.rescores import RESCORED_BUILDER
from polar_proxy.store.repositories.traces import SessionTraces
from polar_proxy.traces.builders import BUILDERS, build
from polar_proxy.traces.certificate import CertificateError, certify, restore
from polar_proxy.traces.grades import TRAINABLE
from polar_proxy.training.advantages import ADVANTAGES
from polar_proxy.types import CallRecord, Json, Trace

Convert = Callable[[list[Json]], list[Json]]
PREFERENCES = "preference-jsonl"
_PAGE = 500
_ROLLOUT_FIELDS = (
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


FORMATS = (*DATASET_FORMATS, PREFERENCES, *TRAINER_FORMATS)
"""The names of all formats."""


@dataclass(slots=True)
class ExportReport:
    rows: int = 0
    rollouts: int = 0
    sessions: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Key -> number left out. Calls are counted by reason, such as `not_built_yet` (their traces are not built yet) or
    `certificate_broken` (their session has a trace that does not match its certificate). Traces are counted by grade
    (`grade_...`), or as `parent_left_out` (branches whose parent is left out). Rows that a trainer's format refuses are
    counted by reason. `reasons.py` explains each key."""
    reasons: list[str] = field(default_factory=list)
    """Why there are no rows, in words; empty if there are rows."""

    def to_json(self) -> Json:
        return {**asdict(self), "left_out": dict(self.left_out)}


async def export(
    store: Store, form: str, write: Callable[[bytes], object], report: ExportReport | None = None, **options: Any
) -> ExportReport:
    """Write rows through `write`, one line at a time. Return `report` (default: a new one), whose counts are updated
    while rows are written. `options` are those of `export_lines`."""
    report = ExportReport() if report is None else report
    async for line in export_lines(store, form, report, **options):
        write(line)
    return report


async def export_lines(
    store: Store,
    form: str,
    report: ExportReport,
    *,
    where: str | None = None,
    session_ids: Sequence[str] = (),
    builder: str = "merged",
    all_grades: bool = False,
    advantage: str = "grpo",
    session_lock: AbstractAsyncContextManager[object] | None = None,
) -> AsyncGenerator[bytes]:
    """Yield rows of the format `form`, one line at a time. The counts in `report` are complete at the end.

    `where` selects rollouts, and `session_ids` selects sessions. By default, rows are made of every rollout and of
    every session without a rollout. The formats of trainers outside Polar are made from the rows of tokens-jsonl; only
    those for trl and tinker have an advantage.

    Raises UsageError before the first row if the format, the builder or the advantage is unknown, if the builder `tree`
    is combined with a trainer's format, if the conditions are invalid, or if both conditions and sessions are given.
    For an unknown session, UsageError is raised after the rows of the sessions before it.

    `session_lock`: a context manager, entered anew for each session that is read and converted. Exports that share one
    lock have one session in memory at a time.
    """
    _require_known(form, builder, FORMATS)
    if where is not None and session_ids:
        raise UsageError("Give either conditions, which select rollouts, or sessions, not both.")
    dataset = form
    convert: Convert = list
    rows_left_out: Counter[str] = Counter()
    with closing(PreferencePairs()) as pairs:
        if form == PREFERENCES:
            dataset, convert, rows_left_out = "chat-jsonl", pairs.add, pairs.left_out
        elif form in TRAINER_FORMATS:
            rewards = await _rewards_by_group(store, advantage, builder)
            records = RecordConverter(form)

            def to_records(rows: list[Json]) -> list[Json]:
                return records(with_advantages(rows, advantage, rewards))

            dataset, convert, rows_left_out = "tokens-jsonl", to_records, records.left_out
        async for session_id, rollout in _selected(store, where, session_ids, builder):
            report.rollouts += rollout is not None
            report.sessions += rollout is None
            async with session_lock or nullcontext():
                session = await _read_session(store, session_id, rollout, dataset, builder)
                lines = await asyncio.to_thread(_counted_lines, session, dataset, all_grades, report, convert)
                del session
            for line in lines:
                yield line
            report.rows += len(lines)
        found = pairs.pairs()
        while (pair := await asyncio.to_thread(next, found, None)) is not None:
            yield json_codec.dumps_object(pair) + b"\n"
            report.rows += 1
    report.left_out.update(rows_left_out)
    if not report.rows:
        report.reasons = await _why_no_rows(store, report, where)


async def _why_no_rows(store: Store, report: ExportReport, where: str | None) -> list[str]:
    """Return lines that say why an export has no rows."""
    if report.left_out:
        return [explain(reason, count) for reason, count in report.left_out.most_common()]
    if report.rollouts or report.sessions:
        return ["The selected rollouts and sessions have no recorded calls."]
    if where is not None:
        return [await store.rollouts.explain_no_match(where)]
    return [
        f"{store.display_url} has no rollouts, and no sessions with calls. `polar run` and `polar serve` record some."
    ]


async def _rewards_by_group(store: Store, advantage: str, builder: str) -> RewardsByGroup:
    """Return the rewards of all rollouts in the database, by group.

    Rewards of rollouts that are not exported are included, because a baseline needs the rewards of the whole group.
    Raise UsageError if `advantage` is unknown, and for the builder `tree`, whose rows are branches instead of whole
    sequences.
    """
    if advantage not in ADVANTAGES:
        raise UsageError(f"There is no advantage {advantage!r}: choose {', '.join(ADVANTAGES)}.")
    if builder == "tree":
        raise UsageError(
            "The records of other trainers hold whole sequences, not branches of a tree: choose --builder merged or "
            "per_call."
        )
    rewards: dict[str, dict[str, float | None]] = {}
    before: str | None = None
    while page := await store.rollouts.find(limit=_PAGE, before=before):
        for row in page:
            rewards.setdefault(row.group_id, {})[row.rollout_id] = row.reward
        before = page[0].rollout_id
    return rewards


async def rollout_lines(
    store: Store, rollout: RolloutRow, form: str, *, builder: str = "merged", all_grades: bool = False
) -> list[bytes]:
    """Return the rows of one rollout, as `export` writes them; no rows if it has not ended."""
    _require_known(form, builder)
    if rollout.session_id is None or not rollout.final:
        return []
    session = await _read_session(store, rollout.session_id, rollout, form, builder)
    return await asyncio.to_thread(_lines, session, form, all_grades, ExportReport(), list)


def _require_known(form: str, builder: str, formats: Collection[str] = tuple(DATASET_FORMATS)) -> None:
    if form not in formats:
        raise UsageError(f"There is no format {form!r}: choose {', '.join(formats)}.")
    if builder not in (*BUILDERS, RESCORED_BUILDER):
        raise UsageError(f"There is no builder {builder!r}: choose {', '.join((*BUILDERS, RESCORED_BUILDER))}.")


async def _selected(
    store: Store, where: str | None, session_ids: Sequence[str], builder: str
) -> AsyncIterator[tuple[str | None, RolloutRow | None]]:
    """Yield (session id, rollout) for each rollout or session to export.

    For a rollout without a session, the id is None. For a session without a rollout, and for each of `session_ids`, the
    rollout is None. Sessions of simulated users are only exported if `session_ids` has them.
    """
    for session_id in session_ids:
        if await store.sessions.get(session_id) is None:
            raise UsageError(f"There is no session {session_id}. `polar sessions` lists them.")
        yield session_id, None
    if session_ids:
        return
    before: str | None = None
    while rows := await store.rollouts.find(where=where, limit=_PAGE, before=before, builder=builder):
        for row in rows:
            yield row.session_id, row
        before = rows[0].rollout_id  # a page is ordered oldest first
    before = None
    while where is None and (page := await store.sessions.recent(limit=_PAGE, before=before)):
        for summary in page:
            if summary.rollout_id is None and summary.calls and summary.origin != "user":
                yield summary.session_id, None
        before = page[-1].session_id


def _needs_build(stored: SessionTraces, rollout: RolloutRow | None, builder: str) -> bool:
    """Return whether the session's traces must be built for the export, because they are missing or out of date."""
    if builder == RESCORED_BUILDER:
        return False  # only `polar rescore` builds them, because it needs an engine
    known = {call_id for trace in stored.traces for call_id in trace.call_ids} | set(stored.excluded)
    if rollout is None:
        return any(call.call_id not in known for call in stored.calls)
    return not known and rollout.status in FINAL_STATUSES


async def _read_session(
    store: Store, session_id: str | None, rollout: RolloutRow | None, dataset: str, builder: str
) -> SessionExport:
    """Return the traces of a session with their certificates: the stored traces or, if necessary, traces built here.

    Traces are built here if no traces of the builder are stored, or if the session has newer calls than its stored
    traces (a session of `polar serve` never ends). Traces of the builder `rescored` are never built here. A rollout
    that still runs has no traces yet. If a call of the session was lost, all calls of the session are excluded.
    """
    summary = None if session_id is None else await store.sessions.summary(session_id)
    fields: Json = {"session_id": session_id, "reward": None if summary is None else summary.reward}
    if rollout is not None:
        fields = {name: getattr(rollout, name) for name in _ROLLOUT_FIELDS}
    if session_id is None or summary is None:
        return SessionExport(fields, (), (), {})
    stored = await store.traces.of_session(session_id, builder=builder, text=dataset != "tokens-jsonl")
    traces, excluded, calls = stored.traces, dict(stored.excluded), stored.calls
    if (rollout is not None and rollout.incomplete) or summary.incomplete is not None:
        return SessionExport(
            fields, calls, (), {call.call_id: excluded.get(call.call_id, "incomplete") for call in calls}
        )
    if _needs_build(stored, rollout, builder):
        return await asyncio.to_thread(_build_session, fields, calls, builder, rollout)
    try:
        certificates = await asyncio.to_thread(restore, stored.certificates, traces, stored.trace_calls)
    except CertificateError:
        excluded |= {call_id: "certificate_broken" for trace in traces for call_id in trace.call_ids}
        traces, certificates = (), {}
    return SessionExport(fields, calls, traces, excluded, certificates)


def _build_session(
    fields: Json, calls: Sequence[CallRecord], builder: str, rollout: RolloutRow | None
) -> SessionExport:
    rollout_id = None if rollout is None else rollout.rollout_id
    result = build(calls, builder, rollout_id=rollout_id, reward=fields["reward"])
    return SessionExport(fields, calls, result.traces, result.excluded, certify(calls, result))


def _trainable(traces: Sequence[Trace], all_grades: bool, report: ExportReport) -> list[Trace]:
    """Return the traces that may be trained. A branch is left out if its parent, which comes before it, is left out."""
    kept: dict[str, Trace] = {}
    for trace in traces:
        if not all_grades and trace.grade not in TRAINABLE:
            report.left_out[f"grade_{trace.grade}"] += 1
        elif trace.parent_trace_id is not None and trace.parent_trace_id not in kept:
            report.left_out["parent_left_out"] += 1
        else:
            kept[trace.trace_id] = trace
    return list(kept.values())


def _counted_lines(
    session: SessionExport, dataset: str, all_grades: bool, report: ExportReport, convert: Convert
) -> list[bytes]:
    """Return a session's rows, and count in `report` the calls that are in none of them."""
    as_text: set[str] = set()
    if dataset == "chat-jsonl":
        conversations = text_conversations(session.calls, session.excluded)
        as_text = {call.call_id for conversation in conversations for call in conversation.calls}
    report.left_out.update(reason for call_id, reason in session.excluded.items() if call_id not in as_text)
    placed = {call_id for trace in session.traces for call_id in trace.call_ids} | set(session.excluded)
    # The traces of a rollout are built when it ends.
    if unplaced := sum(call.call_id not in placed for call in session.calls):
        report.left_out["not_built_yet"] += unplaced
    return _lines(session, dataset, all_grades, report, convert)


def _lines(
    session: SessionExport, dataset: str, all_grades: bool, report: ExportReport, convert: Convert
) -> list[bytes]:
    chosen = replace(session, traces=_trainable(session.traces, all_grades, report))
    return [json_codec.dumps_object(row) + b"\n" for row in convert(list(DATASET_FORMATS[dataset](chosen)))]
