"""Calls are read back as they were committed, and shared content is stored once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_proxy.store import Store, open_store
from polar_proxy.types import Message
from tests.factories import END, INFO, assert_same, call_record, new_session, random_answer, token_ids

pytestmark = pytest.mark.slow

_variants: dict[str, dict[str, Any]] = {
    "plain": {},
    "two choices": {"choices": (random_answer(0), random_answer(1, tokens=300, seed=1))},
    "no ids from the engine": {"prompt_ids": None, "choices": (random_answer(tokens=0),), "logprob_mode": "processed"},
    "failed": {
        "status": "upstream_error",
        "http_status": 502,
        "error": "no “route” to host",
        "choices": (),
        "engine": None,
        "first_token_at": None,
        "prompt_ids": None,
        "cached_tokens": None,
    },
    "empty": {"messages": (), "tools": None, "params": {}, "sampling": {}, "prompt_ids": token_ids(), "choices": ()},
    "empty parts": {"messages": (b"", b""), "tools": b""},
    "odd bytes": {"messages": (b"\x00\xff not json",), "tools": b"\x00"},
    "odd json": {"params": {"nul": "a\x00b", "lone": "\ud800", "big": 2**63, "key order": {"b": 1, "a": 2}}},
    "odd answer": {
        "choices": (replace(random_answer(), message=Message("assistant", "\x00 \ud83d"), finish_reason=None),)
    },
    "continued": {"edge": "continues", "parent_call_id": "call_not_there_yet", "weight_version": None},
    "special floats": {
        "choices": (replace(random_answer(), logprobs=np.array([-0.0, 0, -np.inf, np.nan, -1e-45], dtype=np.float32)),)
    },
    "deleted": {"deleted_at": 1_700_000_002.5},
    "reasoning": {"choices": (replace(random_answer(), reasoning_tokens=3),)},
    "other engine": {"engine": replace(INFO, eos_token_ids=(), capabilities=frozenset(), template_hash=None)},
}


@pytest.mark.parametrize("variant", _variants)
async def test_round_trip(store: Store, variant: str) -> None:
    call = call_record(await new_session(store), **_variants[variant])
    await store.calls.commit(call)
    found = await store.calls.get(call.call_id)
    assert_same(found, call)
    assert_same(await store.calls.of_session(call.session_id), [call])


@pytest.mark.parametrize("variant", _variants)
async def test_without_text_everything_else_is_read(store: Store, variant: str) -> None:
    call = call_record(await new_session(store), **_variants[variant])
    await store.calls.commit(call)
    choices = tuple(replace(choice, message=Message("assistant")) for choice in call.choices)
    expected = replace(call, messages=(), tools=None, fingerprint=None, choices=choices)
    assert_same(await store.calls.of_session(call.session_id, text=False), [expected])


async def test_several_calls_are_read_together_and_what_they_share_counts_once(store: Store) -> None:
    session_id = await new_session(store)
    first = call_record(session_id, messages=(b"a" * 100,))
    second = call_record(session_id, messages=(b"a" * 100, b"b" * 50), started_at=first.started_at + 1)
    for call in (first, second):
        await store.calls.commit(call)
    ids = [second.call_id, first.call_id, "call_unknown"]
    assert_same(await store.calls.get_many(session_id, ids), [first, second])
    assert await store.calls.message_bytes(session_id, ids) == 150
    assert await store.calls.message_bytes(session_id, ["call_unknown"]) == 0
    assert await store.calls.message_bytes("sess_other", ids) == 0
    assert await store.calls.get_many("sess_other", ids) == []


async def test_deleting_a_response_marks_its_call_once(store: Store) -> None:
    call = call_record(await new_session(store))
    await store.calls.commit(call)
    await store.calls.mark_deleted(call.call_id)
    marked = await store.calls.get(call.call_id)
    assert marked is not None
    assert marked.deleted_at is not None
    assert_same(replace(marked, deleted_at=None), call)
    await store.calls.mark_deleted(call.call_id)
    assert_same(await store.calls.get(call.call_id), marked)


async def test_calls_are_found_by_the_ids_of_their_provider(store: Store) -> None:
    """Ids that are equal once the database accepts them, or too long for an index, fail no commit."""
    session, other = await new_session(store), await new_session(store)
    ids = {"fc_a": "fc_0", "odd\0": "fc_1", "odd\ufffd": "fc_2", "é" * 600: "msg_0"}
    first, second, foreign = [
        call_record(session_id, response_id="resp_1", response_items=ids) for session_id in (session, session, other)
    ]
    for record in (first, second, foreign):
        await store.calls.commit(record)
    assert await store.calls.find_response(session, "resp_1") == second.call_id
    assert await store.calls.find_response(session, "fc_a") is None
    found = await store.calls.find_items(session, [*ids, "resp_1", "unknown"])
    odd = (second.call_id, "fc_2")
    assert found == {"fc_a": (second.call_id, "fc_0"), "odd\0": odd, "odd\ufffd": odd}
    assert await store.calls.find_items(other, ["fc_a"]) == {"fc_a": (foreign.call_id, "fc_0")}


async def test_unknown_ids_are_none_or_empty(store: Store) -> None:
    assert await store.calls.get("call_unknown") is None
    assert await store.calls.of_session("sess_unknown") == []
    assert await store.calls.summaries("sess_unknown") == []


async def test_calls_are_ordered_by_start(store: Store) -> None:
    session_id = await new_session(store)
    late, early = call_record(session_id, started_at=20.0), call_record(session_id, started_at=10.0)
    await store.calls.commit(late)
    await store.calls.commit(early)
    assert [call.call_id for call in await store.calls.of_session(session_id)] == [early.call_id, late.call_id]
    assert [row.call_id for row in await store.calls.summaries(session_id)] == [early.call_id, late.call_id]


async def test_summaries(store: Store) -> None:
    session_id = await new_session(store)
    call = call_record(session_id, choices=(random_answer(0, 5), random_answer(1, 6)))
    await store.calls.commit(call)
    (row,) = await store.calls.summaries(session_id)
    assert (row.choices, row.finish_reason, row.message_count) == (2, "stop", 2)
    assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens) == (7, 11, 3)
    assert (row.started_at, row.ended_at, row.stream) == (call.started_at, call.ended_at, True)


def _turns(session_id: str, count: int, tokens: int = 100) -> list[Any]:
    """Return the calls of a growing conversation: every prompt starts with the previous one."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(100, 150_000, 2000).astype(np.int32)
    prompt[-1] = END
    messages = [rng.bytes(2000).hex().encode()]
    calls = []
    for number in range(count):
        generation = token_ids(11, 12, 13)
        calls.append(
            call_record(
                session_id,
                prompt_ids=np.concatenate([prompt, generation]),
                messages=tuple(messages),
                started_at=float(number),
                choices=(random_answer(0, tokens, seed=number),),
            )
        )
        added = rng.integers(100, 150_000, tokens).astype(np.int32)
        added[-1] = END
        prompt = np.concatenate([prompt, generation, added])
        messages.append(rng.bytes(100).hex().encode())
    return calls


