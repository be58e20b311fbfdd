"""Verify, prune and vacuum: faults are reported, needed rows stay, and gateways keep writing."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from polar_proxy.store import Store, open_store, schema
from polar_proxy.store.encoding.cells import CellCodec
from polar_proxy.store.sqlite_file import RollbackOnClose
from polar_proxy.types import CallRecord
from tests.factories import (
    END,
    assert_same,
    call_record,
    joined_trace,
    new_rollout,
    new_session,
    random_answer,
    token_ids,
)

pytestmark = pytest.mark.slow


def _turn(session_id: str, number: int, **changes: Any) -> CallRecord:
    """Return a call that shares the beginning of its conversation and prompt with the other calls."""
    shared = [(7 * n) % 5000 + 10 for n in range(60)]
    own = [(11 * n + number) % 5000 + 10 for n in range(40)]
    return call_record(
        session_id,
        messages=(b'{"role":"system"}', b'{"role":"user","content":"%d"}' % number),
        prompt_ids=token_ids(*shared, END, *own, END, 1, 2, 3),
        params={"number": number},
        started_at=float(number),
        **changes,
    )


async def _finished(store: Store, number: int = 0) -> tuple[str, str, CallRecord]:
    session_id = await new_session(store, origin="rollout")
    rollout_id = await new_rollout(store, session_id)
    call = _turn(session_id, number)
    await store.calls.commit(call)
    await store.traces.put([joined_trace([call], rollout_id=rollout_id)], {}, "merged", session_id, rollout_id)
    await store.rewards.add(rollout_id, 1.0, "tests", {})
    await store.artifacts.add(rollout_id, "patch.diff", b"patch %d" % number)
    await store.artifacts.add(rollout_id, "same.diff", b"the same for all")
    await store.rollouts.update(rollout_id, status="running")
    await store.rollouts.update(rollout_id, status="done")
    await store.groups.settle(await store.rollouts.group_id(rollout_id))
    return rollout_id, session_id, call


async def _rows(store: Store) -> dict[str, int]:
    return dict((await store.maintenance.stats())["rows"])


async def _problems(store: Store) -> list[str]:
    return [f"{fault.what}: {fault.problem}" for fault in await store.maintenance.verify()]


async def test_verify_finds_no_fault_in_a_sound_database(store: Store) -> None:
    for number in range(3):
        await _finished(store, number)
    session_id = await new_session(store)
    await store.calls.commit(
        call_record(session_id, messages=(b"", b""), tools=b"", prompt_ids=token_ids(), choices=())
    )
    await store.calls.commit(call_record(session_id, prompt_ids=None, choices=(random_answer(tokens=0),)))
    reported: list[str] = []
    assert await store.maintenance.verify(lambda what, done, total: reported.append(f"{what} {done}/{total}")) == []
    assert "calls 5/5" in reported


async def test_verify_sees_one_snapshot(store: Store, url: str) -> None:
    """Calls that a gateway commits and a prune deletes during the check are no faults."""
    for number in range(3):
        await _finished(store, number)
    async with open_store(url) as other:
        tasks: list[asyncio.Task[Any]] = []

        async def disturb() -> None:
            session_id = await new_session(other)
            await other.calls.commit(_turn(session_id, 9))
            await other.maintenance.prune(time.time() + 1)
            await other.maintenance.vacuum()

        def progress(what: str, done: int, total: int) -> None:
            if not tasks:
                tasks.append(asyncio.create_task(disturb()))

        check = asyncio.create_task(store.maintenance.verify(progress))
        while not tasks and not check.done():
            await asyncio.sleep(0)
        assert [fault for fault in await check if not fault.what.startswith("artifacts")] == []
        await asyncio.gather(*tasks)


async def test_verify_reports_every_kind_of_damage(store: Store) -> None:
    await _finished(store)
    n, codec = schema.nodes.c, CellCodec()
    changes: list[tuple[str, Any]] = [
        (r"nodes .*its content", update(schema.nodes).where(n.kind == "tools").values(data=codec.pack_bytes(b"[]"))),
        (
            r"nodes .*states length 1",
            update(schema.nodes).where(n.kind == "message", n.parent_id.is_(None)).values(length=1),
        ),
        (r"calls .*cannot be|calls .*damaged", update(schema.completions).values(token_ids=b"\x01\x99no zstd frame")),
        (r"completions .*counts 99", update(schema.completions).values(tokens=99)),
        (r"calls .*prompt tokens", update(schema.calls).values(prompt_tokens=3)),
        (r"calls .*has 5 messages, but 2 are stored", update(schema.calls).values(message_count=5)),
        (r"settings .*content", update(schema.settings).values(value={"another": 1})),
        (r"engines .*content", update(schema.engines).values(info={"capabilities": [], "another": 1})),
        (r"sessions .*prompt_tokens", update(schema.sessions).values(prompt_tokens=1)),
        (r"sessions .*failed_calls", update(schema.sessions).values(failed_calls=1)),
        (r"traces .*its spans", update(schema.traces).values(length=1)),
        (r"artifacts .*content of .* has changed", update(schema.artifacts).values(bytes=1)),
        (r"artifacts .*cannot be read", update(schema.artifacts).values(sha256="0" * 64)),
    ]
    for pattern, statement in changes:
        async with store.database._writer.connect() as connection:
            await connection.execute(statement)
            await connection.commit()
        problems = await _problems(store)
        assert any(re.search(pattern, problem) for problem in problems), (pattern, problems)
        async with store.database.writing() as connection:
            for table in reversed(schema.metadata.sorted_tables):
                if table is not schema.nodes:
                    await connection.execute(delete(table))
            await connection.execute(update(schema.nodes).values(parent_id=None))
            await connection.execute(delete(schema.nodes))
        await _finished(store)
    assert await _problems(store) == []


async def test_prune_deletes_only_old_finished_rollouts(store: Store) -> None:
    old, old_session, _ = await _finished(store, 1)
    young, young_session, young_call = await _finished(store, 2)
    running = await new_rollout(store, await new_session(store, origin="rollout"))
    await store.rollouts.update(running, status="running")
    long_ago = time.time() - 40 * 86400
    async with store.database.writing() as connection:
        for rollout_id in (old, running):
            values = {"created_at": long_ago, "ended_at": long_ago if rollout_id == old else None}
            await connection.execute(
                update(schema.rollouts).where(schema.rollouts.c.rollout_id == rollout_id).values(**values)
            )
    files = {item.name: item.path for item in await store.artifacts.of_rollout(old)}
    for path in files.values():
        os.utime(path, (long_ago, long_ago))
    before = await _rows(store)
    would = await store.maintenance.prune(time.time() - 30 * 86400, dry_run=True)
    assert (would.rollouts, would.sessions, would.calls, would.files) == ([old], [old_session], 1, 1)
    assert await _rows(store) == before
    done = await store.maintenance.prune(time.time() - 30 * 86400)
    assert done == would
    assert not files["patch.diff"].exists()
    assert files["same.diff"].exists()  # the young rollout has the same artifact
    assert {row.rollout_id for row in await store.rollouts.find()} == {young, running}
    assert await store.sessions.get(old_session) is None
    assert_same(await store.calls.of_session(young_session), [young_call])
    after = await _rows(store)
    for table in ("rollouts", "calls", "completions", "traces", "rewards", "groups"):
        assert after[table] == before[table] - 1, table
    assert await _problems(store) == []
    assert (await store.maintenance.prune(time.time() - 30 * 86400)).rollouts == []


async def test_prune_by_condition(store: Store) -> None:
    kept, _, _ = await _finished(store, 1)
    await store.rewards.add(kept, 0.0, "tests", {})
    gone, _, _ = await _finished(store, 2)
    alone = await new_session(store)
    await store.calls.commit(call_record(alone, ended_at=1.0))
    assert (await store.maintenance.prune(time.time() + 1, where="reward>=1")).rollouts == [gone]
    assert [row.rollout_id for row in await store.rollouts.find()] == [kept]
    assert len(await store.calls.summaries(alone)) == 1


async def test_preview_and_export_of_more_rows_than_a_statement_has_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run and an export bound every id several times, and PostgreSQL accepts 32,767 values in a statement."""

    class FewValues(RollbackOnClose):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 70)

    monkeypatch.setattr("polar_proxy.store.database.RollbackOnClose", FewValues)
    async with open_store(str(tmp_path / "polar.db")) as store:
        rollouts = [(await _finished(store, number))[0] for number in range(30)]
        would = await store.maintenance.prune(time.time() + 1, where="harness=mini-swe-agent", dry_run=True)
        assert (sorted(would.rollouts), len(would.sessions), would.calls) == (rollouts, 30, 30)
        moved = await store.archive.export_archive(tmp_path / "all.polar", where="harness=mini-swe-agent")
        assert (moved.rows["rollouts"], moved.rows["calls"]) == (30, 30)


