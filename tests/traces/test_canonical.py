"""`on_drift`: drifted calls joined with the context of their own prompts, by hand and over random conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings

from polar_proxy.errors import EngineError, UsageError
from polar_proxy.traces import BuildResult, InvariantError, build, merged, validate
from polar_proxy.traces.certificate import ScorerIdentity
from polar_proxy.traces.scoring import rescore
from polar_proxy.types import CallRecord, EngineInfo, Span
from tests.factories import call
from tests.traces.conversations import END, INFO, conversations


def turn(
    name: str, at: float, prompt: list[int], *answers: list[int], base: str | None = None, **more: Any
) -> CallRecord:
    place = {} if base is None else {"base_call_id": base, "base_choice": 0, "prompt_reason": "off"}
    return call(name, at, prompt, *answers, **{"engine": INFO, **place, **more})


FIRST = turn("a", 0, [1, END, 7], [2, 3, END])
DRIFTED = turn("b", 1, [1, END, 7, 23, END, 4, END, 7], [5, END], base="a")


def joined(*calls: CallRecord, on_drift: Any = "canonical") -> BuildResult:
    return merged(calls, on_drift=on_drift)


def test_the_sampled_tokens_stay_and_the_context_is_the_new_prompts() -> None:
    built = joined(FIRST, DRIFTED)
    (trace,) = built.traces
    assert trace.token_ids.tolist() == [1, END, 7, 2, 3, END, 4, END, 7, 5, END]
    assert "".join(map(str, trace.loss_mask)) == "00011100011"
    assert trace.spans[2] == Span("context", "b", 5, 8)
    np.testing.assert_array_equal(trace.logprobs[3:6], FIRST.choices[0].logprobs)
    assert trace.grade == "approximate"
    assert built.reasons[trace.trace_id] == ("canonical",)
    assert [(found.outcome, found.split_reason) for found in built.drift_events] == [("canonical", None)]


def test_a_cut_answer_is_closed_from_the_prompt() -> None:
    cut = turn("a", 0, [1, END, 7], [2, 3])
    (trace,) = joined(cut, DRIFTED).traces
    assert trace.token_ids.tolist() == [1, END, 7, 2, 3, END, 4, END, 7, 5, END]
    assert trace.spans[2] == Span("context", "b", 4, 8)


def test_what_goes_on_with_a_joined_call_is_joined() -> None:
    """Its prompt begins with its base's tokens, which are not those of the trace."""
    assert DRIFTED.prompt_ids is not None
    third = turn("c", 2, [*DRIFTED.prompt_ids.tolist(), 5, END, 6, 7], [8], base="b", prompt_mode="continue")
    built = joined(FIRST, DRIFTED, third)
    (trace,) = built.traces
    assert trace.token_ids.tolist() == [1, END, 7, 2, 3, END, 4, END, 7, 5, END, 6, 7, 8]
    assert built.reasons[trace.trace_id] == ("canonical", "continued")


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
def test_what_cannot_be_cut_cleanly_is_split_and_says_why(reason: str, calls: list[CallRecord]) -> None:
    built = joined(*calls)
    assert built.drift_events[-1].split_reason == reason
    assert built.drift_events[-1].outcome == "split"
    assert len(built.traces) > 1


def test_what_was_changed_on_purpose_is_not_joined() -> None:
    changed = replace(DRIFTED, prompt_reason="tools_changed")
    assert len(joined(FIRST, changed).traces) == 2
    assert [trace.grade for trace in joined(FIRST, changed).traces] == ["exact", "exact"]


@pytest.mark.parametrize("edge", ["subagent", "compacts"])
def test_a_line_of_its_own_is_never_joined(edge: str) -> None:
    assert len(joined(FIRST, replace(DRIFTED, edge=edge)).traces) == 2


def test_without_drift_it_is_the_same_as_split() -> None:
    plain = turn("b", 1, [1, END, 7, 2, 3, END, 4, END, 7], [5, END], base="a")
    (trace,) = joined(FIRST, plain).traces
    assert trace.grade == "exact"
    assert trace.token_ids.tolist() == merged([FIRST, plain]).traces[0].token_ids.tolist()


