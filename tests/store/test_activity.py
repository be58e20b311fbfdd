"""Rates, active sessions and failures of the last minutes, on each database."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from polar_proxy.records import recent_activity
from polar_proxy.store import Store, open_store
from polar_proxy.store.repositories.activity import id_at
from polar_proxy.types import new_id
from tests.factories import call_record, new_rollout, new_session


async def test_counts_only_what_ended_in_the_last_minute(store: Store) -> None:
    now = time.time()
    busy, idle = await new_session(store, label="busy"), await new_session(store, label="idle")
    for session, age in ((busy, 3), (busy, 50), (busy, 200), (idle, 1000)):
        await store.calls.commit(call_record(session, started_at=now - age - 1, ended_at=now - age))
    found = await recent_activity(store)
    assert (found.rates.calls, found.rates.prompt_tokens, found.rates.completion_tokens) == (2, 14, 10)
    assert [(one.session_id, one.calls) for one in found.sessions] == [(busy, 3)]
    assert (found.rollouts, found.failures) == ({}, [])


async def test_failed_calls_and_rollouts_are_listed_newest_first(store: Store) -> None:
    now = time.time()
    session = await new_session(store)
    failed = {"status": "upstream_error", "http_status": 502, "error": "x" * 1000, "choices": ()}
    call = call_record(session, started_at=now - 60, ended_at=now - 50, **failed)
    await store.calls.commit(call)
    rollout_id = await new_rollout(store, session)
    await store.rollouts.update(rollout_id, status="failed", error="broken")
    found = await recent_activity(store)
    assert [(one.record_id, one.what) for one in found.failures] == [
        (rollout_id, "failed"),
        (call.call_id, "upstream_error"),
    ]
    assert len(found.failures[1].error or "") == 300
    assert (found.rates.rollouts, found.rates.rollouts_not_done, found.rates.failed_calls) == (1, 1, 1)


async def test_rollouts_that_have_not_ended_are_counted_by_status(store: Store) -> None:
    await new_rollout(store)
    await new_rollout(store, await new_session(store))
    assert (await recent_activity(store)).rollouts == {"queued": 1, "preparing": 1}


def test_ids_of_a_time_sort_between_earlier_and_later_ids() -> None:
    before = new_id("call")
    now = id_at("call", time.time() + 0.001)
    time.sleep(0.002)
    assert before < now < new_id("call")


async def test_the_newest_calls_are_found_by_their_ids(tmp_path: Path) -> None:
    """Otherwise a reading of a million calls takes seconds."""
    statements: list[tuple[str, Any]] = []

    def keep(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "FROM calls" in statement:
            statements.append((statement, parameters))

    async with open_store(f"sqlite:///{tmp_path}/polar.db") as store:
        event.listen(Engine, "before_cursor_execute", keep)
        try:
            await recent_activity(store)
        finally:
            event.remove(Engine, "before_cursor_execute", keep)
    assert len(statements) == 3
    with sqlite3.connect(tmp_path / "polar.db") as connection:
        for statement, parameters in statements:
            plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
            assert "SEARCH calls USING INDEX sqlite_autoindex_calls_1 (call_id>?)" in plan, plan
