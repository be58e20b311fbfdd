"""`on_drift`: drifted calls joined with the context of their own prompts, by hand and over random conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings

from polar_proxy.errors import EngineError, UsageError
from polar_proxy.traces.builders import BuildResult, build
from polar_proxy.traces.certificate import ScorerIdentity
from polar_proxy.traces.scoring import rescore
from polar_proxy.traces.validation import InvariantError, validate
from polar_proxy.types import CallRecord, EngineInfo, Span
from tests.factories import call
from tests.traces.conversations import END, INFO, conversations

pytestmark = pytest.mark.slow


def turn(
    name: str, at: float, prompt: list[int], *answers: list[int], base: str | None = None, **more: Any
) -> CallRecord:
    lineage = {} if base is None else {"base_call_id": base, "base_choice": 0, "prompt_reason": "off"}
    return call(name, at, prompt, *answers, **{"engine": INFO, **lineage, **more})


FIRST = turn("a", 0, [1, END, 7], [2, 3, END])
DRIFTED = turn("b", 1, [1, END, 7, 23, END, 4, END, 7], [5, END], base="a")


def joined(*calls: CallRecord, on_drift: Any = "canonical") -> BuildResult:
    return build(calls, on_drift=on_drift)


def test_join_keeps_sampled_tokens_and_takes_context_from_the_new_prompt() -> None:
    built = joined(FIRST, DRIFTED)
    (trace,) = built.traces
    assert trace.token_ids.tolist() == [1, END, 7, 2, 3, END, 4, END, 7, 5, END]
    assert "".join(map(str, trace.loss_mask)) == "00011100011"
    assert trace.spans[2] == Span("context", "b", 5, 8)
    np.testing.assert_array_equal(trace.logprobs[3:6], FIRST.choices[0].logprobs)
    assert trace.grade == "approximate"
    assert built.grade_reasons[trace.trace_id] == ("canonical",)
    assert [(event.outcome, event.split_reason) for event in built.drift_events] == [("canonical", None)]


def test_cut_answer_is_closed_from_the_prompt() -> None:
    cut = turn("a", 0, [1, END, 7], [2, 3])
    (trace,) = joined(cut, DRIFTED).traces
    assert trace.token_ids.tolist() == [1, END, 7, 2, 3, END, 4, END, 7, 5, END]
    assert trace.spans[2] == Span("context", "b", 4, 8)


def test_call_that_continues_a_joined_call_is_joined() -> None:
    """The call's prompt begins with its base's tokens, which differ from those of the trace."""
    assert DRIFTED.prompt_ids is not None
    third = turn("c", 2, [*DRIFTED.prompt_ids.tolist(), 5, END, 6, 7], [8], base="b", prompt_mode="continue")
    built = joined(FIRST, DRIFTED, third)
    (trace,) = built.traces
    assert trace.token_ids.tolist() == [1, END, 7, 2, 3, END, 4, END, 7, 5, END, 6, 7, 8]
    assert built.grade_reasons[trace.trace_id] == ("canonical", "continued")


@pytest.mark.parametrize(
    ("reason", "calls"),
    [
        ("no_end_of_turn_ids", [FIRST, replace(DRIFTED, engine=None)]),
        ("no_end_of_turn_ids", [FIRST, replace(DRIFTED, engine=replace(INFO, eos_token_ids=()))]),
        ("end_of_turn_within_answer", [turn("a", 0, [1, END, 7], [2, END, 3, END]), DRIFTED]),
        ("too_few_turns", [FIRST, turn("b", 1, [1, END, 7, 23], [5, END], base="a")]),
        ("nothing_new", [FIRST, turn("b", 1, [1, END, 7, 23, END], [5, END], base="a")]),
        (
            "base_went_on",
            [FIRST, turn("x", 0.5, [1, END, 7, 2, 3, END, 6], [8], base="a"), DRIFTED],
        ),
    ],
)
def test_unclean_join_is_split_with_the_reason(reason: str, calls: list[CallRecord]) -> None:
    built = joined(*calls)
    assert built.drift_events[-1].split_reason == reason
    assert built.drift_events[-1].outcome == "split"
    assert len(built.traces) > 1


def test_intended_change_is_not_joined() -> None:
    changed = replace(DRIFTED, prompt_reason="tools_changed")
    assert len(joined(FIRST, changed).traces) == 2
    assert [trace.grade for trace in joined(FIRST, changed).traces] == ["exact", "exact"]


@pytest.mark.parametrize("edge", ["subagent", "compacts"])
def test_subagent_and_compaction_are_never_joined(edge: str) -> None:
    assert len(joined(FIRST, replace(DRIFTED, edge=edge)).traces) == 2


def test_canonical_without_drift_equals_split() -> None:
    plain = turn("b", 1, [1, END, 7, 2, 3, END, 4, END, 7], [5, END], base="a")
    (trace,) = joined(FIRST, plain).traces
    assert trace.grade == "exact"
    assert trace.token_ids.tolist() == build([FIRST, plain]).traces[0].token_ids.tolist()


@pytest.mark.parametrize("start", [0, 3, 4, 6, 7])
def test_rejects_a_context_that_begins_elsewhere(start: int) -> None:
    """Validation allows the context to begin at one position of the prompt only."""
    built = joined(FIRST, DRIFTED)
    (trace,) = built.traces
    assert DRIFTED.prompt_ids is not None
    context = DRIFTED.prompt_ids[start:]
    spans = (*trace.spans[:2], Span("context", "b", start, 8), trace.spans[3])
    nan = np.full(len(context), np.nan, np.float32)
    moved = replace(
        trace,
        token_ids=np.concatenate([trace.token_ids[:6], context, trace.token_ids[-2:]]),
        loss_mask=np.concatenate([trace.loss_mask[:6], np.zeros(len(context), np.uint8), trace.loss_mask[-2:]]),
        logprobs=np.concatenate([trace.logprobs[:6], nan, trace.logprobs[-2:]]),
        spans=spans,
    )
    with pytest.raises(InvariantError, match="does not follow its prompt"):
        validate([FIRST, DRIFTED], replace(built, traces=(moved,)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda built: replace(built, on_drift="split"),
        lambda built: replace(built, grade_reasons=dict.fromkeys(built.grade_reasons, ())),
        lambda built: replace(built, drift_events=()),
        lambda built: replace(built, drift_events=(built.drift_events[0].model_copy(update={"outcome": "split"}),)),
        lambda built: replace(built, drift_events=(built.drift_events[0].model_copy(update={"outcome": "excluded"}),)),
        lambda built: replace(built, traces=(replace(built.traces[0], grade="exact"),)),
        lambda built: replace(built, traces=(replace(built.traces[0], rescored=True),)),
    ],
)
def test_rejects_a_join_that_is_not_recorded(damage: Any) -> None:
    with pytest.raises(InvariantError):
        validate([FIRST, DRIFTED], damage(joined(FIRST, DRIFTED)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=conversations())
def test_canonical_trains_the_same_answers_in_no_more_traces(calls: list[CallRecord]) -> None:
    """A trace with a joined call is graded approximate."""
    split, canonical = build(calls), joined(*calls)
    assert split.excluded == canonical.excluded
    assert len(canonical.traces) <= len(split.traces)
    sampled = [sum(int(t.loss_mask.sum()) for t in built.traces) for built in (split, canonical)]
    assert sampled[0] == sampled[1]
    events = {event.call_id: event for event in canonical.drift_events}
    for one in events.values():
        assert (one.split_reason is None) == (one.outcome != "split")
    for trace in canonical.traces:
        first = [span.call_id for span in trace.spans if span.kind == "sampled" and span.choice == 0]
        has_drift = any(name in events and events[name].outcome == "canonical" for name in first)
        assert ("canonical" in canonical.grade_reasons[trace.trace_id]) == has_drift
        assert has_drift <= (trace.grade == "approximate")
    event(f"{sum(one.outcome == 'canonical' for one in events.values())} joined")


class PositionScorer:
    """Scores each token with its position, so that a value at the wrong position is noticed."""

    info: EngineInfo = INFO

    def __init__(self, lost: int | None = None, short: int = 0) -> None:
        self._lost = lost
        self._short = short
        self.scored: list[list[int]] = []

    async def score(self, token_ids: list[int]) -> list[float]:
        self.scored.append(token_ids)
        scores = [-float(place) for place in range(1, len(token_ids) - self._short)]
        if self._lost is not None:
            scores[self._lost] = float("nan")
        return scores

    async def weight_version(self) -> str | None:
        return "5"


async def test_rescore_replaces_the_logprobs_of_sampled_positions() -> None:
    alone = turn("z", 5, [4, 4], [2])
    scorer = PositionScorer()
    before = joined(FIRST, DRIFTED, alone, on_drift="rescore")
    built = await rescore(before, scorer)
    validate([FIRST, DRIFTED, alone], built)
    trace, untouched = built.traces
    nan = np.nan
    expected = np.array([nan, nan, nan, -3, -4, -5, nan, nan, nan, -9, -10], np.float32)
    np.testing.assert_array_equal(trace.logprobs, expected)
    assert trace.rescored
    assert built.grade_reasons[trace.trace_id] == ("canonical", "rescored")
    assert scorer.scored == [trace.token_ids.tolist()]
    assert built.rescored_by == ScorerIdentity(engine="scripted", version="1", model="m", weight_version="5")
    assert untouched is before.traces[1]


@pytest.mark.parametrize("scorer", [PositionScorer(lost=3), PositionScorer(short=1)])
async def test_rescore_rejects_missing_logprobs(scorer: PositionScorer) -> None:
    with pytest.raises(EngineError):
        await rescore(joined(FIRST, DRIFTED, on_drift="rescore"), scorer)


async def test_rescore_without_drift_does_not_call_the_engine() -> None:
    scorer = PositionScorer()
    built = joined(FIRST, on_drift="rescore")
    assert await rescore(built, scorer) is built
    assert scorer.scored == []


def test_build_rejects_unknown_builder_and_policy() -> None:
    with pytest.raises(UsageError, match="tree"):
        build([FIRST], "forest")
    with pytest.raises(UsageError, match="canonical"):
        build([FIRST], on_drift="ignore")
    with pytest.raises(UsageError, match="merged"):
        build([FIRST], "tree", on_drift="canonical")
    assert build([FIRST, DRIFTED], on_drift="canonical").on_drift == "canonical"
