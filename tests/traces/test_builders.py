"""Builders on sessions small enough to write the traces down by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polar_proxy.traces import exclusion_reason, merged, per_call
from polar_proxy.types import Json, Span, Trace
from tests.factories import call
from tests.traces.random_sessions import DEFECTS, HARMLESS_CHANGES, CallDefect, with_defect


def tell(trace: Trace) -> tuple[list[int], str, int]:
    """Tokens, mask as a string, length of the prompt."""
    return trace.token_ids.tolist(), "".join(map(str, trace.loss_mask)), trace.prompt_length


def test_two_turns_join() -> None:
    first = call("a", 0, [1, 2], [3, 4])
    second = call("b", 1, [1, 2, 3, 4, 5], [6])
    (trace,) = merged([second, first]).traces
    assert tell(trace) == ([1, 2, 3, 4, 5, 6], "001101", 2)
    assert trace.spans == (
        Span("context", "a", 0, 2),
        Span("sampled", "a", 0, 2),
        Span("context", "b", 4, 5),
        Span("sampled", "b", 0, 1),
    )
    expected = [np.nan, np.nan, *first.choices[0].logprobs, np.nan, *second.choices[0].logprobs]
    np.testing.assert_array_equal(trace.logprobs, np.array(expected, dtype=np.float32))
    assert trace.call_ids == ("a", "b")


def test_per_call_keeps_them_apart() -> None:
    built = per_call([call("a", 0, [1, 2], [3, 4]), call("b", 1, [1, 2, 3, 4, 5], [6])])
    assert [tell(trace) for trace in built.traces] == [([1, 2, 3, 4], "0011", 2), ([1, 2, 3, 4, 5, 6], "000001", 5)]


def test_a_drifted_turn_splits() -> None:
    """The second prompt has the first answer tokenised anew: its tokens there are context, nothing is trained twice."""
    built = merged(
        [call("a", 0, [1, 2], [3, 4]), call("b", 1, [1, 2, 34, 5], [6]), call("c", 2, [1, 2, 34, 5, 6], [7])]
    )
    assert [tell(trace) for trace in built.traces] == [([1, 2, 3, 4], "0011", 2), ([1, 2, 34, 5, 6, 7], "000011", 4)]


def test_a_drift_in_the_middle_splits() -> None:
    """The prompt agrees with the trace in length and last token, and differs before it."""
    built = merged([call("a", 0, [1, 2], [3, 4]), call("b", 1, [1, 2, 99, 4, 5], [6])])
    assert [tell(trace) for trace in built.traces] == [([1, 2, 3, 4], "0011", 2), ([1, 2, 99, 4, 5, 6], "000001", 5)]


def test_an_answer_that_was_cut_does_not_join() -> None:
    """The next prompt holds only a part of the answer."""
    built = merged([call("a", 0, [1, 2], [3, 4, 5]), call("b", 1, [1, 2, 3, 4], [6])])
    assert [tell(trace)[1] for trace in built.traces] == ["00111", "00001"]


def test_a_rewind_opens_a_branch_and_both_can_go_on() -> None:
    built = merged(
        [
            call("a", 0, [1], [2]),
            call("b", 1, [1, 2, 3], [4]),
            call("c", 2, [1, 2, 9], [8]),
            call("d", 3, [1, 2, 3, 4, 5], [6]),
            call("e", 4, [1, 2, 9, 8, 7], [6]),
        ]
    )
    assert [trace.call_ids for trace in built.traces] == [("a", "b", "d"), ("c", "e")]
    assert [tell(trace)[1] for trace in built.traces] == ["010101", "000101"]


def test_several_choices_each_have_a_trace_that_can_go_on() -> None:
    built = merged([call("a", 0, [1], [2], [3]), call("b", 1, [1, 3, 4], [5]), call("c", 2, [1, 2, 4], [6])])
    assert [tell(trace)[0] for trace in built.traces] == [[1, 2, 4, 6], [1, 3, 4, 5]]
    assert [trace.call_ids for trace in built.traces] == [("a", "c"), ("a", "b")]


def test_the_same_prompt_twice_trains_both_answers() -> None:
    built = merged([call("a", 0, [1], [2]), call("b", 1, [1, 2, 3], [4]), call("c", 2, [1, 2, 3], [5])])
    assert [tell(trace) for trace in built.traces] == [([1, 2, 3, 4], "0101", 1), ([1, 2, 3, 5], "0001", 3)]


def test_the_longest_trace_is_continued() -> None:
    """Both [1, 2] and [1, 2, 3] are earlier traces that the last prompt begins with."""
    built = merged([call("a", 0, [1], [2]), call("b", 0.5, [1], [2, 3]), call("c", 1, [1, 2, 3, 4], [5])])
    assert [trace.call_ids for trace in built.traces] == [("a",), ("b", "c")]


def test_a_prompt_with_nothing_new() -> None:
    (trace,) = merged([call("a", 0, [1], [2]), call("b", 1, [1, 2], [3])]).traces
    assert tell(trace) == ([1, 2, 3], "011", 1)


def test_an_excluded_call_between_two_turns() -> None:
    """What it said is context of the next call, in the same trace."""
    gone = call("b", 1, [1, 2, 3], [4], status="client_gone")
    built = merged([call("a", 0, [1], [2]), gone, call("c", 2, [1, 2, 3, 4, 5], [6])])
    (trace,) = built.traces
    assert tell(trace) == ([1, 2, 3, 4, 5, 6], "010001", 1)
    assert built.excluded == {"b": "client_gone"}


def test_nothing() -> None:
    assert merged([]).traces == per_call([]).traces == ()


@pytest.mark.parametrize("wound", DEFECTS, ids=lambda wound: f"{wound.reason} {wound.changes or wound.logprob}"[:60])
def test_reasons(wound: CallDefect) -> None:
    assert exclusion_reason(with_defect(call("a", 0, [1], [2, 3]), wound)) == wound.reason


@pytest.mark.parametrize("wound", HARMLESS_CHANGES, ids=lambda wound: str(wound.changes))
def test_no_reason(wound: CallDefect) -> None:
    assert exclusion_reason(with_defect(call("a", 0, [1], [2, 3]), wound)) is None


def test_one_bad_choice_excludes_the_call() -> None:
    both = call("a", 0, [1], [2], [3])
    both.choices[1].logprobs[0] = np.nan
    assert merged([both]).excluded == {"a": "no_logprobs"}


@pytest.mark.parametrize(
    ("sampling", "off_distribution"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0}, False),
        ({"max_tokens": 9, "stop": ["x"], "seed": 1, "logit_bias": {}}, False),
        *(
            (sampling, True)
            for sampling in (
                {"temperature": 0.7},
                {"temperature": 0.0},
                {"top_p": 0.9},
                {"top_k": 20},
                {"min_p": 0.1},
                {"presence_penalty": 0.5},
                {"frequency_penalty": -0.5},
                {"logit_bias": {"5": 10}},
            )
        ),
    ],
)
def test_raw_logprobs_of_a_warped_distribution_are_marked(sampling: Json, off_distribution: bool) -> None:
    """They are of another distribution than the one that was sampled from. Processed ones are of the right one."""

    def grade(mode: Any) -> str:
        return merged([call("a", 0, [1], [2], sampling=sampling, logprob_mode=mode)]).traces[0].grade

    assert grade("raw") == ("approximate" if off_distribution else "exact")
    assert grade("processed") == "exact"


def test_one_warped_call_marks_its_trace_only() -> None:
    off_distribution = {"sampling": {"temperature": 0.5}, "logprob_mode": "raw"}
    built = merged([call("a", 0, [1], [2]), call("b", 1, [1, 2, 3], [4], **off_distribution), call("c", 2, [9], [8])])
    assert [trace.grade for trace in built.traces] == ["approximate", "exact"]