@pytest.mark.parametrize("start", [0, 3, 4, 6, 7])
def test_another_cut_is_found(start: int) -> None:
    """The account allows the context to begin at one place of the prompt and nowhere else."""
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
    "hurt",
    [
        lambda built: replace(built, on_drift="split"),
        lambda built: replace(built, reasons=dict.fromkeys(built.reasons, ())),
        lambda built: replace(built, drift_events=()),
        lambda built: replace(built, drift_events=(built.drift_events[0].model_copy(update={"outcome": "split"}),)),
        lambda built: replace(built, drift_events=(built.drift_events[0].model_copy(update={"outcome": "excluded"}),)),
        lambda built: replace(built, traces=(replace(built.traces[0], grade="exact"),)),
        lambda built: replace(built, traces=(replace(built.traces[0], rescored=True),)),
    ],
)
def test_a_join_that_is_not_told_is_found(hurt: Any) -> None:
    with pytest.raises(InvariantError):
        validate([FIRST, DRIFTED], hurt(joined(FIRST, DRIFTED)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=conversations())
def test_every_conversation(calls: list[CallRecord]) -> None:
    """The same answers are trained, in at most as many traces; what is not exact is marked."""
    split, canonical = merged(calls), joined(*calls)
    assert split.excluded == canonical.excluded
    assert len(canonical.traces) <= len(split.traces)
    sampled = [sum(int(t.loss_mask.sum()) for t in built.traces) for built in (split, canonical)]
    assert sampled[0] == sampled[1]
    told = {found.call_id: found for found in canonical.drift_events}
    for found in told.values():
        assert (found.split_reason is None) == (found.outcome != "split")
    for trace in canonical.traces:
        first = [span.call_id for span in trace.spans if span.kind == "sampled" and span.choice == 0]
        bent = any(name in told and told[name].outcome == "canonical" for name in first)
        assert ("canonical" in canonical.reasons[trace.trace_id]) == bent
        assert bent <= (trace.grade == "approximate")
    event(f"{sum(found.outcome == 'canonical' for found in told.values())} joined")


class _Teacher:
    """Scores the position, so that a number in the wrong place shows."""

    info: EngineInfo = INFO

    def __init__(self, lost: int | None = None, short: int = 0) -> None:
        self._lost = lost
        self._short = short
        self.asked: list[list[int]] = []

    async def score(self, token_ids: list[int]) -> list[float]:
        self.asked.append(token_ids)
        scores = [-float(place) for place in range(1, len(token_ids) - self._short)]
        if self._lost is not None:
            scores[self._lost] = float("nan")
        return scores

    async def weight_version(self) -> str | None:
        return "5"


async def test_rescore_gives_the_sampled_positions_new_numbers() -> None:
    alone = turn("z", 5, [4, 4], [2])
    teacher = _Teacher()
    before = joined(FIRST, DRIFTED, alone, on_drift="rescore")
    built = await rescore(before, teacher)
    validate([FIRST, DRIFTED, alone], built)
    trace, untouched = built.traces
    nan = np.nan
    expected = np.array([nan, nan, nan, -3, -4, -5, nan, nan, nan, -9, -10], np.float32)
    np.testing.assert_array_equal(trace.logprobs, expected)
    assert trace.rescored
    assert built.reasons[trace.trace_id] == ("canonical", "rescored")
    assert teacher.asked == [trace.token_ids.tolist()]
    assert built.rescored_by == ScorerIdentity(engine="scripted", version="1", model="m", weight_version="5")
    assert untouched is before.traces[1]


@pytest.mark.parametrize("teacher", [_Teacher(lost=3), _Teacher(short=1)])
async def test_an_engine_without_a_number_is_an_error(teacher: _Teacher) -> None:
    with pytest.raises(EngineError):
        await rescore(joined(FIRST, DRIFTED, on_drift="rescore"), teacher)


async def test_nothing_to_rescore_asks_nothing() -> None:
    teacher = _Teacher()
    built = joined(FIRST, on_drift="rescore")
    assert await rescore(built, teacher) is built
    assert teacher.asked == []


def test_what_cannot_be_built_is_told() -> None:
    with pytest.raises(UsageError, match="tree"):
        build([FIRST], "forest")
    with pytest.raises(UsageError, match="canonical"):
        build([FIRST], on_drift="ignore")
    with pytest.raises(UsageError, match="merged"):
        build([FIRST], "tree", on_drift="canonical")
    assert build([FIRST, DRIFTED], on_drift="canonical").on_drift == "canonical"
