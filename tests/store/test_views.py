"""The views for people: readable columns, times as text, the same on both databases."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from polar_proxy.store import Store
from tests.factories import call_record, joined_trace, new_rollout, new_session, random_answer


async def _rows(store: Store, query: str) -> list[dict[str, Any]]:
    async with store.database.reading() as connection:
        return [dict(row._mapping) for row in await connection.execute(text(query))]


async def test_views(store: Store) -> None:
    session_id = await new_session(store, label="laptop")
    rollout_id = await new_rollout(store, session_id)
    call = call_record(session_id, choices=(random_answer(0, 5), random_answer(1, 9)))
    later = call_record(
        session_id, started_at=call.started_at + 10, first_token_at=None, status="client_gone", choices=()
    )
    for one in (later, call):
        await store.calls.commit(one)
    trace = joined_trace([call], rollout_id=rollout_id)
    await store.traces.put([trace], {}, "merged", session_id, rollout_id)
    await store.rollouts.update(rollout_id, status="running")
    await store.rewards.add(rollout_id, 1.0, "tests", {"passed": 3})

    (rollout,) = await _rows(store, "SELECT * FROM v_rollouts")
    assert rollout["rollout_id"] == rollout_id
    assert (rollout["family"], rollout["status"], rollout["reward"], rollout["calls"]) == (
        "swe-task",
        "running",
        1.0,
        2,
    )
    assert (bool(rollout["masked"]), rollout["attempt"]) == (False, 1)
    assert rollout["job_id"].startswith("job_")
    assert (rollout["traces"], rollout["trained_tokens"], rollout["completion_tokens"]) == (1, 5, 14)
    assert (rollout["seconds"], rollout["ended"]) == (None, None)
    assert rollout["created"].endswith("Z")

    first, second = await _rows(store, "SELECT * FROM v_calls ORDER BY started")
    assert (first["call_id"], first["rollout_id"], first["session_label"]) == (call.call_id, rollout_id, "laptop")
    assert (first["engine"], first["engine_version"], first["choices"]) == ("vllm", "0.27.0", 2)
    assert (first["started"], first["ended"]) == ("2023-11-14T22:13:20.125Z", "2023-11-14T22:13:21.987Z")
    assert (first["first_token_seconds"], first["messages"], first["finish_reason"]) == (0.25, 2, "stop")
    assert (second["first_token_seconds"], second["choices"], second["finish_reason"]) == (None, 0, None)

    turns = await _rows(store, "SELECT * FROM v_turns ORDER BY turn, choice_index")
    assert [(t["turn"], t["choice_index"], t["completion_tokens"]) for t in turns] == [
        *((1, 0, 5), (1, 1, 9), (2, None, None))
    ]
    assert round(turns[0]["tokens_per_second"], 3) == round(5 / (call.ended_at - (call.first_token_at or 0)), 3)

    (seen,) = await _rows(store, "SELECT * FROM v_traces")
    assert (seen["trace_id"], seen["rollout_id"], seen["calls"], seen["grade"]) == (
        trace.trace_id,
        rollout_id,
        1,
        "exact",
    )
    assert (seen["length"], seen["trained_tokens"], seen["rollout_reward"], bool(seen["masked"])) == (12, 5, 1.0, False)
    (reward,) = await _rows(store, "SELECT * FROM v_rewards")
    assert (reward["rollout_id"], reward["source"], reward["value"]) == (rollout_id, "tests", 1.0)


async def test_stats(store: Store) -> None:
    await store.calls.commit(call_record(await new_session(store)))
    stats = await store.maintenance.stats()
    assert stats["rows"]["calls"] == 1
    assert stats["rows"]["completions"] == 1
    assert stats["bytes"] > 10_000
    assert stats["tokens"] == {"prompt_tokens": 7, "completion_tokens": 5, "stored_prompt_tokens": 7}
    assert stats["schema"] == await store.schema_revision()