async def test_prune_keeps_the_key_of_an_open_session(store: Store) -> None:
    key = bytes(32)
    still_open = await new_session(store, key_hash=key)
    closed = await new_session(store)
    for session_id in (still_open, closed):
        await store.calls.commit(call_record(session_id, ended_at=1000.0))
    await store.sessions.close(closed)
    done = await store.maintenance.prune(time.time() - 60)
    assert set(done.sessions) == {still_open, closed}
    assert await store.sessions.get(closed) is None
    found = await store.sessions.by_key(key)
    assert found is not None
    call = call_record(found.session_id)
    await store.calls.commit(call)
    assert_same(await store.calls.of_session(still_open), [call])
    assert await _problems(store) == []


async def test_vacuum_deletes_unreferenced_rows(store: Store) -> None:
    old, _, _ = await _finished(store, 1)
    _, young_session, young_call = await _finished(store, 2)
    async with store.database.writing() as connection:
        await connection.execute(
            update(schema.rollouts).where(schema.rollouts.c.rollout_id == old).values(ended_at=1000.0)
        )
    assert (await store.maintenance.vacuum()).nodes == 0
    await store.maintenance.prune(2000.0)
    done = await store.maintenance.vacuum()
    assert (done.nodes, done.settings, done.engines) == (2, 1, 0)  # its last message and last segment, its parameters
    assert_same(await store.calls.of_session(young_session), [young_call])
    assert await _problems(store) == []
    async with store.database.reading() as connection:
        if store.database.dialect == "sqlite":
            names = "SELECT name FROM sqlite_master WHERE type = 'index'"
        else:
            names = "SELECT indexname FROM pg_indexes WHERE schemaname = 'public'"
        indices = {row[0] for row in await connection.exec_driver_sql(names)}
    assert not {name for name in indices if name.startswith("maintenance_")}


