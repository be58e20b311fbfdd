"""Properties of builders over random sessions.

Nothing is lost, nothing is trained twice, and every trained token follows exactly the tokens that the model was given.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings

from polar_proxy.traces.builders import build
from polar_proxy.traces.validation import validate
from polar_proxy.types import CallRecord
from tests.traces.random_sessions import sessions

pytestmark = pytest.mark.slow

Session = tuple[list[CallRecord], dict[str, str]]


@pytest.mark.parametrize("builder", ["per_call", "merged"])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(session=sessions())
def test_each_answer_is_trained_once_after_its_own_prompt(builder: str, session: Session) -> None:
    calls, expected = session
    built = build(calls, builder, rollout_id="roll_1", reward=0.5)
    validate(calls, built)
    assert built.excluded == expected
    by_id = {call.call_id: call for call in calls}
    trained: Counter[tuple[str, int]] = Counter()
    for number, trace in enumerate(built.traces):
        assert (trace.index, trace.builder, trace.session_id) == (number, builder, "sess_1")
        assert (trace.rollout_id, trace.reward) == ("roll_1", 0.5)
        assert (trace.token_ids.dtype, trace.loss_mask.dtype, trace.logprobs.dtype) == (np.int32, np.uint8, np.float32)
        tokens: list[int] = []
        for span in trace.spans:
            call = by_id[span.call_id]
            assert span.end > span.start
            here = slice(len(tokens), len(tokens) + span.end - span.start)
            assert call.prompt_ids is not None
            if span.kind == "context":
                piece = call.prompt_ids[span.start : span.end]
                assert not trace.loss_mask[here].any()
                assert np.isnan(trace.logprobs[here]).all()
            else:
                answer = next(choice for choice in call.choices if choice.index == span.choice)
                # The tokens before a sampled token are those that the model was given.
                assert tokens == call.prompt_ids.tolist()
                piece = answer.token_ids[span.start : span.end]
                np.testing.assert_array_equal(trace.logprobs[here], answer.logprobs)
                assert (trace.loss_mask[here] == 1).all()
                trained.update([(span.call_id, span.choice)])
                assert len(piece) == len(answer.token_ids)
            tokens += piece.tolist()
        assert trace.token_ids.tolist() == tokens
        first = by_id[trace.call_ids[0]]
        assert first.prompt_ids is not None
        assert trace.prompt_length == len(first.prompt_ids)
        assert trace.grade == "exact"
    everything = {(c.call_id, answer.index) for c in calls if c.call_id not in expected for answer in c.choices}
    assert set(trained) == everything
    assert set(trained.values()) <= {1}
    event(f"{len(built.traces)} traces of {len(everything)} answers")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(session=sessions())
def test_merging_trains_the_same_tokens_with_no_more_context(session: Session) -> None:
    calls, _ = session
    separate, joined = (build(calls, name) for name in ("per_call", "merged"))
    assert sum(int(t.loss_mask.sum()) for t in joined.traces) == sum(int(t.loss_mask.sum()) for t in separate.traces)
    assert sum(len(t.token_ids) for t in joined.traces) <= sum(len(t.token_ids) for t in separate.traces)
    assert len(joined.traces) <= len(separate.traces)
