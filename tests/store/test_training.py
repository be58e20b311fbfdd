"""Training runs: lines keep their order, repeated lines are stored once, and a restarted run replaces its lines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from polar_proxy.errors import StoreError
from polar_proxy.store import Store, open_store
from polar_proxy.store.database import UnstorableValueError
from polar_proxy.types import Json


def line(step: int, kind: str = "step", **values: object) -> Json:
    return {"kind": kind, "step": step, "at": 1000.5 + step, **values}


LINES = [line(0, "start"), line(1, reward=0.5, groups=["a", "b"]), line(1, "sync", moved=None), line(2, reward=None)]


@pytest.mark.parametrize("step", [2**63, 10**30])
async def test_values_that_no_column_holds_are_refused(store: Store, step: int) -> None:
    with pytest.raises(UnstorableValueError):
        await store.training.put_run("run_1", "first", {}, [line(step)])


async def test_lines_keep_their_order(store: Store) -> None:
    await store.training.put_run("run_1", "first", {"loss": "dapo"}, LINES[:1])
    await store.training.add_lines("run_1", 1, LINES[1:3])
    await store.training.add_lines("run_1", 2, LINES[2:])  # repeated, as after a lost response
    await store.training.add_lines("run_1", 4, [])
    assert await store.training.lines("run_1") == LINES
    (run,) = await store.training.runs()
    assert (run.run_id, run.name, run.config, run.step, run.lines) == ("run_1", "first", {"loss": "dapo"}, 2, 4)
    assert run.updated_at == 1002.5
    assert abs(run.created_at - time.time()) < 60


async def test_restarted_run_replaces_its_lines(store: Store) -> None:
    await store.training.put_run("run_1", "first", {"steps": 2}, LINES)
    (before,) = await store.training.runs("run_1")
    await store.training.put_run("run_1", "renamed", {"steps": 9}, LINES[:2])
    await store.training.add_lines("run_1", 2, [line(2, reward=0.25)])
    assert await store.training.lines("run_1") == [*LINES[:2], line(2, reward=0.25)]
    (run,) = await store.training.runs("run_1")
    assert (run.name, run.config, run.created_at) == ("renamed", {"steps": 9}, before.created_at)


async def test_finds_the_step_that_trained_a_group(store: Store) -> None:
    strange = [line(1, groups=7), line(2, groups={"a": 1}), line(3, note="a")]
    await store.training.put_run("run_1", "first", {}, [*strange, line(4, groups=["aa", "a_"]), line(5, groups=["a"])])
    await store.training.put_run("run_2", "second", {}, [line(1, groups=["b", "a"])])
    steps = [await store.training.step_of_group("run_1", group) for group in ("a", "aa", "a_", "a%", "b")]
    assert steps == [5, 4, 4, None, None]
    assert await store.training.step_of_group("run_2", "a") == 1
    assert await store.training.step_of_group("run_none", "a") is None


async def test_refuses_unknown_runs_and_missing_lines(store: Store) -> None:
    with pytest.raises(StoreError, match="no training run run_1"):
        await store.training.add_lines("run_1", 0, LINES)
    await store.training.put_run("run_1", "first", {}, [])
    with pytest.raises(StoreError, match="has 0 stored lines, so line 2 cannot be added"):
        await store.training.add_lines("run_1", 2, LINES)
    assert await store.training.lines("run_1") == await store.training.lines("run_none") == []
    assert [(run.step, run.lines, run.updated_at) for run in await store.training.runs()] == [(0, 0, None)]
    assert await store.training.runs("run_none") == []


async def test_archive_of_everything_contains_training_runs(store: Store, tmp_path: Path) -> None:
    await store.training.put_run("run_1", "first", {"loss": "dapo"}, LINES)
    await store.archive.export_archive(tmp_path / "all.polar")
    await store.archive.export_archive(tmp_path / "some.polar", where="reward>=1")
    async with open_store(f"{tmp_path}/other/polar.db") as other:
        await other.archive.import_archive(tmp_path / "some.polar")
        assert await other.training.runs() == []
        for _ in range(2):
            await other.archive.import_archive(tmp_path / "all.polar")
        assert await other.training.lines("run_1") == LINES
