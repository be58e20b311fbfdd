"""chat-jsonl and preference-jsonl of conversations that were recorded as text."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from polar_proxy.export.exporter import export
from polar_proxy.export.preferences import PreferencePairs
from polar_proxy.export.text_conversations import text_conversations
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, Choice, Json, Message, Usage, new_id
from tests.factories import call


def hosted_call(
    session_id: str, texts: list[str], answer: str, *, base: CallRecord | None = None, **changes: Any
) -> CallRecord:
    """Return a call whose request has `texts`, of the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = tuple(orjson.dumps({"role": roles[number % 2], "content": text}) for number, text in enumerate(texts))
    choice = Choice(0, Message("assistant", answer), "stop", np.empty(0, np.int32), np.empty(0, np.float32))
    made = call("x", float(len(texts)), [1], [2])
    return replace(
        made,
        **{
            "call_id": new_id("call"),
            "session_id": session_id,
            "status": "no_tokens",
            "messages": messages,
            "prompt_ids": None,
            "choices": (choice,),
            "usage": Usage(10, 5, model="gpt-4.1"),
            "price_usd": 0.25,
            "base_call_id": None if base is None else base.call_id,
            **changes,
        },
    )


def branching(session_id: str) -> list[CallRecord]:
    """Return two turns, a retried second turn, another conversation, a title and a failed call."""
    first = hosted_call(session_id, ["hi"], "one")
    second = hosted_call(session_id, ["hi", "one", "and?"], "two", base=first)
    retried = hosted_call(
        session_id, ["hi", "one", "and?"], "again", base=first, edge="retries", parent_call_id=second.call_id
    )
    other = hosted_call(session_id, ["other"], "three", price_usd=None)
    title = hosted_call(session_id, ["title?"], "T", edge="side_call")
    failed = hosted_call(session_id, ["broken"], "", status="upstream_error", choices=())
    return [first, second, retried, other, title, failed]


def test_conversations_end_where_no_call_continues() -> None:
    calls = branching("s")
    first, _, retried, other, _, failed = calls
    excluded = {one.call_id: "no_tokens" for one in calls} | {failed.call_id: "upstream_error"}
    found = text_conversations(calls, excluded)
    assert [conversation.calls for conversation in found] == [(first, retried), (other,)]
    assert text_conversations(calls, {one.call_id: "incomplete" for one in calls}) == []


async def test_chat_jsonl_takes_hosted_conversations(store: Store) -> None:
    row = await store.sessions.create(key_hash=None, label=None, origin="open")
    for one in branching(row.session_id):
        await store.calls.commit(one)
    lines: list[bytes] = []
    report = await export(store, "chat-jsonl", lines.append)
    second, first = map(orjson.loads, lines)  # ordered by the start of their last calls
    assert [message["content"] for message in first["messages"]] == ["hi", "one", "and?", "again"]
    assert [message["content"] for message in second["messages"]] == ["other", "three"]
    assert (first["trace_id"], first["grade"], first["price_usd"], second["price_usd"]) == (None, None, 0.5, None)
    assert (report.rows, dict(report.left_out)) == (2, {"no_tokens": 2, "upstream_error": 1})
    assert (await export(store, "tokens-jsonl", lines.append)).rows == 0


def chat_row(group: str | None, reward: float | None, *texts: str, **more: Any) -> Json:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"schema": 1, "group_id": group, "task_id": "t", "rollout_id": texts[-1], "reward": reward} | {
        "messages": messages,
        **more,
    }


def test_preference_pairs_are_the_best_and_the_worst_of_a_group() -> None:
    pairs = PreferencePairs()
    for row in (
        chat_row("a", 0.5, "q", "middle"),
        chat_row("a", 0.0, "q", "bad", "more", "worse"),
        chat_row("b", 1.0, "q", "same"),
        chat_row("b", 1.0, "q", "as good"),
        chat_row(None, 1.0, "q", "no group"),
        chat_row("c", None, "q", "no reward"),
        chat_row("c", 1.0, "q", "masked", masked=True),
    ):
        assert pairs.add([row]) == []
    tools = [{"type": "function", "function": {"name": "w"}}]
    assert pairs.add([chat_row("a", 1.0, "q", "good", tools=tools), chat_row("a", 1.0, "q")]) == []
    (pair,) = pairs.pairs()
    assert pair["prompt"] == [{"role": "user", "content": "q"}]
    assert pair["chosen"] == [{"role": "assistant", "content": "good"}]
    assert [message["content"] for message in pair["rejected"]] == ["bad", "more", "worse"]
    assert (pair["chosen_reward"], pair["rejected_reward"], pair["tools"]) == (1.0, 0.0, tools)
    assert dict(pairs.left_out) == {"no_group": 1, "no_reward": 1, "masked": 1, "no_spread": 1}
    pairs.close()


def test_preference_pairs_of_many_groups_take_little_memory() -> None:
    tracemalloc.start()
    try:
        with closing(PreferencePairs()) as pairs:
            for number in range(100):
                pairs.add([chat_row(str(number), 0.0, "q", f"{number} " * 100_000)])
                pairs.add([chat_row(str(number), 1.0, "q", "good")])
            rejected = [pair["rejected"][0]["content"][:3] for pair in pairs.pairs()]
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert (len(rejected), rejected[7], rejected[99]) == (100, "7 7", "99 ")


async def test_preferences_need_groups(store: Store) -> None:
    row = await store.sessions.create(key_hash=None, label=None, origin="open")
    await store.calls.commit(hosted_call(row.session_id, ["hi"], "one"))
    report = await export(store, "preference-jsonl", lambda line: None)
    assert (report.rows, dict(report.left_out)) == (0, {"no_group": 1})
    assert report.reasons
