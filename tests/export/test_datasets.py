"""The three dataset formats, written from a real store and read again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from polar_proxy.export.datasets import DATASET_FORMATS
from polar_proxy.export.exporter import export
from polar_proxy.store import Store
from polar_proxy.types import Json, Message
from tests.export.recorded_runs import TOOLS, conversation, rollout, session_without_rollout


async def rows_of(store: Store, form: str, **options: Any) -> list[Json]:
    lines: list[bytes] = []
    report = await export(store, form, lines.append, **options)
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert report.rows == len(lines)
    return [orjson.loads(line) for line in lines]


async def check_against_store(store: Store, row: Json) -> None:
    """Assert that each token and log-probability of a row is that of the call that its spans name."""
    ids = row["prompt_ids"] + row["response_ids"]
    prompt = [0] * len(row["prompt_ids"])
    mask, logprobs = prompt + row["loss_mask"], [None for _ in prompt] + row["logprobs"]
    assert len(ids) == len(mask) == len(logprobs)
    position = 0
    for span in row["spans"]:
        call = await store.calls.get(span["call_id"])
        assert call is not None
        assert call.session_id == row["session_id"]
        here = slice(position, position + span["end"] - span["start"])
        position = here.stop
        if span["kind"] == "context":
            assert call.prompt_ids is not None
            assert ids[here] == call.prompt_ids[span["start"] : span["end"]].tolist()
            assert not any(mask[here])
            assert set(logprobs[here]) <= {None}
        else:
            assert call.prompt_ids is not None
            assert ids[: here.start] == call.prompt_ids.tolist()
            choice = call.choices[span["choice"]]
            assert ids[here] == choice.token_ids.tolist()
            assert set(mask[here]) == {1}
            np.testing.assert_array_equal(np.array(logprobs[here], dtype=np.float32), choice.logprobs)
    assert position == len(ids)


@pytest.mark.parametrize("builder", ["merged", "per_call"])
async def test_tokens_jsonl_equals_the_calls(store: Store, builder: str) -> None:
    rollout_id, calls = await rollout(store, reward=1.0)
    session_id, _ = await session_without_rollout(store, base=30)
    rows = await rows_of(store, "tokens-jsonl", builder=builder)
    assert [row.get("rollout_id") for row in rows] == [rollout_id] * (len(rows) // 2) + [None] * (len(rows) // 2)
    assert {row["session_id"] for row in rows} == {calls[0].session_id, session_id}
    assert {row["builder"] for row in rows} == {builder}
    for row in rows:
        await check_against_store(store, row)
    assert sum(sum(row["loss_mask"]) for row in rows) == 2 * (2 + 3 + 2)
    assert len(rows) == 2 * (2 if builder == "merged" else 3)


async def test_tokens_jsonl_by_hand(store: Store) -> None:
    rollout_id, (a, b, _, _) = await rollout(store, reward=1.0)
    row = (await rows_of(store, "tokens-jsonl"))[0]
    assert row["prompt_ids"] == [10, 1]
    assert row["response_ids"] == [11, 2, 3, 12, 2, 7]
    assert row["loss_mask"] == [1, 1, 0, 1, 1, 1]
    assert [value is None for value in row["logprobs"]] == [False, False, True, False, False, False]
    assert [(span["kind"], span["call_id"]) for span in row["spans"]] == [
        ("context", a.call_id),
        ("sampled", a.call_id),
        ("context", b.call_id),
        ("sampled", b.call_id),
    ]
    meta = {
        "rollout_id": rollout_id,
        "task_id": "task-1",
        "status": "done",
        "reward": 1.0,
        "seed": 11,
        "grade": "exact",
    }
    assert {name: row[name] for name in meta} == meta
    assert row["schema"] == 1


async def test_chat_jsonl(store: Store) -> None:
    _, (_, b, c, _) = await rollout(store, reward=0.0)
    joined, drifted = await rows_of(store, "chat-jsonl")
    assert joined["messages"] == [*map(orjson.loads, b.messages), b.choices[0].message.to_openai()]
    assert [message["role"] for message in joined["messages"]] == ["user", "assistant"] * 2
    assert drifted["messages"][-1] == c.choices[0].message.to_openai()
    assert joined["tools"] == TOOLS
    assert joined["reward"] == 0.0


async def test_jsonl(store: Store) -> None:
    rollout_id, calls = await rollout(store, reward=0.5)
    session_id, _ = await session_without_rollout(store)
    first, second = await rows_of(store, "jsonl")
    assert (first["rollout_id"], second["session_id"]) == (rollout_id, session_id)
    assert [call["call_id"] for call in first["calls"]] == [call.call_id for call in calls]
    assert first["calls"][3]["status"] == "client_gone"
    assert first["calls"][1]["completion_tokens"] == 3
    assert first["calls"][1]["choices"][0]["message"] == calls[1].choices[0].message.to_openai()
    assert first["traces"] == second["traces"] == 2
    assert first["excluded"] == {calls[3].call_id: "client_gone"}


@pytest.mark.parametrize("form", ["jsonl", "chat-jsonl"])
async def test_lone_surrogate_in_an_answer(store: Store, form: str) -> None:
    """A model can sample a lone surrogate. JSON has an escape for it, which Python's reader accepts."""
    row = await store.sessions.create(key_hash=None, label=None, origin="open")
    call = conversation(row.session_id)[0]
    message = Message("assistant", "\ud83d")
    await store.calls.commit(replace(call, choices=(replace(call.choices[0], message=message),)))
    lines: list[bytes] = []
    await export(store, form, lines.append)
    (line,) = lines
    row_read = json.loads(line)
    answer = row_read["messages"][-1] if form == "chat-jsonl" else row_read["calls"][0]["choices"][0]["message"]
    assert answer == message.to_openai()


async def test_empty_store_gives_no_rows(store: Store) -> None:
    for form in DATASET_FORMATS:
        assert await rows_of(store, form) == []
