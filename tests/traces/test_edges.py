"""How the edges of calls shape the traces: retries, sub-agents, compactions, rewinds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.traces.builders import BUILDERS, build
from polar_proxy.traces.validation import validate
from polar_proxy.types import CallRecord
from tests.factories import call


def retry(name: str, at: float, parent: str, *answers: list[int], **changes: Any) -> CallRecord:
    return call(name, at, [1, 2], *answers, edge="retries", parent_call_id=parent, **changes)


@pytest.mark.parametrize("builder", BUILDERS)
def test_last_of_two_attempts_is_trained(builder: str) -> None:
    calls = [call("a", 0, [1, 2], [3]), retry("b", 1, "a", [4])]
    assert build(calls, builder).excluded == {"a": "retry_of"}


@pytest.mark.parametrize("builder", BUILDERS)
def test_attempt_that_the_agent_continued_is_trained(builder: str) -> None:
    calls = [call("a", 0, [1, 2], [3]), retry("b", 1, "a", [4])]
    after = call("c", 2, [1, 2, 3, 5], [6], edge="continues", parent_call_id="a")
    assert build([*calls, after], builder).excluded == {"b": "retry_of"}


def test_retry_after_failures_is_trained() -> None:
    calls = [
        call("a", 0, [1, 2], [3], status="client_gone"),
        retry("b", 1, "a", [3], status="upstream_error"),
        retry("c", 2, "b", [3, 4]),
    ]
    built = build(calls)
    assert built.excluded == {"a": "client_gone", "b": "upstream_error"}
    assert [trace.call_ids for trace in built.traces] == [("c",)]


def test_one_of_chained_attempts_is_trained() -> None:
    calls = [call("a", 0, [1, 2], [3]), retry("b", 1, "a", [4]), retry("c", 2, "b", [5])]
    assert build(calls).excluded == {"a": "retry_of", "b": "retry_of"}


@pytest.mark.parametrize("edge", ["subagent", "compacts"])
def test_subagent_and_compaction_open_their_own_trace(edge: str) -> None:
    """This holds even if its tokens continue the parent's trace, which the parent's next call then continues."""
    calls = [
        call("a", 0, [1], [2]),
        call("s", 1, [1, 2, 7], [8], edge=edge, parent_call_id="a"),
        call("b", 2, [1, 2, 3], [4], edge="continues", parent_call_id="a"),
    ]
    assert [trace.call_ids for trace in build(calls).traces] == [("a", "b"), ("s",)]


def test_replaced_answer_stays_trained_once() -> None:
    calls = [
        call("a", 0, [1], [2]),
        call("b", 1, [1, 2, 3], [4, 5]),
        call("c", 2, [1, 2, 3, 4, 9], [6], edge="rewinds", parent_call_id="b"),
    ]
    built = build(calls)
    assert [trace.call_ids for trace in built.traces] == [("a", "b"), ("c",)]
    assert sum(int(trace.loss_mask.sum()) for trace in built.traces) == 4


def test_parents_trace_is_preferred_among_equal_ones() -> None:
    calls = [
        call("a", 0, [1], [2]),
        call("b", 1, [1], [2]),
        call("c", 2, [1, 2, 3], [4], edge="continues", parent_call_id="b"),
    ]
    assert [trace.call_ids for trace in build(calls).traces] == [("a",), ("b", "c")]


@settings(max_examples=60, deadline=None)
@given(
    statuses=st.lists(st.sampled_from(["ok", "client_gone", "upstream_error"]), min_size=1, max_size=5),
    parents=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    data=st.data(),
)
def test_exactly_one_of_any_attempts_is_trained(statuses: list[Any], parents: list[int], data: st.DataObject) -> None:
    calls = [call("a0", 0, [1, 2], [3], status=statuses[0])]
    for number, status in enumerate(statuses[1:], 1):
        calls.append(retry(f"a{number}", number, f"a{parents[number] % number}", [3 + number], status=status))
    built = build(data.draw(st.permutations(calls)))
    validate(calls, built)
    trained = [name for trace in built.traces for name in trace.call_ids]
    assert len(trained) == (1 if "ok" in statuses else 0)
    for one in calls:
        reason = built.excluded.get(one.call_id)
        assert reason == (None if one.call_id in trained else "retry_of" if one.status == "ok" else one.status)