async def test_call_is_stored_whole_after_its_chain_was_vacuumed(store: Store, url: str, tmp_path: Path) -> None:
    """The gateway takes the nodes for stored; the database refuses the call, and the gateway inserts all of them."""
    first = await new_session(store)
    call = _turn(first, 1)
    await store.calls.commit(call)
    await store.sessions.close(first)
    async with open_store(url, artifacts=tmp_path / "other") as other:  # `polar db` in another process
        await other.maintenance.prune(time.time() + 1)
        done = await other.maintenance.vacuum()
        assert (done.nodes, done.settings, done.engines) == (5, 2, 1)
    second = await new_session(store)
    calls = [_turn(second, 1), _turn(second, 2)]
    await asyncio.gather(*(store.calls.commit(call) for call in calls))
    assert_same(await store.calls.of_session(second), calls)
    assert await _problems(store) == []


async def test_gateways_write_during_prune_and_vacuum(store: Store, url: str, tmp_path: Path) -> None:
    """The same conversations are recorded repeatedly while closed sessions are deleted."""
    stop = asyncio.Event()
    kept: list[CallRecord] = []

    async def gateway() -> None:
        async with open_store(url, artifacts=tmp_path / "gateway") as writer:
            for round_ in range(12):
                session_id = await new_session(writer)
                batch = [_turn(session_id, number, ended_at=time.time() + 1000) for number in range(5)]
                await asyncio.gather(*(writer.calls.commit(call) for call in batch))
                if round_ % 2:
                    kept.extend(batch)
                else:
                    await writer.sessions.close(session_id)
        stop.set()

    async def maintain() -> int:
        removed = 0
        async with open_store(url, artifacts=tmp_path / "upkeep") as other:
            while not stop.is_set():
                s = schema.sessions.c
                async with other.database.writing() as connection:  # makes closed sessions old at once
                    await connection.execute(
                        update(schema.sessions).where(s.closed_at.is_not(None)).values(last_call_at=1.0)
                    )
                await other.maintenance.prune(2.0)
                removed += (await other.maintenance.vacuum()).nodes
        return removed

    await asyncio.gather(gateway(), gateway(), maintain())
    await store.maintenance.prune(2.0)
    await store.maintenance.vacuum()
    by_session: dict[str, list[CallRecord]] = {}
    for call in kept:
        by_session.setdefault(call.session_id, []).append(call)
    for session_id, calls in by_session.items():
        assert_same(await store.calls.of_session(session_id), calls)
    assert await _problems(store) == []


async def test_vacuum_shrinks_the_file(tmp_path: Path) -> None:
    file = tmp_path / "polar.db"
    async with open_store(str(file)) as store:
        session_id = await new_session(store)
        for number in range(40):
            noise = os.urandom(20_000)
            await store.calls.commit(call_record(session_id, messages=(noise,), ended_at=1.0, started_at=float(number)))
        full = (await store.maintenance.stats())["bytes"]
        await store.sessions.close(session_id)
        await store.maintenance.prune(2.0)
        done = await store.maintenance.vacuum()
        assert done.bytes_after < full - 700_000
        assert done.free_bytes == 0
        async with store.database.reading() as connection:
            assert await connection.scalar(select(func.count()).select_from(schema.nodes)) == 0


@pytest.mark.parametrize("full", [False, True])
async def test_file_without_incremental_vacuum_shrinks_only_when_rewritten(tmp_path: Path, full: bool) -> None:
    file = tmp_path / "polar.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("DROP TABLE t")
    async with open_store(str(file)) as store:
        session_id = await new_session(store)
        for _ in range(20):
            await store.calls.commit(call_record(session_id, messages=(os.urandom(20_000),), ended_at=1.0))
        await store.sessions.close(session_id)
        await store.maintenance.prune(2.0)
        done = await store.maintenance.vacuum(full=full)
        assert (done.free_bytes == 0) is full
        assert (done.bytes_after < done.bytes_before) is full
