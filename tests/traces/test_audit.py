"""Audits find every difference, and report what cannot be compared."""

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
from polar_proxy.traces.audit import AuditReference, TraceAudit, audit, wrong_mode
from polar_proxy.traces.builders import BUILDERS, build
from polar_proxy.traces.operations import SessionTarget, audit_store, find_targets
from polar_proxy.traces.scoring import Scorer, find_containing
from polar_proxy.types import CallRecord, LogprobMode, Trace
from tests.factories import answer, call
from tests.fakes.table_engine import INFO, VOCABULARY, TableEngine, logprob

REFERENCE = AuditReference(INFO, "1")


def table_call(
    name: str,
    at: float,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    temperature: float = 1.0,
    recorded_at: float | None = None,
    **changes: Any,
) -> CallRecord:
    """Return a call with the log-probabilities of the table, at the temperature `recorded_at` if given."""
    before = [*prompt, *tokens]
    values = [logprob(before[len(prompt) + place - 1], token, recorded_at or 1.0) for place, token in enumerate(tokens)]
    record = call(name, at, prompt, weight_version="1", engine=INFO, **changes)
    sampling = {"temperature": temperature}
    return replace(record, choices=(answer(tokens, logprobs=values),), sampling=sampling)


def turns() -> list[CallRecord]:
    """Return two turns, and a second attempt at the second one."""
    one = table_call("a", 0.0, [3, 4], [5, 6, 2])
    return [
        one,
        table_call("b", 1.0, [3, 4, 5, 6, 2, 9], [8, 7, 2]),
        table_call("c", 2.0, [3, 4, 5, 6, 2, 10], [11, 2]),
    ]


def with_changed_logprob(record: CallRecord, position: int, by: float) -> CallRecord:
    (choice,) = record.choices
    values = choice.logprobs.copy()
    values[position] += by
    return replace(record, choices=(replace(choice, logprobs=values),))


async def audited(calls: list[CallRecord], builder: str = "merged", **more: Any) -> list[TraceAudit]:
    traces = build(calls, builder).traces
    return await audit(Scorer(more.pop("engine", TableEngine())), more.pop("reference", REFERENCE), traces, calls)


async def single(*args: Any, **more: Any) -> TraceAudit:
    (found,) = await audited(*args, **more)
    return found


@pytest.mark.parametrize("builder", list(BUILDERS))
async def test_compares_every_sampled_token_once(builder: str) -> None:
    found = await audited(turns(), builder)
    assert [one.grade for one in found] == [one.built_grade for one in found] == ["exact"] * len(found)
    assert sum(one.tokens for one in found) == 8
    assert max(float(values.max()) for one in found for values in one.differences.values()) < 1e-6
    assert not any(one.skipped or one.findings for one in found)


@pytest.mark.parametrize("builder", list(BUILDERS))
@pytest.mark.parametrize(("number", "place", "by"), [(0, 0, 0.5), (1, 1, -0.5), (2, 1, 0.02)])
async def test_one_wrong_logprob_rejects_its_trace(builder: str, number: int, place: int, by: float) -> None:
    calls = turns()
    calls[number] = with_changed_logprob(calls[number], place, by)
    rejected = [one for one in await audited(calls, builder) if one.grade == "rejected"]
    assert len(rejected) == 1
    worst = rejected[0].worst[0]
    assert (worst.call_id, worst.position) == (calls[number].call_id, place)
    assert worst.token_id == calls[number].choices[0].token_ids[place]
    assert worst.size == pytest.approx(abs(by), abs=1e-5)
    ids = calls[number].prompt_ids
    assert ids is not None
    assert list(worst.before) == [*ids.tolist(), *calls[number].choices[0].token_ids[:place].tolist()]
    summary = rejected[0].to_json(5.0)
    assert summary["max_abs_diff"] == pytest.approx(abs(by), abs=1e-5)
    assert (summary["built_grade"], summary["tolerance"], summary["at"]) == ("exact", 0.01, 5.0)
    assert "beyond_tolerance" in summary["findings"]
    assert (summary["worst"]["call_id"], summary["worst"]["position"]) == (worst.call_id, place)


@given(st.data())
async def test_wrong_logprob_is_reported_as_the_worst(data: st.DataObject) -> None:
    tokens = st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=5)
    calls: list[CallRecord] = []
    prompt = data.draw(tokens)
    for number in range(data.draw(st.integers(1, 4))):
        answer = data.draw(tokens)
        calls.append(table_call(f"c{number}", float(number), prompt, answer))
        prompt = data.draw(st.sampled_from([prompt, prompt + answer])) + data.draw(tokens)
    number = data.draw(st.integers(0, len(calls) - 1))
    place = data.draw(st.integers(0, len(calls[number].choices[0].token_ids) - 1))
    calls[number] = with_changed_logprob(calls[number], place, -0.1)
    for builder in BUILDERS:
        found = await audited(calls, builder)
        assert sum(one.tokens for one in found) == sum(len(one.choices[0].token_ids) for one in calls)
        worst = max((one.worst[0] for one in found), key=lambda worst: worst.size)
        assert (worst.call_id, worst.position) == (f"c{number}", place)
        assert [one.grade for one in found].count("rejected") == 1


