"""Every exported row passes the checker, and traces that were changed since they were built are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from sqlalchemy import update

from polar_proxy.export.exporter import ExportReport, export
from polar_proxy.store import Store, schema
from polar_proxy.traces.check import check_lines
from polar_proxy.traces.operations import build_traces, find_targets, rebuild
from polar_proxy.types import Json
from tests.export.recorded_runs import rollout, session_without_rollout


async def run(store: Store, **options: Any) -> tuple[list[bytes], ExportReport]:
    lines: list[bytes] = []
    report = await export(store, "tokens-jsonl", lines.append, **options)
    return lines, report


@pytest.mark.parametrize("builder", ["merged", "per_call", "tree"])
async def test_every_exported_row_passes_the_checker(store: Store, builder: str) -> None:
    """The rows are of rollouts, whose traces are built at their end, and of sessions, which never end."""
    rollout_id, calls = await rollout(store, reward=1.0)
    await build_traces(store, calls[0].session_id, rollout_id, reward=1.0, incomplete=False)
    await session_without_rollout(store, base=30)
    lines, _ = await run(store, builder=builder)
    rows = [orjson.loads(line) for line in lines]
    assert {row.get("rollout_id") for row in rows} == {rollout_id, None}
    assert check_lines(lines).bad == []
    assert all(("parent_trace_id" in row) == (builder == "tree") for row in rows)
    assert sum(sum(row["loss_mask"]) for row in rows) == 2 * (2 + 3 + 2)


async def test_traces_that_are_not_stored_are_built_for_the_export(store: Store) -> None:
    rollout_id, calls = await rollout(store, reward=0.5, built=False)
    await build_traces(store, calls[0].session_id, rollout_id, reward=0.5, incomplete=False)
    assert await store.traces.find(rollout_id=rollout_id, builder="tree") == []
    lines, report = await run(store, builder="tree")
    rows = [orjson.loads(line) for line in lines]
    assert {(row["rollout_id"], row["reward"]) for row in rows} == {(rollout_id, 0.5)}
    assert report.left_out == {"client_gone": 1}


async def test_incomplete_rollout_is_not_exported(store: Store) -> None:
    rollout_id, calls = await rollout(store, reward=1.0, built=False)
    await store.rollouts.update(rollout_id, incomplete=True)
    await build_traces(store, calls[0].session_id, rollout_id, reward=1.0, incomplete=True)
    for builder in ("merged", "tree"):
        lines, report = await run(store, builder=builder)
        assert lines == []
        assert sum(report.left_out.values()) == len(calls)
        assert report.left_out["incomplete"] >= len(calls) - 1


async def _built(store: Store, **options: Any) -> Json:
    targets = await find_targets(store)
    return (await rebuild(store, targets, **{"builder": "merged", **options})).to_json()


async def test_built_session_is_exported_until_new_calls_arrive(store: Store) -> None:
    session_id, calls = await session_without_rollout(store)
    (summary,) = (await _built(store))["sessions"]
    assert summary["calls"] == {"recorded": 4, "trained": 3, "excluded": {"client_gone": 1}}
    assert (summary["traces"], summary["trained_tokens"], summary["grades"]) == (2, 7, {"exact": 2})
    stored = [trace.trace_id for trace in await store.traces.find(session_id=session_id)]
    lines, _ = await run(store)
    assert [orjson.loads(line)["trace_id"] for line in lines] == stored
    await store.traces.set_audit(stored[0], "rejected", {"max_abs_diff": 4.0})
    lines, report = await run(store)
    assert [orjson.loads(line)["trace_id"] for line in lines] == stored[1:]
    assert report.left_out["grade_rejected"] == 1
    lines, _ = await run(store, all_grades=True)
    assert check_lines(lines).bad == []
    assert orjson.loads(lines[0])["certificate"]["audit"] == {"max_abs_diff": 4.0}
    late = replace(calls[0], call_id="call_late", started_at=9.0, session_id=session_id)
    await store.calls.commit(late)  # the stored traces do not have it, so they are built again
    lines, _ = await run(store)
    assert len(lines) == 3
    assert check_lines(lines).bad == []


async def test_running_rollout_is_not_built(store: Store) -> None:
    rollout_id, _ = await rollout(store, reward=None, built=False, status="running")
    assert await _built(store) == {"sessions": [], "skipped": {rollout_id: "running"}}
    assert await store.traces.find(rollout_id=rollout_id) == []


@pytest.mark.parametrize("column", [{"weight_version": "99"}, {"logprob_mode": "raw"}, {"prompt_mode": "continue"}])
async def test_session_with_a_changed_call_is_left_out(store: Store, column: dict[str, str]) -> None:
    rollout_id, calls = await rollout(store, reward=1.0)
    await build_traces(store, calls[0].session_id, rollout_id, reward=1.0, incomplete=False)
    async with store.database.writing() as connection:
        mine = schema.calls.c.call_id == calls[1].call_id
        await connection.execute(update(schema.calls).where(mine).values(**column))
    lines, report = await run(store)
    assert lines == []
    assert report.left_out == {"certificate_broken": 3, "client_gone": 1}
    await _built(store)
    lines, _ = await run(store, all_grades=True)
    assert len(lines) == 2
    assert check_lines(lines).bad == []


async def test_branch_without_its_parent_is_left_out(store: Store) -> None:
    session_id, _ = await session_without_rollout(store)
    await _built(store, builder="tree")
    root = (await store.traces.find(session_id=session_id, builder="tree"))[0]
    await store.traces.set_audit(root.trace_id, "rejected", {})
    lines, report = await run(store, builder="tree")
    assert lines == []
    assert report.left_out == {"client_gone": 1, "grade_rejected": 1, "parent_left_out": 1}
