"""Which rollouts and sessions are exported, and how the report counts the rest."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from polar_proxy.errors import UsageError
from polar_proxy.export.exporter import ExportReport, export
from polar_proxy.store import Store
from polar_proxy.types import Json
from tests.export.recorded_runs import rollout, session_without_rollout


async def run(store: Store, form: str = "tokens-jsonl", **options: Any) -> tuple[list[Json], ExportReport]:
    lines: list[bytes] = []
    report = await export(store, form, lines.append, **options)
    return [orjson.loads(line) for line in lines], report


async def test_where_selects_rollouts(store: Store) -> None:
    good, _ = await rollout(store, reward=1.0)
    bad, _ = await rollout(store, reward=0.0)
    await rollout(store, reward=None, status="failed")
    await session_without_rollout(store)
    rows, report = await run(store, where="reward>=1")
    assert {row["rollout_id"] for row in rows} == {good}
    assert (report.rollouts, report.sessions) == (1, 0)
    rows, _ = await run(store, where="reward<1, status=done")
    assert {row["rollout_id"] for row in rows} == {bad}
    rows, report = await run(store, where="reward>5")
    assert (rows, report.rollouts) == ([], 0)


async def test_session_ids_select_sessions(store: Store) -> None:
    await rollout(store, reward=1.0)
    one, _ = await session_without_rollout(store)
    await session_without_rollout(store)
    rows, report = await run(store, session_ids=[one])
    assert {row["session_id"] for row in rows} == {one}
    assert (report.rollouts, report.sessions) == (0, 1)


async def test_every_call_is_exported_or_counted(store: Store) -> None:
    """Every recorded call is in a written trace or in `left_out`."""
    await rollout(store, reward=1.0, off_distribution=True)
    _, running = await rollout(store, reward=None, built=False, status="running")
    rows, report = await run(store)
    assert report.left_out == {"client_gone": 1, "grade_approximate": 1, "not_built_yet": len(running)}
    assert [row["grade"] for row in rows] == ["exact"]
    assert report.to_json()["left_out"] == dict(report.left_out)
    rows, report = await run(store, all_grades=True)
    assert sorted(row["grade"] for row in rows) == ["approximate", "exact"]
    assert "grade_approximate" not in report.left_out


async def test_exports_more_than_a_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar_proxy.export.exporter._PAGE", 2)
    made = [(await rollout(store, reward=1.0))[0] for _ in range(5)]
    loose = [(await session_without_rollout(store))[0] for _ in range(3)]
    rows, report = await run(store, "jsonl")
    assert sorted(row["rollout_id"] for row in rows if "rollout_id" in row) == made
    assert sorted(row["session_id"] for row in rows if "rollout_id" not in row) == loose
    assert (report.rollouts, report.sessions) == (5, 3)


@pytest.mark.parametrize(
    ("form", "options", "expected"),
    [
        ("csv", {}, "tokens-jsonl"),
        ("jsonl", {"builder": "forest"}, "per_call"),
        ("jsonl", {"where": "reward is high"}, "condition"),
        ("jsonl", {"where": "colour=red"}, "reward"),
        ("jsonl", {"where": "reward>=x"}, "number"),
        ("jsonl", {"session_ids": ["sess_0"]}, "sess_0"),
        ("jsonl", {"session_ids": ["sess_0"], "where": "reward>=1"}, "either"),
    ],
)
async def test_rejects_invalid_selection(store: Store, form: str, options: Json, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        await run(store, form, **options)
