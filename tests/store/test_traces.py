"""Traces are read back as they were stored, from their spans; invalid traces are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, Span, Trace
from tests.factories import (
    END,
    assert_same,
    call_record,
    joined_trace,
    new_rollout,
    new_session,
    random_answer,
    token_ids,
)

pytestmark = pytest.mark.slow


async def _two_turns(store: Store) -> tuple[str, list[CallRecord]]:
    session_id = await new_session(store)
    first = call_record(session_id, started_at=1.0)
    assert first.prompt_ids is not None
    prompt = np.concatenate([first.prompt_ids, first.choices[0].token_ids, token_ids(20, 21, END, 22)])
    second = call_record(session_id, started_at=2.0, prompt_ids=prompt, choices=(random_answer(0, 30, seed=9),))
    for call in (first, second):
        await store.calls.commit(call)
    return session_id, [first, second]


async def test_round_trip(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    rollout_id = await new_rollout(store, session_id)
    trace = joined_trace(calls, rollout_id=rollout_id)
    side = call_record(session_id, started_at=3.0)
    await store.calls.commit(side)
    await store.traces.put([trace], {side.call_id: "side_call"}, "merged", session_id, rollout_id)

    assert_same(await store.traces.find(session_id=session_id), [trace])
    assert_same(await store.traces.find(rollout_id=rollout_id), [trace])
    assert await store.traces.exclusions(session_id) == {side.call_id: "side_call"}
    assert (await store.traces.of_session(session_id)).certificates == {trace.trace_id: None}
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert (row.traces, row.trained_tokens) == (1, 35)
    (other,) = await store.rollouts.find(rollout_ids=[rollout_id], builder="per_call")
    assert (other.traces, other.trained_tokens) == (0, 0)


async def test_validated_traces_are_not_checked_again(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    trace = joined_trace(calls)
    wrong = replace(trace, token_ids=trace.token_ids[::-1].copy())
    with pytest.raises(StoreError, match="does not match its calls"):
        await store.traces.put([wrong], {}, "merged", session_id)
    await store.traces.put([wrong], {}, "merged", session_id, validated=True)
    assert_same(await store.traces.find(session_id=session_id), [trace])  # only the spans are stored


async def test_session_traces_are_read_with_their_calls(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    trace = joined_trace(calls[:1])
    certificates = {trace.trace_id: {"head": "ab"}}
    await store.traces.put([trace], {calls[1].call_id: "no_tokens"}, "merged", session_id, certificates=certificates)
    stored = await store.traces.of_session(session_id)
    assert_same(list(stored.traces), [trace])
    assert_same(list(stored.calls), calls)
    assert (stored.excluded, stored.certificates) == ({calls[1].call_id: "no_tokens"}, certificates)
    without_text = await store.traces.of_session(session_id, text=False)
    assert_same(list(without_text.traces), [trace])
    assert [call.messages for call in without_text.calls] == [(), ()]
    assert (await store.traces.of_session(session_id, builder="tree")).traces == ()


async def test_put_replaces_only_traces_of_the_same_builder(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    merged = joined_trace(calls)
    single = [replace(joined_trace([call], "per_call"), index=n) for n, call in enumerate(calls)]
    await store.traces.put([merged], {}, "merged", session_id)
    await store.traces.put(single, {}, "per_call", session_id)
    again = replace(joined_trace(calls[:1]), reward=0.5, grade="continued")
    await store.traces.put(
        [again], {calls[1].call_id: "no_tokens"}, "merged", session_id, certificates={again.trace_id: {"v": 1}}
    )
    assert_same(await store.traces.find(session_id=session_id), [again])
    assert_same(await store.traces.find(session_id=session_id, builder="per_call"), single)
    assert await store.traces.exclusions(session_id) == {calls[1].call_id: "no_tokens"}
    assert await store.traces.exclusions(session_id, builder="per_call") == {}
    assert (await store.traces.of_session(session_id)).certificates == {again.trace_id: {"v": 1}}


async def test_trace_reward(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    rollout_id = await new_rollout(store, session_id)
    trace = joined_trace(calls, rollout_id=rollout_id)
    await store.traces.put([trace], {}, "merged", session_id, rollout_id)
    await store.rewards.add(rollout_id, 0.25, "judge", {}, trace_id=trace.trace_id)
    await store.rewards.add(rollout_id, 0.75, "judge", {}, call_id=calls[0].call_id)
    assert_same(await store.traces.find(session_id=session_id), [replace(trace, reward=0.25)])
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert row.reward is None


async def test_branching_traces_round_trip(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    root = replace(joined_trace(calls[:1], "tree"), index=0)
    prompt = calls[1].prompt_ids
    assert prompt is not None
    own = replace(
        root,
        trace_id="trc_branch",
        index=1,
        prompt_length=len(prompt) - 9,
        token_ids=np.concatenate([prompt[9:], calls[1].choices[0].token_ids]),
        loss_mask=np.array([0] * (len(prompt) - 9) + [1] * 30, np.uint8),
        logprobs=np.concatenate([np.full(len(prompt) - 9, np.nan, np.float32), calls[1].choices[0].logprobs]),
        spans=(Span("context", calls[1].call_id, 9, len(prompt)), Span("sampled", calls[1].call_id, 0, 30)),
        call_ids=(calls[1].call_id,),
        parent_trace_id=root.trace_id,
        branch_at=9,
    )
    await store.traces.put([root, own], {}, "tree", session_id)
    assert_same(await store.traces.find(session_id=session_id, builder="tree"), [root, own])
    with pytest.raises(StoreError, match="branches from"):
        await store.traces.put([own], {}, "tree", session_id)


async def test_rescored_logprobs_round_trip(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    trace = joined_trace(calls)
    later = replace(trace, logprobs=trace.logprobs * np.float32(1.25), rescored=True, grade="approximate")
    await store.traces.put([later], {}, "merged", session_id)
    assert_same(await store.traces.find(session_id=session_id), [later])
    for place, value in ((0, -0.5), (-1, np.nan), (-1, np.inf)):
        hurt = later.logprobs.copy()
        hurt[place] = value
        with pytest.raises(StoreError, match="log-probabilities"):
            await store.traces.put([replace(later, logprobs=hurt)], {}, "merged", session_id)
    with pytest.raises(StoreError, match="log-probabilities"):
        await store.traces.put([replace(later, rescored=False)], {}, "merged", session_id)


def _wrong(trace: Trace) -> dict[str, Trace]:
    tokens, mask, logprobs = trace.token_ids.copy(), trace.loss_mask.copy(), trace.logprobs.copy()
    tokens[0] += 1
    mask[0] = 1
    logprobs[-1] -= 0.1
    beyond = Span("sampled", trace.call_ids[-1], 0, 31)
    unknown = Span("sampled", "call_unknown", 0, 30)
    return {
        "token": replace(trace, token_ids=tokens),
        "mask": replace(trace, loss_mask=mask),
        "logprob": replace(trace, logprobs=logprobs),
        "span missing": replace(trace, spans=trace.spans[:-1]),
        "span beyond": replace(trace, spans=(*trace.spans[:-1], beyond)),
        "unknown call": replace(trace, spans=(*trace.spans[:-1], unknown)),
        "unknown choice": replace(trace, spans=(*trace.spans[:-1], replace(trace.spans[-1], choice=4))),
        "other session": replace(trace, session_id="sess_other"),
    }


@pytest.mark.parametrize(
    "wrong",
    [
        *("token", "mask", "logprob", "span missing", "span beyond"),
        *("unknown call", "unknown choice", "other session"),
    ],
)
async def test_invalid_trace_changes_nothing(store: Store, wrong: str) -> None:
    session_id, calls = await _two_turns(store)
    right = joined_trace(calls)
    await store.traces.put([right], {}, "merged", session_id)
    with pytest.raises(StoreError, match="trace"):
        await store.traces.put([_wrong(joined_trace(calls))[wrong]], {}, "merged", session_id)
    assert_same(await store.traces.find(session_id=session_id), [right])


async def test_audit_is_stored_in_the_certificate(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    trace = joined_trace(calls)
    await store.traces.put(
        [trace], {}, "merged", session_id, certificates={trace.trace_id: {"head": "ab", "audit": None}}
    )
    await store.traces.set_audit(trace.trace_id, "rejected", {"max_abs_diff": 9.5})
    await store.traces.set_audit(trace.trace_id, "approximate", {"max_abs_diff": 0.5})
    audited = {"head": "ab", "grade": "approximate", "audit": {"max_abs_diff": 0.5}}
    assert (await store.traces.of_session(session_id)).certificates == {trace.trace_id: audited}
    assert_same(await store.traces.find(session_id=session_id), [replace(trace, grade="approximate")])


async def test_refuses_audits_of_unknown_or_uncertified_traces(store: Store) -> None:
    session_id, calls = await _two_turns(store)
    trace = joined_trace(calls)
    await store.traces.put([trace], {}, "merged", session_id)
    with pytest.raises(UsageError, match="polar build"):
        await store.traces.set_audit(trace.trace_id, "exact", {})
    with pytest.raises(UsageError, match="trc_0"):
        await store.traces.set_audit("trc_0", "exact", {})


async def test_find_needs_a_session_or_a_rollout(store: Store) -> None:
    with pytest.raises(UsageError):
        await store.traces.find()
    assert await store.traces.find(session_id="sess_unknown") == []
    assert await store.traces.exclusions("sess_unknown") == {}
