"""Every SQL query of docs/guide/data.md runs, and every view is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import text

from polar_proxy.store import Store
from tests.factories import call_record, joined_trace, new_rollout, new_session

_TEXT = (Path(__file__).parents[2] / "docs" / "guide" / "data.md").read_text()
_QUERIES = [
    query.strip() for block in re.findall(r"```sql\n(.*?)```", _TEXT, re.DOTALL) for query in block.split(";\n")
]


@pytest.mark.parametrize("query", [query for query in _QUERIES if query])
async def test_queries_run(store: Store, query: str) -> None:
    session_id = await new_session(store, origin="rollout")
    rollout_id = await new_rollout(store, session_id)
    call = call_record(session_id)
    await store.calls.commit(call)
    await store.traces.put([joined_trace([call], rollout_id=rollout_id)], {}, "merged", session_id, rollout_id)
    await store.rewards.add(rollout_id, 1.0, "tests", {})
    query = query.replace("roll_...", rollout_id)
    if store.database.dialect == "postgresql":
        query = query.replace("json_extract(sampling, '$.temperature')", "sampling ->> 'temperature'")
    async with store.database.reading() as connection:
        result = await connection.execute(text(query))
        rows = result.all()
    nothing = ("HAVING MIN", "status <> 'ok'", "status = 'done'", "WHERE s.call_id IS NULL", "base_call_id IS NOT NULL")
    assert bool(rows) is not any(mark in query for mark in nothing)


def test_views_are_named() -> None:
    views = {"v_rollouts", "v_calls", "v_turns", "v_traces", "v_rewards"}
    assert {name for name in views if f"`{name}`" not in _TEXT} == set()


def test_page_has_queries() -> None:
    assert len(_QUERIES) >= 10
