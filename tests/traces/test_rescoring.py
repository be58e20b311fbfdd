"""Rescoring: answers recorded as text get tokens if their rendering is clean, never in place of sampled ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polar_proxy.engines.base import Engine
from polar_proxy.engines.scripted import END, INFO, ScriptedEngine, decode, logprob
from polar_proxy.engines.scripted import encode as tokens
from polar_proxy.errors import RequestError, UsageError
from polar_proxy.store import Store
from polar_proxy.store.repositories.rescores import RESCORED_BUILDER, Rescore, apply_rescores
from polar_proxy.traces.audit import AuditReference
from polar_proxy.traces.builders import build
from polar_proxy.traces.certificate import restore
from polar_proxy.traces.operations import SessionTarget, audit_store, rescore_session
from polar_proxy.traces.scoring import (
    RescoreReport,
    Scorer,
    UnusableAnswerError,
    encode_answers,
    require_end_of_turn,
)
from polar_proxy.types import CallRecord, ChatRequest, Choice, Json, Message
from tests.factories import call, engine_info

HOSTED = engine_info(engine="openai", template_hash=None, capabilities=frozenset({"tools"}), eos_token_ids=())


def engine(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(info=replace(INFO, **changes))


def answered(
    name: str, at: float, messages: list[Json], content: str | None, *, finish: str = "stop", **more: Any
) -> CallRecord:
    """Return a call that an API answered without tokens."""
    answer = Message.from_openai({"role": "assistant", "content": content, **more.pop("message", {})})
    none = np.empty(0, dtype=np.int32)
    record = call(name, at, None, status="no_tokens", engine=HOSTED, params={"model": "big"}, **more)
    return replace(
        record,
        messages=tuple(json.dumps(message).encode() for message in messages),
        choices=(Choice(0, answer, finish, none, none.astype(np.float32)),),
    )


HI: Json = {"role": "user", "content": "hi"}
MORE: Json = {"role": "user", "content": "more"}


def conversation() -> list[CallRecord]:
    """Return two turns, after a side call and a call of another engine that has tokens."""
    own = call("own", 0.0, [5, 6], [7, 2], engine=INFO)
    side = answered("side", 0.5, [HI], "title", edge="side_call")
    first = answered("one", 1.0, [HI], "hello")
    hello: Json = {"role": "assistant", "content": "hello"}
    second = answered("two", 2.0, [HI, hello, MORE], "bye", edge="continues", parent_call_id="one")
    return [own, side, first, second]


async def commit(store: Store, calls: list[CallRecord]) -> str:
    session = await store.sessions.create(key_hash=None, label=None, origin="open")
    for one in calls:
        await store.calls.commit(replace(one, session_id=session.session_id))
    return session.session_id


async def rescored(store: Store, calls: list[CallRecord], by: Engine | None = None) -> tuple[str, RescoreReport]:
    session_id = await commit(store, calls)
    report = RescoreReport()
    await rescore_session(store, Scorer(by or engine()), SessionTarget(session_id), report)
    return session_id, report


async def test_rescored_answers_are_merged(store: Store) -> None:
    session_id, report = await rescored(store, conversation())
    assert (report.calls, report.answers, report.traces) == (2, 2, 1)
    assert report.skipped == {"side_call": 1, "sampled_here": 1}
    (trace,) = await store.traces.find(session_id=session_id, builder=RESCORED_BUILDER)
    assert (trace.builder, trace.grade, trace.rescored, trace.call_ids) == (
        "rescored",
        "approximate",
        True,
        ("one", "two"),
    )
    assert decode(trace.token_ids.tolist()) == "user:hiassistant:hellouser:moreassistant:bye"
    trained = trace.token_ids[trace.loss_mask == 1].tolist()
    assert trained == [*tokens("hello"), END, *tokens("bye"), END]
    assert trace.logprobs[trace.loss_mask == 1] == pytest.approx([logprob(token) for token in trained])
    assert np.isnan(trace.logprobs[trace.loss_mask == 0]).all()
    # The first call is a prefix of the second, so it is not scored by itself.
    assert report.scored_tokens == len(trace.token_ids)


async def test_recorded_calls_do_not_change(store: Store) -> None:
    session_id, _ = await rescored(store, conversation())
    kept = {one.call_id: one for one in await store.calls.of_session(session_id)}
    for name in ("one", "two"):
        assert (kept[name].status, kept[name].prompt_ids, kept[name].choices[0].token_ids.size) == (
            "no_tokens",
            None,
            0,
        )
    built = build(list(kept.values()))
    assert [trace.call_ids for trace in built.traces] == [("own",)]
    assert built.excluded["one"] == "no_tokens"
    assert await store.traces.find(session_id=session_id, builder="merged") == []


async def test_every_call_is_rescored_or_excluded(store: Store) -> None:
    filtered = answered("filtered", 3.0, [HI], "x", finish="content_filter")
    session_id, report = await rescored(store, [*conversation(), filtered])
    assert await store.traces.exclusions(session_id, builder=RESCORED_BUILDER) == {
        "own": "sampled_here",
        "side": "side_call",
        "filtered": "unfinished",
    }
    assert report.calls + sum(report.skipped.values()) == 5


async def test_certificates_name_both_engines(store: Store) -> None:
    session_id, _ = await rescored(store, conversation())
    kept = (await store.traces.of_session(session_id, builder=RESCORED_BUILDER)).certificates
    traces = await store.traces.find(session_id=session_id, builder=RESCORED_BUILDER)
    calls = apply_rescores(await store.calls.of_session(session_id), await store.rescores.of_session(session_id))
    (whole,) = restore(kept, traces, calls).values()
    assert (whole["builder"], whole["grade"], whole["grade_reasons"]) == ("rescored", "approximate", ["rescored"])
    assert whole["rescored"] == {
        "engine": "scripted",
        "version": "1",
        "model": "scripted-model",
        "weight_version": None,
    }
    assert [one["engine"] for one in whole["engines"]] == ["openai"]


async def test_rescoring_again_replaces_the_result(store: Store) -> None:
    session_id, _ = await rescored(store, conversation())
    before = await store.rescores.of_session(session_id)
    await rescore_session(store, Scorer(engine(version="2")), SessionTarget(session_id), RescoreReport())
    after = await store.rescores.of_session(session_id)
    assert [one.engine.version for one in before] == ["1", "1"]
    assert [one.engine.version for one in after] == ["2", "2"]
    assert len(await store.traces.find(session_id=session_id, builder=RESCORED_BUILDER)) == 1


async def test_audit_compares_with_the_engine_that_scored(store: Store) -> None:
    session_id, _ = await rescored(store, conversation())
    scorer = engine()
    targets = [SessionTarget(session_id)]
    report = await audit_store(store, scorer, AuditReference(scorer.info, None), targets, builder=RESCORED_BUILDER)
    assert (report.grades, report.all.tokens) == ({"approximate": 1}, 10)
    other = engine(model="another")
    with pytest.raises(UsageError, match="scripted-model"):
        await audit_store(store, other, AuditReference(other.info, None), targets, builder=RESCORED_BUILDER)


CALL: Json = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("reason", "record"),
    [
        ("images", answered("a", 0.0, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "x")),
        ("constrained", answered("a", 0.0, [HI], "x", sampling={"constrained": True})),
        ("unreadable", answered("a", 0.0, [{"role": "nobody"}], "x")),
        ("raw_prompt", answered("a", 0.0, ["hi"], "x", dialect="openai_completions")),  # type: ignore[list-item]
        ("empty", answered("a", 0.0, [HI], "")),
        ("cut_call", answered("a", 0.0, [HI], None, finish="length", message={"tool_calls": [CALL]})),
        ("client_gone", replace(answered("a", 0.0, [HI], "x"), status="client_gone")),
        ("answer_not_kept", answered("a", 0.0, [HI], "x", message={"reasoning_content": "dropped by the template"})),
    ],
)
async def test_unclean_answer_is_left_out(reason: str, record: CallRecord) -> None:
    with pytest.raises(UnusableAnswerError, match=f"^{reason}$"):
        await encode_answers(record, EngineThatDropsReasoning())


class EngineThatDropsReasoning(ScriptedEngine):
    """An engine whose chat template drops the reasoning of earlier answers."""

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        messages = tuple(replace(message, reasoning=None) for message in request.messages)
        return await super().render(replace(request, messages=messages), generation=generation)


class InconsistentEngine(ScriptedEngine):
    """An engine that renders an answered conversation differently from the unanswered one."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        ids = await super().render(request, generation=generation)
        if self._fault == "template_refuses":
            raise RequestError("no")
        if generation:
            return ids
        return ids[:-1] if self._fault == "no_end_of_turn" else [9, *ids]


