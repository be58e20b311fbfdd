"""Builder `tree`, by hand and over random sessions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from polar_proxy.sequences import trace_path
from polar_proxy.traces.builders import BuildResult, build
from polar_proxy.traces.validation import InvariantError, validate
from polar_proxy.types import CallRecord, Trace
from tests.factories import call
from tests.traces.conversations import conversations
from tests.traces.random_sessions import sessions

pytestmark = pytest.mark.slow


def describe(built: BuildResult) -> list[tuple[list[int], str, int | None, int]]:
    """Return own tokens, mask, index of the parent, and branch position of each trace."""
    indices = {trace.trace_id: trace.index for trace in built.traces}
    return [
        (
            trace.token_ids.tolist(),
            "".join(map(str, trace.loss_mask)),
            None if trace.parent_trace_id is None else indices[trace.parent_trace_id],
            trace.branch_at,
        )
        for trace in built.traces
    ]


def test_continued_turns_are_one_trace() -> None:
    built = build([call("a", 0, [1, 2], [3, 4]), call("b", 1, [1, 2, 3, 4, 5], [6])], "tree")
    assert describe(built) == [([1, 2, 3, 4, 5, 6], "001101", None, 0)]


def test_parallel_answers_share_their_prompt() -> None:
    built = build([call("a", 0, [1, 2], [3], [4]), call("b", 1, [1, 2, 4, 5], [6])], "tree")
    assert describe(built) == [([1, 2, 3], "001", None, 0), ([4, 5, 6], "101", 0, 2)]
    assert [trace.prompt_length for trace in built.traces] == [2, 0]


def test_equal_answers_are_both_trained() -> None:
    built = build([call("a", 0, [1], [2, 3], [2, 3])], "tree")
    assert describe(built) == [
        ([1, 2, 3], "011", None, 0),
        ([2, 3], "11", 0, 1),
    ]


def test_rewind_branches_and_trains_a_shared_answer_once() -> None:
    built = build(
        [
            call("a", 0, [1], [2, 3]),
            call("b", 1, [1, 2, 3, 4], [5]),
            call("c", 2, [1, 2, 3, 6], [7], edge="rewinds"),
        ],
        "tree",
    )
    assert describe(built) == [([1, 2, 3, 4, 5], "01101", None, 0), ([6, 7], "01", 0, 3)]
    whole = trace_path(built.traces[1], built.traces)
    assert whole.token_ids.tolist() == [1, 2, 3, 6, 7]
    assert whole.loss_mask.tolist() == [0, 1, 1, 0, 1]
    np.testing.assert_array_equal(whole.logprobs[1:3], built.traces[0].logprobs[1:3])
    assert built.traces[1].branch_at == 3


def test_subagent_shares_the_system_prompt() -> None:
    built = build(
        [
            call("a", 0, [1, 1, 2], [3]),
            call("s", 1, [1, 1, 8], [9], edge="subagent"),
            call("b", 2, [1, 1, 2, 3, 4], [5]),
            call("t", 3, [1, 1, 8, 9, 4], [6]),
        ],
        "tree",
    )
    assert describe(built) == [([1, 1, 2, 3, 4, 5], "000101", None, 0), ([8, 9, 4, 6], "0101", 0, 2)]


def test_subagent_that_follows_a_whole_path_has_its_own_trace() -> None:
    built = build(
        [
            call("a", 0, [1], [2]),
            call("s", 1, [1, 2, 7], [8], edge="subagent", parent_call_id="a"),
            call("b", 2, [1, 2, 3], [4], edge="continues", parent_call_id="a"),
        ],
        "tree",
    )
    assert [trace.call_ids for trace in built.traces] == [("a", "b"), ("s",)]
    assert describe(built)[1] == ([7, 8], "01", 0, 2)


def test_drift_branches_where_the_tokens_differ() -> None:
    """The branch may be in the middle of an answer: the tokens before it are shared, the tokens after it are
    context."""
    built = build([call("a", 0, [1, 2], [3, 4, 5]), call("b", 1, [1, 2, 3, 9, 5, 6], [7])], "tree")
    assert describe(built) == [([1, 2, 3, 4, 5], "00111", None, 0), ([9, 5, 6, 7], "0001", 0, 3)]


def test_branch_of_a_branch() -> None:
    built = build(
        [call("a", 0, [1, 2, 3], [4]), call("b", 1, [1, 2, 6, 7], [8]), call("c", 2, [1, 2, 6, 9], [5])], "tree"
    )
    assert describe(built)[1:] == [([6, 7, 8], "001", 0, 2), ([9, 5], "01", 1, 3)]
    assert trace_path(built.traces[2], built.traces).token_ids.tolist() == [1, 2, 6, 9, 5]


def test_prompts_without_common_tokens_are_roots() -> None:
    assert [
        row[2:]
        for row in describe(build([call("a", 0, [1], [2]), call("b", 1, [3], [4]), call("c", 2, [], [1])], "tree"))
    ] == [(None, 0)] * 3


def _answers(traces: tuple[Trace, ...]) -> list[tuple[str, int]]:
    return sorted((s.call_id, s.choice) for trace in traces for s in trace.spans if s.kind == "sampled")


def _check(calls: list[CallRecord]) -> None:
    built = build(calls, "tree", rollout_id="roll_1", reward=0.5)
    by_id = {call.call_id: call for call in calls}
    flat = build(calls)
    assert built.excluded == flat.excluded
    assert _answers(built.traces) == _answers(flat.traces)
    assert sum(len(trace.token_ids) for trace in built.traces) <= sum(len(trace.token_ids) for trace in flat.traces)
    for number, trace in enumerate(built.traces):
        assert (trace.index, trace.rollout_id, trace.reward) == (number, "roll_1", 0.5)
        whole = trace_path(trace, built.traces)
        assert (whole.token_ids.dtype, whole.loss_mask.dtype) == (np.int32, np.uint8)
        assert trace.branch_at == len(whole.token_ids) - len(trace.token_ids)
        if trace.parent_trace_id is not None:  # it differs from its parent where it begins, so no path is stored twice
            parent = next(one for one in built.traces if one.trace_id == trace.parent_trace_id)
            assert parent.branch_at < trace.branch_at <= parent.branch_at + len(parent.token_ids)
        position = trace.branch_at
        for span in trace.spans:
            size = span.end - span.start
            if span.kind == "sampled":
                prompt = by_id[span.call_id].prompt_ids
                answer = by_id[span.call_id].choices[span.choice]
                assert prompt is not None
                assert whole.token_ids[: position + size].tolist() == prompt.tolist() + answer.token_ids.tolist()
                np.testing.assert_array_equal(whole.logprobs[position : position + size], answer.logprobs)
                assert whole.loss_mask[position : position + size].all()
            position += size


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(session=sessions())
def test_each_path_of_a_session_is_a_prompt_and_its_answer(session: tuple[list[CallRecord], dict[str, str]]) -> None:
    _check(session[0])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=conversations())
def test_each_path_of_a_conversation_is_a_prompt_and_its_answer(calls: list[CallRecord]) -> None:
    _check(calls)


CALLS = [call("a", 0, [1, 2], [3, 4]), call("b", 1, [1, 2, 5], [6]), call("c", 2, [1, 2, 5, 7], [8])]


@pytest.mark.parametrize(
    "changes",
    [
        {"branch_at": 1},
        {"branch_at": 3},
        {"branch_at": 0},
        {"parent_trace_id": None, "branch_at": 0},
        {"parent_trace_id": "trc_0"},
        {"prompt_length": 2},
    ],
    ids=str,
)
def test_wrong_branch_is_invalid(changes: dict[str, object]) -> None:
    built = build(CALLS, "tree")
    assert describe(built)[1][2:] == (0, 2)
    wrong = replace(built.traces[1], **changes)  # type: ignore[arg-type]
    with pytest.raises(InvariantError):
        validate(CALLS, replace(built, traces=(built.traces[0], wrong, *built.traces[2:])))


def test_cycle_of_parents_is_invalid() -> None:
    built = build(CALLS, "tree")
    root, leaf = built.traces[:2]
    with pytest.raises(InvariantError, match="has no such position"):
        validate(CALLS, replace(built, traces=(replace(root, parent_trace_id=leaf.trace_id), *built.traces[1:])))
