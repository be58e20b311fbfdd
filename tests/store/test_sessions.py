"""Sessions: one per key, stored by hash, listed with counters."""

from __future__ import annotations

import asyncio
import hashlib
from typing import get_args

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.types import ANSWERED, FAILED, CallStatus
from tests.factories import call_record, new_session

KEY = hashlib.sha256(b"sk-polar-1").digest()


async def test_found_by_key_and_by_id(store: Store) -> None:
    row = await store.sessions.create(
        key_hash=KEY, label="laptop", policy={"temperature": 1.0}, origin="key", rollout_id="roll_1"
    )
    assert (row.label, row.policy, row.origin, row.rollout_id) == ("laptop", {"temperature": 1.0}, "key", "roll_1")
    assert row.closed_at is None
    assert await store.sessions.by_key(KEY) == row
    assert await store.sessions.get(row.session_id) == row
    assert await store.sessions.by_key(bytes(32)) is None
    assert await store.sessions.get("sess_unknown") is None


async def test_two_first_calls_under_one_key_get_one_session(store: Store) -> None:
    rows = await asyncio.gather(*(store.sessions.create(key_hash=KEY, label=None, origin="open") for _ in range(5)))
    assert len({row.session_id for row in rows}) == 1
    assert len(await store.sessions.recent()) == 1


async def test_refuses_an_unhashed_key(store: Store) -> None:
    with pytest.raises(UsageError, match="SHA-256"):
        await store.sessions.create(key_hash=b"sk-polar-1", label=None, origin="key")


async def test_closing_twice_keeps_the_first_time(store: Store) -> None:
    session_id = await new_session(store)
    await store.sessions.close(session_id)
    first = await store.sessions.get(session_id)
    await store.sessions.close(session_id)
    assert first is not None
    assert first.closed_at is not None
    assert await store.sessions.get(session_id) == first


async def test_listing_in_pages_with_counters(store: Store) -> None:
    made = [await new_session(store) for _ in range(5)]
    await store.calls.commit(call_record(made[0]))
    await store.calls.commit(call_record(made[0], status="client_gone", started_at=1.0, ended_at=2.0))
    page = await store.sessions.recent(limit=3)
    assert [row.session_id for row in page] == made[:1:-1]
    page = await store.sessions.recent(limit=3, before=page[-1].session_id)
    assert [row.session_id for row in page] == made[1::-1]
    counted = page[-1]
    assert (counted.calls, counted.failed_calls, counted.prompt_tokens, counted.completion_tokens) == (2, 1, 14, 10)
    assert counted.last_call_at == call_record("").ended_at  # the latest end, whatever the order of the commits
    assert page[0].last_call_at is None
    assert await store.sessions.summary(made[0]) == counted


async def test_counts_as_failed_the_calls_without_a_complete_answer(store: Store) -> None:
    session_id = await new_session(store)
    for status in get_args(CallStatus):
        await store.calls.commit(call_record(session_id, status=status))
    counted = await store.sessions.summary(session_id)
    assert counted is not None
    assert (counted.calls, counted.failed_calls) == (len(get_args(CallStatus)), len(FAILED)) == (5, 2)
    assert frozenset(get_args(CallStatus)) - ANSWERED == FAILED
    assert await store.maintenance.verify() == []
