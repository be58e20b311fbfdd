"""`commit` returns after the transaction: alone, concurrently, beside a bad record, when killed or cancelled."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polar_proxy.errors import StoreError
from polar_proxy.store import Store, open_store
from tests.factories import assert_same, call_record, new_session, random_answer

pytestmark = pytest.mark.slow


async def test_concurrent_commits(store: Store, url: str) -> None:
    sessions = [await new_session(store) for _ in range(3)]
    calls = [call_record(sessions[n % 3], messages=(b"%d" % n,), started_at=float(n)) for n in range(200)]
    await asyncio.gather(*(store.calls.commit(call) for call in calls))
    async with open_store(url, create=False) as reader:
        for number, session_id in enumerate(sessions):
            assert_same(await reader.calls.of_session(session_id), calls[number::3])
    summary = await store.sessions.summary(sessions[0])
    assert summary is not None
    assert (summary.calls, summary.failed_calls, summary.prompt_tokens) == (67, 0, 67 * 7)
    assert (summary.completion_tokens, summary.last_call_at) == (67 * 5, calls[0].ended_at)


async def test_one_bad_record_fails_alone(store: Store) -> None:
    session_id = await new_session(store)
    good = [call_record(session_id, messages=(b"%d" % n,)) for n in range(5)]
    bad = [
        call_record("sess_unknown"),
        replace(good[0], messages=(b"the same id again",)),
        call_record(session_id, prompt_ids=np.zeros(3, dtype=np.int64)),
        call_record(session_id, choices=(replace(random_answer(), logprobs=np.zeros(4, dtype=np.float32)),)),
        call_record(session_id, params={"not": object()}),
        call_record(session_id, http_status=2**70),
    ]
    mixed = [good[0], bad[0], good[1], bad[1], bad[2], good[2], bad[3], good[3], bad[4], good[4], bad[5]]
    results = await asyncio.gather(*(store.calls.commit(call) for call in mixed), return_exceptions=True)
    for call, result in zip(mixed, results, strict=True):
        if any(call is other for other in bad):
            assert isinstance(result, StoreError)
        else:
            assert result is None
    assert {call.call_id for call in await store.calls.of_session(session_id)} == {call.call_id for call in good}
    summary = await store.sessions.summary(session_id)
    assert summary is not None
    assert summary.calls == 5
    await store.calls.commit(call_record(session_id))  # the writer still works


async def test_errors_do_not_show_the_conversation(store: Store) -> None:
    with pytest.raises(StoreError) as caught:
        await store.calls.commit(call_record("sess_unknown", messages=(b"very secret",)))
    assert "secret" not in str(caught.value)


async def test_rows_deleted_by_another_process_are_stored_again(store: Store) -> None:
    session_id = await new_session(store)
    first = call_record(session_id)
    await store.calls.commit(first)
    async with store.database.writing() as connection:
        for table in ("completions", "calls"):
            await connection.exec_driver_sql(f"DELETE FROM {table}")
        await connection.exec_driver_sql("UPDATE nodes SET parent_id = NULL")
        await connection.exec_driver_sql("DELETE FROM nodes")
    again = call_record(session_id)
    await store.calls.commit(again)
    assert_same(await store.calls.of_session(session_id), [again])


async def test_call_of_a_cancelled_caller_is_stored(url: str) -> None:
    async with open_store(url) as store:
        call = call_record(await new_session(store))
        task = asyncio.ensure_future(store.calls.commit(call))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with open_store(url, create=False) as reader:
        assert_same(await reader.calls.get(call.call_id), call)


async def test_closing_writes_waiting_calls_and_refuses_more(url: str) -> None:
    async with open_store(url) as store:
        calls = [call_record(await new_session(store)) for _ in range(10)]
        tasks = [asyncio.ensure_future(store.calls.commit(call)) for call in calls]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    with pytest.raises(StoreError, match="closed"):
        await store.calls.commit(call_record("any"))


_WRITER = """
import asyncio, sys
from polar_proxy.store import open_store
from tests.factories import call_record, new_session

async def main():
    async with open_store(sys.argv[1]) as store:
        session_id = await new_session(store)
        print(session_id, flush=True)
        async def client():
            while True:
                call = call_record(session_id)
                await store.calls.commit(call)
                print(call.call_id, flush=True)
        await asyncio.gather(*(client() for _ in range(4)))

asyncio.run(main())
"""


async def test_sigkill_loses_no_confirmed_call(url: str) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", _WRITER, url], stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    session_id = process.stdout.readline().strip()
    confirmed = [process.stdout.readline().strip() for _ in range(100)]
    process.send_signal(signal.SIGKILL)
    confirmed += [line.strip() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    async with open_store(url) as store:
        rows = await store.calls.summaries(session_id)
        assert set(confirmed) <= {row.call_id for row in rows}
        assert len(await store.calls.of_session(session_id)) == len(rows)
        (summary,) = await store.sessions.recent()
        assert summary.calls == len(rows)


async def test_concurrent_readers_and_writers(store: Store, url: str) -> None:
    session_id = await new_session(store)
    done = asyncio.Event()
    seen: list[int] = []

    async def read() -> None:
        async with open_store(url, create=False) as reader:
            while not done.is_set():
                calls = await reader.calls.of_session(session_id)
                assert all(len(call.choices) == 1 for call in calls)
                seen.append(len(calls))

    async def write() -> None:
        async with open_store(url) as other:
            for _ in range(25):
                await asyncio.gather(
                    store.calls.commit(call_record(session_id)), other.calls.commit(call_record(session_id))
                )
        done.set()

    await asyncio.gather(read(), write())
    assert seen == sorted(seen)
    assert len(await store.calls.summaries(session_id)) == 50
