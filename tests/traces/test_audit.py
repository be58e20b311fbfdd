"""Audits find every difference and only what is one; what cannot be compared is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.errors import EngineError, UsageError
from polar_proxy.store import Store
from polar_proxy.traces import BUILDERS, merged, per_call, tree
from polar_proxy.traces.audit import AuditReference, TraceAudit, audit, wrong_mode
from polar_proxy.traces.operations import SessionTarget, audit_store, find_targets
from polar_proxy.traces.scoring import ScoredTokens, find_containing
from polar_proxy.types import CallRecord, LogprobMode, Trace
from tests.factories import answer, call
from tests.fakes.table_engine import INFO, VOCABULARY, TableEngine, logprob

AGAINST = AuditReference(INFO, "1")


def said(
    name: str,
    at: float,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    temperature: float = 1.0,
    counted: float | None = None,
    **changes: Any,
) -> CallRecord:
    """A call whose log-probabilities are those of the table, at the temperature `counted` if that is given."""
    before = [*prompt, *tokens]
    values = [logprob(before[len(prompt) + place - 1], token, counted or 1.0) for place, token in enumerate(tokens)]
    record = call(name, at, prompt, weight_version="1", engine=INFO, **changes)
    sampling = {"temperature": temperature}
    return replace(record, choices=(answer(tokens, logprobs=values),), sampling=sampling)


def turns() -> list[CallRecord]:
    """Two turns, and a second try of the second one."""
    one = said("a", 0.0, [3, 4], [5, 6, 2])
    return [one, said("b", 1.0, [3, 4, 5, 6, 2, 9], [8, 7, 2]), said("c", 2.0, [3, 4, 5, 6, 2, 10], [11, 2])]


def hurt(record: CallRecord, place: int, by: float) -> CallRecord:
    own = record.choices[0]
    values = own.logprobs.copy()
    values[place] += by
    return replace(record, choices=(replace(own, logprobs=values),))


async def audited(calls: list[CallRecord], builder: str = "merged", **more: Any) -> list[TraceAudit]:
    traces = BUILDERS[builder](calls).traces
    return await audit(more.pop("engine", TableEngine()), more.pop("against", AGAINST), traces, calls, **more)


async def single(*args: Any, **more: Any) -> TraceAudit:
    (found,) = await audited(*args, **more)
    return found


@pytest.mark.parametrize("builder", list(BUILDERS))
async def test_every_sampled_token_is_compared_once(builder: str) -> None:
    found = await audited(turns(), builder)
    assert [one.grade for one in found] == [one.built_grade for one in found] == ["exact"] * len(found)
    assert sum(one.tokens for one in found) == 8
    assert max(float(values.max()) for one in found for values in one.differences.values()) < 1e-6
    assert not any(one.skipped or one.findings for one in found)


@pytest.mark.parametrize("builder", list(BUILDERS))
@pytest.mark.parametrize(("number", "place", "by"), [(0, 0, 0.5), (1, 1, -0.5), (2, 1, 0.02)])
async def test_one_wrong_number_refuses_its_trace(builder: str, number: int, place: int, by: float) -> None:
    calls = turns()
    calls[number] = hurt(calls[number], place, by)
    refused = [one for one in await audited(calls, builder) if one.grade == "rejected"]
    assert len(refused) == 1
    worst = refused[0].worst[0]
    assert (worst.call_id, worst.position) == (calls[number].call_id, place)
    assert worst.token_id == calls[number].choices[0].token_ids[place]
    assert worst.size == pytest.approx(abs(by), abs=1e-5)
    ids = calls[number].prompt_ids
    assert ids is not None
    assert list(worst.before) == [*ids.tolist(), *calls[number].choices[0].token_ids[:place].tolist()]
    told = refused[0].to_json(AGAINST, 5.0)
    assert told["max_abs_diff"] == pytest.approx(abs(by), abs=1e-5)
    assert (told["built_grade"], told["tolerance"], told["at"]) == ("exact", 0.01, 5.0)
    assert "beyond_tolerance" in told["findings"]
    assert (told["worst"]["call_id"], told["worst"]["position"]) == (worst.call_id, place)


@given(st.data())
async def test_a_wrong_number_anywhere_is_the_worst(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=5)
    calls: list[CallRecord] = []
    prompt = data.draw(tokens)
    for number in range(data.draw(st.integers(1, 4))):
        answer = data.draw(tokens)
        calls.append(said(f"c{number}", float(number), prompt, answer))
        prompt = data.draw(st.sampled_from([prompt, prompt + answer])) + data.draw(tokens)
    number = data.draw(st.integers(0, len(calls) - 1))
    place = data.draw(st.integers(0, len(calls[number].choices[0].token_ids) - 1))
    calls[number] = hurt(calls[number], place, -0.1)
    for builder in BUILDERS:
        found = await audited(calls, builder)
        assert sum(one.tokens for one in found) == sum(len(one.choices[0].token_ids) for one in calls)
        worst = max((one.worst[0] for one in found), key=lambda worst: worst.size)
        assert (worst.call_id, worst.position) == (f"c{number}", place)
        assert [one.grade for one in found].count("rejected") == 1


async def test_what_sequences_have_in_common_is_scored_once() -> None:
    calls = [said("a", 0.0, [3, 4], [5, 2]), said("b", 1.0, [3, 4, 5, 2, 9], [8, 2])]
    for built, lengths in ((per_call(calls), [7]), (merged(calls), [7])):
        engine, scored = TableEngine(), ScoredTokens()
        await audit(engine, AGAINST, built.traces, calls, scored=scored)
        assert (engine.scored, scored.tokens) == (lengths, 7)
    engine = TableEngine()
    await audit(engine, AGAINST, tree(turns()).traces, turns())
    assert sorted(engine.scored) == [8, 9]  # the root is within both branches


def test_covering() -> None:
    arrays = [np.array(ids, dtype=np.int32) for ids in ([1], [1, 2, 3], [1, 2], [2], [], [1, 2, 3])]
    within = find_containing(arrays)
    assert [within[0], within[2], within[3]] == [within[1], within[1], 3]
    assert within[1] == within[5]


async def test_only_tokens_of_the_loaded_weights_are_compared() -> None:
    calls = turns()
    changed = replace(calls[1].choices[0], versions=((0, "1"), (2, "2")))
    calls[1] = replace(
        hurt(calls[1], 2, 3.0), choices=(replace(hurt(calls[1], 2, 3.0).choices[0], versions=changed.versions),)
    )
    first, second = await audited(calls)
    assert (dict(first.skipped), first.tokens, first.grade) == ({"policy_version": 1}, 5, "exact")
    assert second.tokens == 2
    first, second = await audited(calls, against=AuditReference(INFO, "2"))
    assert (first.tokens, first.grade) == (1, "rejected")
    assert (second.tokens, dict(second.skipped), second.grade) == (0, {"policy_version": 2}, "exact")
    # An engine that does not tell its version is held to nothing but the numbers.
    first, _ = await audited(calls, against=AuditReference(INFO, None))
    assert (first.tokens, sorted(map(str, first.differences)), first.grade) == (6, ["1", "2"], "rejected")


@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"logit_bias": {"1": 2}}])
async def test_another_distribution(changes: dict[str, Any]) -> None:
    processed = replace(said("a", 0.0, [3], [5, 6, 2]), sampling=changes, logprob_mode="processed")
    found = await single([processed])
    assert (found.tokens, dict(found.skipped), found.grade) == (0, {"processed_sampling": 3}, "exact")
    found = await single([replace(processed, logprob_mode="raw")])
    assert (found.tokens, found.grade, list(found.findings)) == (3, "approximate", ["not_policy_samples"])
    found = await single([hurt(replace(processed, logprob_mode="raw"), 1, 1.0)])
    assert found.grade == "rejected"


LONG = [token for _ in range(3) for token in range(3, VOCABULARY)]


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.3, 2.0])
@pytest.mark.parametrize(("mode", "really"), [("raw", "processed"), ("processed", "raw")])
async def test_a_wrong_mode_is_seen_in_the_numbers(temperature: float, mode: LogprobMode, really: str) -> None:
    counted = temperature if really == "processed" else 1.0
    wrong = said("a", 0.0, [3], LONG, temperature=temperature, counted=counted, logprob_mode=mode)
    found = await single([wrong])
    assert found.grade == "rejected"
    assert really in found.findings["wrong_mode"]
    right = said("a", 0.0, [3], LONG, temperature=temperature, counted=counted, logprob_mode=really)
    assert "wrong_mode" not in (await single([right])).findings


def test_where_the_modes_cannot_be_told_apart_nothing_is_said() -> None:
    fresh = np.full(50, -1.0)
    assert wrong_mode(fresh, fresh, "processed", 0.7, 0.01) == "raw"
    assert wrong_mode(fresh, fresh, "processed", 0.99, 0.01) is None
    assert wrong_mode(fresh[:10], fresh[:10], "processed", 0.7, 0.01) is None
    sure = np.full(50, -0.01)
    assert wrong_mode(sure, sure, "processed", 0.7, 0.01) is None
    # Neither: other weights, say.
    strange = fresh + np.where(np.arange(50) % 2, 2.0, -2.0)
    assert wrong_mode(strange, fresh, "raw", 0.7, 0.01) is None


async def test_what_the_engine_does_not_tell_is_no_difference() -> None:
    found = await single([said("a", 0.0, [3, 4], [5, 6, 2])], engine=TableEngine(silent=[3]))
    assert (found.tokens, dict(found.skipped), found.grade) == (2, {"no_fresh_logprob": 1}, "exact")
    short = replace(INFO, context_length=5)
    found = await single(
        [said("a", 0.0, [3, 4], [5, 6, 2])], engine=TableEngine(short), against=AuditReference(short, "1")
    )
    assert (found.tokens, dict(found.skipped)) == (2, {"beyond_context": 1})
    nameless = replace(said("a", 0.0, [3], [5]), engine=None)
    assert dict((await single([nameless])).skipped) == {"unknown_engine": 1}


async def test_another_model_or_template_is_refused() -> None:
    calls = turns()
    for other, word in ((replace(INFO, model="n"), "model"), (replace(INFO, template_hash="render:2"), "template")):
        with pytest.raises(UsageError, match=word):
            await audited(calls, against=AuditReference(other, "1"))
        assert len(await audited(calls, against=AuditReference(other, "1", same_model=True))) == 2
    # The hash of a template and that of what one renders say nothing about each other.
    await audited(calls, against=AuditReference(replace(INFO, template_hash="ab12"), "1"))


async def _stored(store: Store, calls: list[CallRecord], builder: str = "merged") -> tuple[str, tuple[Trace, ...]]:
    session = await store.sessions.create(key_hash=None, label=None, origin="open")
    calls = [replace(one, session_id=session.session_id) for one in calls]
    for one in calls:
        await store.calls.commit(one)
    built = BUILDERS[builder](calls)
    certificates = {trace.trace_id: {"version": 1} for trace in built.traces}
    await store.traces.put(built.traces, built.excluded, builder, session.session_id, certificates=certificates)
    return session.session_id, built.traces


async def test_the_store_keeps_what_was_found(store: Store) -> None:
    session_id, traces = await _stored(store, turns())
    targets = await find_targets(store)
    assert targets == [SessionTarget(session_id)]
    wrong = await audit_store(store, TableEngine(shift=0.5), AGAINST, targets)
    assert (wrong.grades, wrong.findings["beyond_tolerance"]) == ({"rejected": 2}, 2)
    assert {one.grade for one in await store.traces.find(session_id=session_id)} == {"rejected"}
    right = await audit_store(store, TableEngine(versions=["1"]), AGAINST, targets)
    assert right.grades == {"exact": 2}
    assert {one.grade for one in await store.traces.find(session_id=session_id)} == {"exact"}
    certificates = await store.traces.certificates(session_id=session_id)
    told = certificates[traces[0].trace_id]
    assert told is not None
    assert (told["version"], told["grade"], told["audit"]["built_grade"]) == (1, "exact", "exact")
    assert told["audit"]["tokens"] == 6
    texts = [("x", "y")] * len(right.worst)
    found = right.to_json(texts)
    assert (found["traces"], found["tokens"], found["grades"], found["skipped"]) == (2, 8, {"exact": 2}, {})
    assert found["by_harness"]["unknown"]["tokens"] == found["by_policy_version"]["1"]["tokens"] == 8
    assert found["max_abs_diff"] < 1e-6
    assert found["worst"][0]["token"] == "x"


async def test_nothing_compared_changes_nothing(store: Store) -> None:
    session_id, _ = await _stored(store, turns())
    empty = await store.sessions.create(key_hash=None, label=None, origin="open")
    targets = [SessionTarget(session_id), SessionTarget(empty.session_id)]
    report = await audit_store(store, TableEngine(), AuditReference(INFO, "9"), targets)
    assert report.skipped == {"policy_version": 2, "not_built": 1}
    assert report.to_json([])["max_abs_diff"] is None
    certificates = await store.traces.certificates(session_id=session_id)
    assert all("audit" not in (one or {}) for one in certificates.values())


async def test_weights_that_change_end_the_audit(store: Store) -> None:
    session_id, _ = await _stored(store, turns())
    with pytest.raises(EngineError, match="from version 1 to 2"):
        await audit_store(store, TableEngine(versions=["1", "2"]), AGAINST, [SessionTarget(session_id)])


async def test_targets(store: Store) -> None:
    first, _ = await _stored(store, turns())
    second, _ = await _stored(store, [replace(one, call_id=one.call_id + "2") for one in turns()])
    assert [one.session_id for one in await find_targets(store)] == [second, first]
    assert [one.session_id for one in await find_targets(store, limit=1)] == [second]
    assert await find_targets(store, session_ids=[first]) == [SessionTarget(first)]
    assert await find_targets(store, where="reward>=1") == []
    with pytest.raises(UsageError, match="sess_0"):
        await find_targets(store, session_ids=["sess_0"])
    with pytest.raises(UsageError, match="either"):
        await find_targets(store, where="reward>=1", session_ids=[first])
