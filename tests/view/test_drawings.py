"""The call tree, the time line and the patch as data."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from polar_proxy.sessions import lineage, rules
from polar_proxy.sessions.lineage_reasons import LINEAGE_REASONS, reason_of
from polar_proxy.store import Store
from polar_proxy.store.repositories.calls import CallSummary
from polar_proxy.store.repositories.rollouts import StageRow
from polar_proxy.view.call_tree import draw_tree
from polar_proxy.view.diff import MAX_LINES, read_diff
from polar_proxy.view.timeline import SCALE, covered, draw_timeline
from tests.factories import new_rollout
from tests.view.recorded import branching_session


async def test_calls_that_continue_stay_in_their_lane(store: Store) -> None:
    calls = await store.calls.summaries(await branching_session(store))
    tree = draw_tree(calls)
    assert [row.x for row in tree.rows] == [12, 28, 12, 12, 28, 28, 28, 28, 12, 28, 28, 28]
    assert [row.parent_number for row in tree.rows] == [None, 1, 1, 3, 4, 4, 6, 7, 4, 4, 10, 11]
    assert [line.edge for line in tree.lines] == [call.edge for call in calls[1:]]
    assert tree.height == 28 * len(calls)


async def test_a_long_tree_is_drawn_in_pieces(store: Store) -> None:
    calls = await store.calls.summaries(await branching_session(store))
    tree = draw_tree(calls, calls[6].call_id, 5)
    assert [row.number for row in tree.rows] == [6, 7, 8, 9, 10]
    assert (tree.call_count, tree.top, tree.height) == (12, 5 * 28, 5 * 28)
    assert (tree.earlier, tree.later) == (calls[4].call_id, calls[10].call_id)
    assert len(tree.lines) == 5
    whole = draw_tree(calls, None, 50)
    assert (whole.earlier, whole.later, len(whole.rows)) == (None, None, 12)


async def test_a_parent_that_is_not_earlier_is_left_out(store: Store) -> None:
    first, *_ = await store.calls.summaries(await branching_session(store))
    tree = draw_tree([replace(first, parent_call_id="call_gone"), replace(first, call_id="b", parent_call_id="b")])
    assert tree.lines == []
    assert draw_tree([]).rows == []


def test_every_rule_has_a_reason() -> None:
    assert all(reason_of(rule.name) for rule in rules.RULES)
    source = inspect.getsource(lineage)
    assert {name for name in LINEAGE_REASONS if f'"{name}"' not in source} == set()
    assert reason_of(None) is None


def stage(name: str, start: float, end: float | None, **changes: Any) -> StageRow:
    return replace(StageRow("roll", 1, name, start, end, "ok", None, "w"), **changes)


async def test_stages_and_calls_share_one_time_line(store: Store) -> None:
    calls: list[CallSummary] = await store.calls.summaries(await branching_session(store))
    row = await store.rollouts.get(await new_rollout(store))
    assert row is not None
    start = calls[0].started_at
    row = replace(row, created_at=start - 10, ended_at=start + 30)
    stages = [
        stage("preparing", start - 4, start - 1),
        stage("running", start - 1, start + 19),
        stage("scoring", start + 19, None),
    ]
    drawn = draw_timeline(row, stages, calls, now=start + 30)
    assert drawn is not None
    assert drawn.seconds == 40
    assert {name: round(seconds, 3) for name, seconds in drawn.totals.items()} == {
        "queued": 6,
        "preparing": 3,
        "running": 20,
        "scoring": 11,
        "engine": 9.6,
        "agent": 10.4,
    }
    bars = drawn.rows[0].bars
    assert [bar.kind for bar in bars] == ["queued", "preparing", "running", "scoring"]
    assert bars[0].x == 0
    assert bars[-1].x + bars[-1].width == pytest.approx(SCALE)
    assert draw_timeline(None, [], [], now=0) is None


def test_overlapping_calls_count_once() -> None:
    assert covered([(0, 2), (1, 3), (10, 11), (10, 10.5)]) == 4


def test_lines_of_a_patch_have_their_numbers() -> None:
    text = (
        "diff --git a/a.py b/b c.py\nsimilarity index 90%\nrename from a.py\n--- a/a.py\n+++ b/b c.py\n"
        "@@ -7,3 +7,3 @@ def f():\n one\n-two\n+TWO\n+--- three\n\\ No newline at end of file\n"
        "diff --git a/bin b/bin\nBinary files differ\n"
    )
    one, two = read_diff(text).files
    assert (one.path, one.added, one.removed) == ("b c.py", 2, 1)
    assert [(line.kind, line.old, line.new) for line in one.lines] == [
        ("note", None, None),
        ("note", None, None),
        ("hunk", None, None),
        ("same", 7, 7),
        ("removed", 8, None),
        ("added", None, 8),
        ("added", None, 9),
        ("note", None, None),
    ]
    assert [line.text for line in two.lines] == ["Binary files differ"]
    assert read_diff("").files == []
    assert read_diff(f"diff --git a/x b/x\n@@ -{'9' * 5000} +1 @@\n").files[0].lines[0].kind == "note"
    assert read_diff("x\n" * (MAX_LINES + 1)).is_cut


@pytest.mark.parametrize("separator", ["\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"])
def test_text_of_an_agent_begins_no_line_of_a_patch(separator: str) -> None:
    forged = f"x{separator}diff --git a/innocent.py b/innocent.py{separator}@@ -1 +1 @@{separator}-removed"
    (file,) = read_diff(f"diff --git a/own.py b/own.py\n@@ -0,0 +1 @@\n+{forged}\n").files
    assert (file.path, file.added, file.removed) == ("own.py", 1, 0)
    assert file.lines[-1].text == forged