@pytest.mark.parametrize("fault", ["prompt_not_kept", "no_end_of_turn", "template_refuses"])
async def test_inconsistent_template_is_left_out(fault: str) -> None:
    with pytest.raises(UnusableAnswerError, match=f"^{fault}$"):
        await encode_answers(answered("a", 0.0, [HI], "x"), InconsistentEngine(fault))


async def test_cut_answer_has_no_end_of_turn() -> None:
    ((_, prompt, answer),) = await encode_answers(answered("a", 0.0, [HI], "hel", finish="length"), engine())
    assert answer.tolist() == tokens("hel")
    assert decode(prompt.tolist()) == "user:hiassistant:"


async def test_encodes_tool_calls_and_several_answers() -> None:
    record = answered("a", 0.0, [HI], "so", message={"tool_calls": [CALL]})
    other = replace(record.choices[0], index=1, message=Message("assistant", "else"))
    encoded = await encode_answers(replace(record, choices=(record.choices[0], other)), engine())
    assert [decode(answer.tolist()) for _, _, answer in encoded] == [
        'so<tool_call>{"name": "bash", "arguments": {}}</tool_call>',
        "else",
    ]
    assert all(answer[-1] == END for _, _, answer in encoded)


def test_requires_an_engine_that_can_score() -> None:
    with pytest.raises(UsageError, match="log-prob"):
        Scorer(engine(capabilities=INFO.capabilities - {"score"}))
    with pytest.raises(UsageError, match="end-of-turn"):
        require_end_of_turn(engine(eos_token_ids=()))


async def test_store_returns_rescores_unchanged(store: Store) -> None:
    session_id = await commit(store, conversation())
    rng = np.random.default_rng(1)
    rows = [
        Rescore(
            name,
            0,
            INFO,
            "3",
            rng.integers(0, 300, size).astype(np.int32),
            rng.integers(0, 300, 7).astype(np.int32),
            -rng.random(7).astype(np.float32),
        )
        for name, size in (("one", 400), ("two", 0))
    ]
    await store.rescores.put(session_id, rows)
    for kept, one in zip(await store.rescores.of_session(session_id), rows, strict=True):
        assert (kept.call_id, kept.choice, kept.engine, kept.weight_version) == (one.call_id, 0, INFO, "3")
        for name in ("prompt_ids", "token_ids", "logprobs"):
            assert np.array_equal(getattr(kept, name), getattr(one, name))
    await store.rescores.put(session_id, [])
    assert await store.rescores.of_session(session_id) == []
