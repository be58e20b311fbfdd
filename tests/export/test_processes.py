"""Exports in processes of their own: the same rows and errors as in this process, and no process that stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.export.exporter import ExportReport, export
from polar_proxy.export.processes import ExportProcesses
from polar_proxy.store import Store
from tests.factories import call_record, new_session

pytestmark = pytest.mark.slow


@pytest.fixture
async def exports(store: Store) -> AsyncIterator[ExportProcesses]:
    async with ExportProcesses(store.database.url) as processes:
        yield processes


def workers() -> list[int]:
    return [child.pid for child in psutil.Process().children() if "polar_proxy.export.worker" in child.cmdline()]


async def fill(store: Store, *, sessions: int = 2, length: int = 10) -> None:
    for _ in range(sessions):
        session_id = await new_session(store)
        message = b'{"role":"user","content":"' + b"x" * length + b'"}'
        await store.calls.commit(call_record(session_id, messages=(message,)))


async def rows(exports: ExportProcesses, form: str, report: ExportReport, **options: object) -> bytes:
    return b"".join([piece async for piece in exports.export(form, report, **options)])


async def test_rows_and_counts_are_those_of_an_export_in_this_process(store: Store, exports: ExportProcesses) -> None:
    await fill(store)
    for form in ("jsonl", "trl", "nemo-rl"):
        written: list[bytes] = []
        expected = await export(store, form, written.append)
        report = ExportReport()
        assert await rows(exports, form, report) == b"".join(written)
        assert report == expected


async def test_a_large_row_arrives_in_pieces(store: Store, exports: ExportProcesses) -> None:
    await fill(store, sessions=1, length=5_000_000)
    sizes = [len(piece) async for piece in exports.export("jsonl", ExportReport())]
    assert len(sizes) > 4
    assert sum(sizes) > 5_000_000
    assert max(sizes) <= 1 << 20


async def test_a_refused_export_raises_as_in_this_process_and_keeps_the_process(
    store: Store, exports: ExportProcesses
) -> None:
    with pytest.raises(UsageError, match="There is no session sess_0"):
        await rows(exports, "jsonl", ExportReport(), session_ids=["sess_0"])
    before = workers()
    await rows(exports, "jsonl", ExportReport())
    assert workers() == before
    assert len(before) == 1


async def test_concurrent_exports_have_one_process_each_and_one_stays(store: Store) -> None:
    await fill(store, sessions=3)
    reports = [ExportReport() for _ in range(5)]
    async with ExportProcesses(store.database.url, at_once=3) as exports:
        results = await asyncio.gather(*(rows(exports, "jsonl", report) for report in reports))
        assert len(set(results)) == 1
        assert {report.rows for report in reports} == {3}
        assert len(workers()) == 1


async def test_an_abandoned_export_ends_its_process_and_gives_its_turn_back(
    store: Store, exports: ExportProcesses
) -> None:
    await fill(store, length=5_000_000)
    abandoned = exports.export("jsonl", ExportReport())
    await anext(abandoned)
    await abandoned.aclose()
    assert workers() == []
    report = ExportReport()
    await rows(exports, "jsonl", report)
    assert report.rows == 2


async def test_a_killed_process_is_an_error_and_the_next_export_works(
    store: Store, exports: ExportProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, length=5_000_000)
    interrupted = exports.export("jsonl", ExportReport())
    await anext(interrupted)
    (pid,) = workers()
    psutil.Process(pid).kill()
    with monkeypatch.context() as patched:
        patched.delattr(asyncio.subprocess.Process, "kill")  # a signal to a dead process can lose its status
        with pytest.raises(StoreError, match="status -9 before the export was complete"):
            _ = [piece async for piece in interrupted]
    report = ExportReport()
    await rows(exports, "jsonl", report)
    assert report.rows == 2


async def test_a_missing_database_is_an_error(tmp_path: Path) -> None:
    async with ExportProcesses(f"sqlite:///{tmp_path}/none.db") as exports:
        with pytest.raises(StoreError, match="There is no database"):
            await rows(exports, "jsonl", ExportReport())


async def test_no_process_outlives_the_block(store: Store) -> None:
    async with ExportProcesses(store.database.url) as exports:
        await rows(exports, "jsonl", ExportReport())
        assert len(workers()) == 1
    assert workers() == []