async def test_shared_beginnings_are_scored_once() -> None:
    calls = [table_call("a", 0.0, [3, 4], [5, 2]), table_call("b", 1.0, [3, 4, 5, 2, 9], [8, 2])]
    for built, lengths in ((build(calls, "per_call"), [7]), (build(calls), [7])):
        engine = TableEngine()
        scorer = Scorer(engine)
        await audit(scorer, REFERENCE, built.traces, calls)
        assert (engine.scored, scorer.tokens) == (lengths, 7)
    engine = TableEngine()
    await audit(Scorer(engine), REFERENCE, build(turns(), "tree").traces, turns())
    assert sorted(engine.scored) == [8, 9]  # the root is within both branches


def test_find_containing() -> None:
    arrays = [np.array(ids, dtype=np.int32) for ids in ([1], [1, 2, 3], [1, 2], [2], [], [1, 2, 3])]
    within = find_containing(arrays)
    assert [within[0], within[2], within[3]] == [within[1], within[1], 3]
    assert within[1] == within[5]


async def test_skips_tokens_of_other_weights() -> None:
    calls = turns()
    changed = replace(calls[1].choices[0], versions=((0, "1"), (2, "2")))
    calls[1] = replace(
        with_changed_logprob(calls[1], 2, 3.0),
        choices=(replace(with_changed_logprob(calls[1], 2, 3.0).choices[0], versions=changed.versions),),
    )
    first, second = await audited(calls)
    assert (dict(first.skipped), first.tokens, first.grade) == ({"policy_version": 1}, 5, "exact")
    assert second.tokens == 2
    first, second = await audited(calls, reference=AuditReference(INFO, "2"))
    assert (first.tokens, first.grade) == (1, "rejected")
    assert (second.tokens, dict(second.skipped), second.grade) == (0, {"policy_version": 2}, "exact")
    # An engine without a known version is compared by its numbers only.
    first, _ = await audited(calls, reference=AuditReference(INFO, None))
    assert (first.tokens, sorted(map(str, first.differences)), first.grade) == (6, ["1", "2"], "rejected")


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"top_k": 5}, {"logit_bias": {"1": 2}}])
async def test_changed_distribution_is_skipped_or_approximate(changes: dict[str, Any]) -> None:
    sampling = {"temperature": 1.0, **changes}
    processed = replace(table_call("a", 0.0, [3], [5, 6, 2]), sampling=sampling, logprob_mode="processed")
    found = await single([processed])
    assert (found.tokens, dict(found.skipped), found.grade) == (0, {"processed_sampling": 3}, "approximate")
    found = await single([replace(processed, logprob_mode="raw")])
    assert (found.tokens, found.grade, list(found.findings)) == (3, "approximate", ["not_policy_samples"])
    found = await single([with_changed_logprob(replace(processed, logprob_mode="raw"), 1, 1.0)])
    assert found.grade == "rejected"


async def test_compares_processed_logprobs_at_their_temperature() -> None:
    hot = table_call("a", 0.0, [3], [5, 6, 2], temperature=0.7, recorded_at=0.7, logprob_mode="processed")
    plain = table_call("b", 1.0, [3, 5, 6, 2, 9], [8, 2], logprob_mode="processed")
    (found,) = await audited([hot, plain])
    assert (found.tokens, dict(found.skipped), found.grade) == (5, {}, "exact")
    assert max(float(values.max()) for values in found.differences.values()) < 1e-6
    found = await single([with_changed_logprob(hot, 1, 0.1), plain])
    assert (found.grade, found.worst[0].position) == ("rejected", 1)


LONG = [token for _ in range(3) for token in range(3, VOCABULARY)]


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.3, 2.0])
@pytest.mark.parametrize(("mode", "actual"), [("raw", "processed"), ("processed", "raw")])
async def test_wrong_mode_is_found_in_the_numbers(temperature: float, mode: LogprobMode, actual: str) -> None:
    recorded_at = temperature if actual == "processed" else 1.0
    wrong = table_call("a", 0.0, [3], LONG, temperature=temperature, recorded_at=recorded_at, logprob_mode=mode)
    found = await single([wrong])
    assert found.grade == "rejected"
    assert actual in found.findings["wrong_mode"]
    correct = table_call("a", 0.0, [3], LONG, temperature=temperature, recorded_at=recorded_at, logprob_mode=actual)
    assert "wrong_mode" not in (await single([correct])).findings


async def test_names_the_wrong_mode_at_each_temperature() -> None:
    calls = [
        table_call("a", 0.0, [3], LONG, temperature=0.5, recorded_at=0.5, logprob_mode="raw"),
        table_call("b", 1.0, [3, *LONG, 3], LONG, temperature=2.0, recorded_at=2.0, logprob_mode="raw"),
    ]
    found = await single(calls)
    assert "temperature 0.5" in found.findings["wrong_mode"]
    assert "temperature 2" in found.findings["wrong_mode"]


