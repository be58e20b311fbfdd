"""Builders on small sessions, with the traces written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polar_proxy.traces.builders import BUILDERS, build
from polar_proxy.traces.grades import exclusion_reason
from polar_proxy.types import AnswerSampling, Json, Span, Trace
from tests.factories import call
from tests.traces.random_sessions import DEFECTS, HARMLESS_CHANGES, CallDefect, with_defect


def describe(trace: Trace) -> tuple[list[int], str, int]:
    """Return tokens, mask as a string, and length of the prompt."""
    return trace.token_ids.tolist(), "".join(map(str, trace.loss_mask)), trace.prompt_length


def test_two_turns_join() -> None:
    first = call("a", 0, [1, 2], [3, 4])
    second = call("b", 1, [1, 2, 3, 4, 5], [6])
    (trace,) = build([second, first]).traces
    assert describe(trace) == ([1, 2, 3, 4, 5, 6], "001101", 2)
    assert trace.spans == (
        Span("context", "a", 0, 2),
        Span("sampled", "a", 0, 2),
        Span("context", "b", 4, 5),
        Span("sampled", "b", 0, 1),
    )
    expected = [np.nan, np.nan, *first.choices[0].logprobs, np.nan, *second.choices[0].logprobs]
    np.testing.assert_array_equal(trace.logprobs, np.array(expected, dtype=np.float32))
    assert trace.call_ids == ("a", "b")


def test_per_call_makes_one_trace_for_each_call() -> None:
    built = build([call("a", 0, [1, 2], [3, 4]), call("b", 1, [1, 2, 3, 4, 5], [6])], "per_call")
    assert [describe(trace) for trace in built.traces] == [([1, 2, 3, 4], "0011", 2), ([1, 2, 3, 4, 5, 6], "000001", 5)]


def test_drifted_turn_opens_a_new_trace() -> None:
    """The second prompt has the first answer in other tokens: there they are context, so nothing is trained twice."""
    built = build([call("a", 0, [1, 2], [3, 4]), call("b", 1, [1, 2, 34, 5], [6]), call("c", 2, [1, 2, 34, 5, 6], [7])])
    assert [describe(trace) for trace in built.traces] == [
        ([1, 2, 3, 4], "0011", 2),
        ([1, 2, 34, 5, 6, 7], "000011", 4),
    ]


def test_drift_before_the_last_token_opens_a_new_trace() -> None:
    """The prompt has the length and last token of the trace, and differs before it."""
    built = build([call("a", 0, [1, 2], [3, 4]), call("b", 1, [1, 2, 99, 4, 5], [6])])
    assert [describe(trace) for trace in built.traces] == [
        ([1, 2, 3, 4], "0011", 2),
        ([1, 2, 99, 4, 5, 6], "000001", 5),
    ]


def test_prompt_with_part_of_an_answer_does_not_join() -> None:
    built = build([call("a", 0, [1, 2], [3, 4, 5]), call("b", 1, [1, 2, 3, 4], [6])])
    assert [describe(trace)[1] for trace in built.traces] == ["00111", "00001"]


def test_rewind_opens_a_trace_and_both_can_continue() -> None:
    built = build(
        [
            call("a", 0, [1], [2]),
            call("b", 1, [1, 2, 3], [4]),
            call("c", 2, [1, 2, 9], [8]),
            call("d", 3, [1, 2, 3, 4, 5], [6]),
            call("e", 4, [1, 2, 9, 8, 7], [6]),
        ]
    )
    assert [trace.call_ids for trace in built.traces] == [("a", "b", "d"), ("c", "e")]
    assert [describe(trace)[1] for trace in built.traces] == ["010101", "000101"]


def test_each_choice_has_a_trace_that_can_continue() -> None:
    built = build([call("a", 0, [1], [2], [3]), call("b", 1, [1, 3, 4], [5]), call("c", 2, [1, 2, 4], [6])])
    assert [describe(trace)[0] for trace in built.traces] == [[1, 2, 4, 6], [1, 3, 4, 5]]
    assert [trace.call_ids for trace in built.traces] == [("a", "c"), ("a", "b")]


def test_repeated_prompt_trains_both_answers() -> None:
    built = build([call("a", 0, [1], [2]), call("b", 1, [1, 2, 3], [4]), call("c", 2, [1, 2, 3], [5])])
    assert [describe(trace) for trace in built.traces] == [([1, 2, 3, 4], "0101", 1), ([1, 2, 3, 5], "0001", 3)]


def test_longest_matching_trace_is_continued() -> None:
    """The last prompt begins with both earlier traces, [1, 2] and [1, 2, 3]."""
    built = build([call("a", 0, [1], [2]), call("b", 0.5, [1], [2, 3]), call("c", 1, [1, 2, 3, 4], [5])])
    assert [trace.call_ids for trace in built.traces] == [("a",), ("b", "c")]


def test_prompt_without_new_tokens_joins() -> None:
    (trace,) = build([call("a", 0, [1], [2]), call("b", 1, [1, 2], [3])]).traces
    assert describe(trace) == ([1, 2, 3], "011", 1)


def test_excluded_answer_becomes_context() -> None:
    gone = call("b", 1, [1, 2, 3], [4], status="client_gone")
    built = build([call("a", 0, [1], [2]), gone, call("c", 2, [1, 2, 3, 4, 5], [6])])
    (trace,) = built.traces
    assert describe(trace) == ([1, 2, 3, 4, 5, 6], "010001", 1)
    assert built.excluded == {"b": "client_gone"}


def test_no_calls_make_no_traces() -> None:
    assert build([]).traces == build([], "per_call").traces == ()


@pytest.mark.parametrize(
    "defect", DEFECTS, ids=lambda defect: f"{defect.reason} {defect.changes or defect.logprob}"[:60]
)
def test_defect_excludes_a_call(defect: CallDefect) -> None:
    assert exclusion_reason(with_defect(call("a", 0, [1], [2, 3]), defect)) == defect.reason


@pytest.mark.parametrize("defect", HARMLESS_CHANGES, ids=lambda defect: str(defect.changes))
def test_harmless_change_excludes_nothing(defect: CallDefect) -> None:
    assert exclusion_reason(with_defect(call("a", 0, [1], [2, 3]), defect)) is None


def test_one_defective_choice_excludes_the_call() -> None:
    both = call("a", 0, [1], [2], [3])
    both.choices[1].logprobs[0] = np.nan
    assert build([both]).excluded == {"a": "no_logprobs"}


@pytest.mark.parametrize(
    ("sampling", "raw", "processed"),
    [
        ({}, "exact", "exact"),
        (
            {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
            "exact",
            "exact",
        ),
        ({"max_tokens": 9, "stop": ["x"], "seed": 1, "logit_bias": {}}, "exact", "exact"),
        ({"temperature": 0.7}, "approximate", "exact"),
        ({"temperature": None}, "approximate", "approximate"),
        ({"top_p": 0.9}, "approximate", "approximate"),
        ({"top_k": 20}, "approximate", "approximate"),
        ({"min_p": 0.1}, "approximate", "approximate"),
        ({"presence_penalty": 0.5}, "approximate", "approximate"),
        ({"frequency_penalty": -0.5}, "approximate", "approximate"),
        ({"repetition_penalty": 1.1}, "approximate", "approximate"),
        ({"logit_bias": {"5": 10}}, "approximate", "approximate"),
    ],
)
def test_grades_logprobs_of_another_distribution(sampling: Json, raw: str, processed: str) -> None:
    """A trainer computes log softmax(logits / temperature) over the whole vocabulary."""

    def grade(mode: Any) -> str:
        sampled = {"temperature": 1.0, **sampling}
        return build([call("a", 0, [1], [2], sampling=sampled, logprob_mode=mode)]).traces[0].grade

    assert (grade("raw"), grade("processed")) == (raw, processed)


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_trace_says_how_each_answer_was_sampled(builder: str) -> None:
    first = call("a", 0, [1], [2], sampling={"temperature": 0.7, "top_k": 5}, weight_version="3")
    second = call("b", 1, [1, 2, 3], [4], sampling={"temperature": 0.2}, weight_version="4")
    samplings = [sampling for trace in build([first, second], builder).traces for sampling in trace.sampling]
    assert samplings == [
        AnswerSampling(0.7, {"top_k": 5}, "processed", ((0, "3"),)),
        AnswerSampling(0.2, {}, "processed", ((0, "4"),)),
    ]


def test_off_distribution_call_lowers_only_its_own_trace() -> None:
    off_distribution = {"sampling": {"temperature": 0.5}, "logprob_mode": "raw"}
    built = build([call("a", 0, [1], [2]), call("b", 1, [1, 2, 3], [4], **off_distribution), call("c", 2, [9], [8])])
    assert [trace.grade for trace in built.traces] == ["approximate", "exact"]