async def test_growing_conversation_is_stored_in_linear_space(store: Store) -> None:
    session_id = await new_session(store)
    calls = _turns(session_id, 30)
    for call in calls:
        await store.calls.commit(call)
    stats = await store.maintenance.stats()
    seen = sum(call.prompt_ids.size for call in calls)
    assert stats["tokens"]["prompt_tokens"] == seen
    assert stats["tokens"]["stored_prompt_tokens"] <= calls[-1].prompt_ids.size + 3 * 30
    assert stats["rows"]["nodes"] <= 2 + 30 + 30 + 30 + 1  # system prompt, turns, generation prompts, messages, tools
    assert stats["rows"]["settings"] == 2
    assert_same(await store.calls.of_session(session_id), calls)


async def test_sessions_share_nodes(store: Store) -> None:
    for call in _turns(await new_session(store), 3):
        await store.calls.commit(call)
    before = (await store.maintenance.stats())["rows"]
    for call in _turns(await new_session(store), 3):
        await store.calls.commit(call)
    after = (await store.maintenance.stats())["rows"]
    assert (after["nodes"], after["calls"]) == (before["nodes"], 2 * before["calls"])


async def test_processes_share_nodes(store: Store, url: str) -> None:
    calls = _turns(await new_session(store), 3)
    await store.calls.commit(calls[0])
    async with open_store(url) as other:
        await other.calls.commit(calls[1])
    await store.calls.commit(calls[2])
    assert_same(await store.calls.of_session(calls[0].session_id), calls)


_text = st.text(alphabet="aé世\U0001f600\x00\u2028 ", max_size=12) | st.sampled_from(["system " * 40, "a file\n" * 200])
_steps = st.lists(
    st.tuples(
        st.integers(0, 50),  # the earlier call that it continues (modulo their number), or a new root
        st.booleans(),  # whether its prompt starts with that call's prompt and answer
        _text,
        st.lists(st.integers(0, 40), max_size=3),  # tokens of each choice
        st.integers(0, 90),  # new tokens of the prompt
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=_steps, wide=st.booleans(), seed=st.integers(0, 1000))
async def test_random_conversations_round_trip(
    steps: list[tuple[int, bool, str, list[int], int]], wide: bool, seed: int, tmp_path: Path
) -> None:
    """Two gateways write branches, siblings, common prefixes, several answers, unicode and empty prompts; the calls
    are read one by one and together, and verified.
    """
    rng = np.random.default_rng(seed)
    top = 150_000 if wide else 300

    def tokens(count: int) -> Any:
        found = rng.integers(0, top, count).astype(np.int32)
        found[rng.random(count) < 0.1] = END
        return found

    async with open_store(str(tmp_path / f"{rng.bytes(6).hex()}.db")) as store, open_store(store.database.url) as other:
        session_id = await new_session(store)
        calls: list[Any] = []
        for number, (at, exact, said, sizes, new) in enumerate(steps):
            base = calls[at % (len(calls) + 1)] if at % (len(calls) + 1) < len(calls) else None
            messages = () if base is None else base.messages
            prompt = token_ids() if base is None or base.prompt_ids is None else base.prompt_ids
            if base is not None and exact and base.choices:
                prompt = np.concatenate([prompt, base.choices[-1].token_ids])
            choices = tuple(
                replace(
                    random_answer(index, 0),
                    message=Message("assistant", said * 2),
                    token_ids=tokens(size),
                    logprobs=(-rng.exponential(1, size)).astype(np.float32),
                )
                for index, size in enumerate(sizes)
            )
            call = call_record(
                session_id,
                messages=(*messages, said.encode(), b"") if new % 2 else (*messages, said.encode()),
                prompt_ids=np.concatenate([prompt, tokens(new)]) if new % 7 else (None if new else prompt),
                choices=choices,
                started_at=float(number),
                parent_call_id=None if base is None else base.call_id,
            )
            calls.append(call)
            await (other if number % 3 == 2 else store).calls.commit(call)
        assert_same(await other.calls.of_session(session_id), calls)
        assert_same([await store.calls.get(call.call_id) for call in calls], calls)
        assert await store.maintenance.verify() == []