def test_wrong_mode_needs_enough_informative_tokens() -> None:
    fresh = np.full(50, -1.0)
    assert wrong_mode(fresh, fresh, "processed", 0.7, 0.01) == "raw"
    assert wrong_mode(fresh, fresh, "processed", 0.99, 0.01) is None
    assert wrong_mode(fresh[:10], fresh[:10], "processed", 0.7, 0.01) is None
    sure = np.full(50, -0.01)
    assert wrong_mode(sure, sure, "processed", 0.7, 0.01) is None
    # Neither mode: for example other weights.
    other_weights = fresh + np.where(np.arange(50) % 2, 2.0, -2.0)
    assert wrong_mode(other_weights, fresh, "raw", 0.7, 0.01) is None


async def test_missing_fresh_logprobs_are_skipped() -> None:
    found = await single([table_call("a", 0.0, [3, 4], [5, 6, 2])], engine=TableEngine(silent=[3]))
    assert (found.tokens, dict(found.skipped), found.grade) == (2, {"no_fresh_logprob": 1}, "exact")
    short = replace(INFO, context_length=5)
    found = await single(
        [table_call("a", 0.0, [3, 4], [5, 6, 2])], engine=TableEngine(short), reference=AuditReference(short, "1")
    )
    assert (found.tokens, dict(found.skipped)) == (2, {"beyond_context": 1})
    nameless = replace(table_call("a", 0.0, [3], [5]), engine=None)
    assert dict((await single([nameless])).skipped) == {"unknown_engine": 1}


async def test_rejects_another_model_or_template() -> None:
    calls = turns()
    for other, word in ((replace(INFO, model="n"), "model"), (replace(INFO, template_hash="render:2"), "template")):
        with pytest.raises(UsageError, match=word):
            await audited(calls, reference=AuditReference(other, "1"))
        assert len(await audited(calls, reference=AuditReference(other, "1", same_model=True))) == 2
    # The hash of a template and the hash of a rendering cannot be compared.
    await audited(calls, reference=AuditReference(replace(INFO, template_hash="ab12"), "1"))


async def _stored(store: Store, calls: list[CallRecord], builder: str = "merged") -> tuple[str, tuple[Trace, ...]]:
    session = await store.sessions.create(key_hash=None, label=None, origin="open")
    calls = [replace(one, session_id=session.session_id) for one in calls]
    for one in calls:
        await store.calls.commit(one)
    built = build(calls, builder)
    certificates = {trace.trace_id: {"version": 1} for trace in built.traces}
    await store.traces.put(built.traces, built.excluded, builder, session.session_id, certificates=certificates)
    return session.session_id, built.traces


async def test_audit_is_written_to_the_store(store: Store) -> None:
    session_id, traces = await _stored(store, turns())
    targets = await find_targets(store)
    assert targets == [SessionTarget(session_id)]
    wrong = await audit_store(store, TableEngine(shift=0.5), REFERENCE, targets)
    assert (wrong.grades, wrong.findings["beyond_tolerance"]) == ({"rejected": 2}, 2)
    assert {one.grade for one in await store.traces.find(session_id=session_id)} == {"rejected"}
    correct = await audit_store(store, TableEngine(versions=["1"]), REFERENCE, targets)
    assert correct.grades == {"exact": 2}
    assert {one.grade for one in await store.traces.find(session_id=session_id)} == {"exact"}
    certificates = (await store.traces.of_session(session_id)).certificates
    summary = certificates[traces[0].trace_id]
    assert summary is not None
    assert (summary["version"], summary["grade"], summary["audit"]["built_grade"]) == (1, "exact", "exact")
    assert summary["audit"]["tokens"] == 6
    texts = [("x", "y")] * len(correct.worst)
    found = correct.to_json(texts)
    assert (found["traces"], found["tokens"], found["grades"], found["skipped"]) == (2, 8, {"exact": 2}, {})
    assert found["by_harness"]["unknown"]["tokens"] == found["by_policy_version"]["1"]["tokens"] == 8
    assert found["max_abs_diff"] < 1e-6
    assert found["worst"][0]["token"] == "x"


async def test_audit_without_compared_tokens_changes_nothing(store: Store) -> None:
    session_id, _ = await _stored(store, turns())
    empty = await store.sessions.create(key_hash=None, label=None, origin="open")
    targets = [SessionTarget(session_id), SessionTarget(empty.session_id)]
    report = await audit_store(store, TableEngine(), AuditReference(INFO, "9"), targets)
    assert report.skipped == {"policy_version": 2, "not_built": 1}
    assert report.to_json([])["max_abs_diff"] is None
    certificates = (await store.traces.of_session(session_id)).certificates
    assert all("audit" not in (one or {}) for one in certificates.values())


async def test_changing_weights_end_the_audit(store: Store) -> None:
    session_id, _ = await _stored(store, turns())
    with pytest.raises(EngineError, match="from version 1 to 2"):
        await audit_store(store, TableEngine(versions=["1", "2"]), REFERENCE, [SessionTarget(session_id)])


async def test_find_targets(store: Store) -> None:
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
