"""Rates, active sessions and failures of the last minutes, on each database."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.records import recent_activity
from polar_proxy.store import Store, open_store
from polar_proxy.types import id_at, new_id
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


@pytest.mark.parametrize("repository", ["rates", "sessions", "failures"])
async def test_the_newest_calls_are_found_by_their_ids(tmp_path: Path, repository: str) -> None:
    """Otherwise a reading of a million calls takes seconds."""
    async with open_store(f"sqlite:///{tmp_path}/polar.db") as store:
        plans: list[str] = []
        with patch.object(AsyncConnection, "execute", explaining(plans)):
            await getattr(store.activity, repository)(*(() if repository == "failures" else (60.0,)))
    assert any("SEARCH calls USING INDEX sqlite_autoindex_calls_1 (call_id>?)" in plan for plan in plans)
    assert not any("SCAN calls" in plan for plan in plans)


def explaining(plans: list[str]) -> Callable[..., Any]:
    """Return an `execute` that adds SQLite's plan of each query to `plans`."""
    execute = AsyncConnection.execute

    async def explain(self: AsyncConnection, query: Any, parameters: Any = None) -> Any:
        compiled = query.compile(dialect=self.dialect, compile_kwargs={"render_postcompile": True})
        values = {**compiled.params, **(parameters or {})}
        text_of_query = "EXPLAIN QUERY PLAN " + str(compiled)
        rows = await self.exec_driver_sql(text_of_query, tuple(values[name] for name in compiled.positiontup or ()))
        plans.extend(str(row[3]) for row in rows)
        return await execute(self, query, parameters)

    return explain
