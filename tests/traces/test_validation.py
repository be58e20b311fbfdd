"""`validate` finds every kind of damage: a builder that lost or doubled something cannot pass it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polar_proxy.traces.builders import BuildResult, build
from polar_proxy.traces.validation import InvariantError, validate
from polar_proxy.types import Span
from tests.factories import call

CALLS = [
    call("a", 0, [1, 2], [3, 4]),
    call("b", 1, [1, 2, 3, 4, 5], [6], [7]),
    call("c", 2, [8], [9], status="client_gone"),
]


def _with_first(built: BuildResult, **changes: Any) -> BuildResult:
    return replace(built, traces=(replace(built.traces[0], **changes), *built.traces[1:]))


def _spans(built: BuildResult, position: int, **changes: Any) -> BuildResult:
    spans = list(built.traces[0].spans)
    spans[position] = replace(spans[position], **changes)
    return _with_first(built, spans=tuple(spans))


def _array(built: BuildResult, name: str, position: int, value: float) -> BuildResult:
    array = getattr(built.traces[0], name).copy()
    array[position] = value
    return _with_first(built, **{name: array})


DAMAGE: dict[str, Callable[[BuildResult], BuildResult]] = {
    "a trace lost": lambda b: replace(b, traces=b.traces[1:]),
    "the trace of a second choice lost": lambda b: replace(b, traces=b.traces[:1]),
    "a trace doubled": lambda b: replace(b, traces=(*b.traces, b.traces[0])),
    "an exclusion lost": lambda b: replace(b, excluded={}),
    "trained and excluded": lambda b: replace(b, excluded={**b.excluded, "a": "no_tokens"}),
    "a stranger excluded": lambda b: replace(b, excluded={**b.excluded, "z": "no_tokens"}),
    "another token": lambda b: _array(b, "token_ids", 2, 99),
    "another context token": lambda b: _array(b, "token_ids", 0, 99),
    "a context position trained": lambda b: _array(b, "loss_mask", 0, 1),
    "a sampled position not trained": lambda b: _array(b, "loss_mask", 2, 0),
    "the mask moved": lambda b: _array(_array(b, "loss_mask", 2, 0), "loss_mask", 0, 1),
    "another log-probability": lambda b: _array(b, "logprobs", 2, -0.125),
    "a log-probability lost": lambda b: _array(b, "logprobs", 2, np.nan),
    "a context log-probability": lambda b: _array(b, "logprobs", 0, -0.125),
    "a span cut": lambda b: _spans(b, 1, end=1),
    "a span moved": lambda b: _spans(b, 0, start=1, end=3),
    "a span of another call": lambda b: _spans(b, 1, call_id="b"),
    "a span of a stranger": lambda b: _spans(b, 1, call_id="z"),
    "a span of no choice": lambda b: _spans(b, 1, choice=5),
    "a span called context": lambda b: _spans(b, 1, kind="context"),
    "a span lost": lambda b: _with_first(b, spans=b.traces[0].spans[:-1]),
    "a span too many": lambda b: _with_first(b, spans=(*b.traces[0].spans, Span("context", "a", 0, 1))),
    "a call not named": lambda b: _with_first(b, call_ids=("a",)),
    "an array cut": lambda b: _with_first(b, loss_mask=b.traces[0].loss_mask[:-1]),
}


def test_accepts_the_result_of_a_builder() -> None:
    built = build(CALLS)
    assert [trace.call_ids for trace in built.traces] == [("a", "b"), ("b",)]
    validate(CALLS, built)


@pytest.mark.parametrize("kind", DAMAGE)
def test_rejects_damage(kind: str) -> None:
    with pytest.raises(InvariantError):
        validate(CALLS, DAMAGE[kind](build(CALLS)))


def test_rejects_a_call_without_answers_that_is_not_excluded() -> None:
    unanswered = call("d", 3, [1])
    with pytest.raises(InvariantError):
        validate([*CALLS, unanswered], build(CALLS))
    validate([*CALLS, unanswered], build([*CALLS, unanswered]))
