"""Every SQL query of the documentation runs, and docs/guide/data.md names every view."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import text

from polar_proxy.store import Store
from tests.docs.blocks import of_language
from tests.factories import call_record, joined_trace, new_rollout, new_session

_TEXT = (Path(__file__).parents[2] / "docs" / "guide" / "data.md").read_text()
_QUERIES = [query.strip() for block in of_language("sql") for query in block.text.split(";\n")]


@pytest.mark.parametrize("query", [query for query in _QUERIES if query])
async def test_queries_run(store: Store, query: str) -> None:
    session_id = await new_session(store, origin="rollout")
    rollout_id = await new_rollout(store, session_id)
    call = call_record(session_id)
    await store.calls.commit(call)
    await store.traces.put([joined_trace([call], rollout_id=rollout_id)], {}, "merged", session_id, rollout_id)
    await store.rewards.add(rollout_id, 1.0, "tests", {})
    await store.training.put_run("run_1", "first", {}, [{"kind": "eval", "step": 1, "at": 0.0, "reward": 0.5}])
    query = query.replace("roll_...", rollout_id)
    if store.database.dialect == "postgresql":
        query = re.sub(r"json_extract\((\w+), '\$\.(\w+)'\)", r"\1 ->> '\2'", query)
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
