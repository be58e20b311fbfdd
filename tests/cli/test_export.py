"""`polar export`: the formats of other trainers, and how the output file is written."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar_proxy.cli.traces import open_output
from polar_proxy.client import AsyncClient
from polar_proxy.errors import UsageError
from polar_proxy.export import exporter
from polar_proxy.export.datasets import SessionExport
from polar_proxy.store import open_store
from polar_proxy.training.advantages import dr_grpo
from polar_proxy.types import Json
from tests.cli.runner import polar, polar_error, polar_json, polar_ok
from tests.export.recorded_runs import rollout, session_without_rollout

pytestmark = pytest.mark.slow


def rows(path: Path) -> list[Json]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


# The formats of other trainers


@pytest.fixture
def recorded_groups(polar_home: Path) -> None:
    """Two groups of one rollout each, one of them without a reward, and a session without a rollout."""

    async def fill() -> None:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            await rollout(store, reward=1.0)
            await rollout(store, reward=None, base=30)
            await session_without_rollout(store, base=50)

    asyncio.run(fill())


@pytest.mark.usefixtures("recorded_groups")
def test_every_trainer_format_counts_what_it_left_out(tmp_path: Path) -> None:
    found = {}
    for name in ("trl", "verl", "slime", "nemo-rl", "tinker"):
        out = tmp_path / f"{name}.jsonl"
        report = polar_json("export", "--format", name, "--out", str(out), exit_code=3 if name == "nemo-rl" else 0)
        found[name] = (report["rows"], {k: v for k, v in report["left_out"].items() if k != "client_gone"})
        assert len(rows(out)) == report["rows"]
    # Each rollout has two of the five traces; the session's two belong to no group.
    assert found["verl"] == (2, {"no_reward": 4})
    assert found["slime"] == (2, {"no_reward": 4})
    assert found["nemo-rl"] == (0, {"several_traces": 6})
    assert found["trl"][0] == found["tinker"][0] == 2
    assert found["tinker"][1] == {"no_advantage": 4}


def test_advantages_come_from_the_whole_group(polar_home: Path, tmp_path: Path) -> None:
    async def fill() -> None:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            first, _ = await rollout(store, reward=1.0, samples=3)
            (row,) = await store.rollouts.find(rollout_ids=[first])
            others = await store.rollouts.find(group_id=row.group_id, statuses=["queued"])
            for other, reward in zip(others, (0.0, 0.5), strict=True):
                await store.rollouts.update(other.rollout_id, status="done")
                await store.rewards.add(other.rollout_id, reward, "tests", {})

    asyncio.run(fill())
    out = tmp_path / "out.jsonl"
    assert polar_json("export", "--format", "tinker", "--advantage", "dr_grpo", "--out", str(out))["rows"] == 2
    values = {value for row in rows(out) for value in row["loss_fn_inputs"]["advantages"]["data"]}
    assert values == {0.0, float(dr_grpo([1.0, 0.0, 0.5])[0])}


@pytest.mark.usefixtures("recorded_groups")
def test_an_export_without_rows_says_why_in_words(tmp_path: Path) -> None:
    done = polar("export", "--where", "harness=codex, status=done")
    assert done.exit_code == 3
    assert "harness=codex matches no rollout. Values of harness: mini-swe-agent (2)." in done.stderr
    assert "status=done matches 2 of 2 rollouts." in done.stderr
    done = polar("export", "--format", "nemo-rl", "--out", str(tmp_path / "none"))
    assert done.exit_code == 3
    lines = done.stderr.splitlines()
    assert any("6 left out as several_traces: traces of rollouts with several traces" in line for line in lines)
    assert any("3 left out as client_gone: calls whose agent disconnected" in line for line in lines)


def test_a_session_is_rewarded_and_exported(polar_home: Path, tmp_path: Path) -> None:
    async def fill() -> str:
        async with open_store(f"sqlite:///{polar_home}/polar.db") as store:
            return (await session_without_rollout(store))[0]

    session_id = asyncio.run(fill())
    out = tmp_path / "out.jsonl"
    assert polar_json("export", "--format", "verl", "--out", str(out), exit_code=3)["left_out"]["no_reward"] == 2
    assert polar_json("reward", session_id, "0.5", "--source", "human:anna")["session_id"] == session_id
    polar_json("export", "--format", "verl", "--out", str(out))
    assert [row["reward_score"] for row in rows(out)] == [0.5, 0.5]
    assert "reward 0.5" in polar_ok("show", session_id)


def test_an_export_of_an_empty_database_says_so(polar_home: Path) -> None:
    polar_json("session", "new")
    done = polar("export")
    assert done.exit_code == 3
    assert "polar.db has no rollouts, and no sessions with calls" in done.stderr
    assert "The database has no rollouts." in polar("export", "--where", "reward>=1").stderr


@pytest.mark.usefixtures("recorded_groups")
def test_reports_invalid_options() -> None:
    error = polar_error("export", "--format", "nope")
    assert all(name in error for name in ("jsonl", "chat-jsonl", "tokens-jsonl", "trl", "verl", "slime", "nemo-rl"))
    assert "no advantage 'best'" in polar_error("export", "--format", "trl", "--advantage", "best")
    assert "whole sequences" in polar_error("export", "--format", "trl", "--builder", "tree")
    assert "no format 'parquet'" in polar_error("export", "--format", "parquet")


# The output file


def write(file: str, *lines: bytes, fail: bool = False) -> None:
    with open_output(file) as target:
        for line in lines:
            target.write(line)
        if fail:
            raise RuntimeError("in the middle")


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old")
    with open_output(str(path)) as target:
        target.write(b"new")
        target.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError):
        write(str(path), b"half", fail=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write(str(link), b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """The same holds for /dev/null, which root could otherwise replace by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write(str(pipe), b"a", b"b")
    reader.join(10)
    assert received == [b"ab"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("file", ["", ".", "{tmp}", "{tmp}/missing/out.jsonl"])
def test_rejects_names_that_cannot_be_written(tmp_path: Path, file: str) -> None:
    with pytest.raises(UsageError, match="Cannot write"):
        write(file.format(tmp=tmp_path), b"x")


@pytest.mark.usefixtures("recorded_groups")
@pytest.mark.parametrize("file", ["-", "rows.jsonl"])
def test_a_stopped_export_says_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """The export is cancelled, as Ctrl-C does, when it reads its second rollout."""
    read, reads = exporter._read_session, 0

    async def read_one(*given: Any) -> SessionExport:
        nonlocal reads
        reads += 1
        if reads > 1:
            raise asyncio.CancelledError
        return await read(*given)

    monkeypatch.setattr(exporter, "_read_session", read_one)
    done = polar("export", "--format", "tokens-jsonl", "--out", file)
    assert done.exit_code == 130
    assert "2 rows from 2 rollouts and 0 other sessions" in done.stderr
    if file == "-":
        assert len(done.stdout.splitlines()) == 2
        assert "written so far" in done.stderr
    else:
        assert "rows.jsonl was not written, because it would be incomplete" in done.stderr
        assert not (tmp_path / file).exists()


def test_a_stopped_export_of_a_server_says_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel a server's export after its first two rows, as Ctrl-C does."""

    async def two_rows(client: AsyncClient, form: str, **options: Any) -> AsyncIterator[bytes]:
        yield b'{"row": 1}\n{"row": 2}\n'
        raise asyncio.CancelledError

    monkeypatch.setattr(AsyncClient, "export", two_rows)
    done = polar("export", "--url", "http://127.0.0.1:9")
    assert (done.exit_code, len(done.stdout.splitlines())) == (130, 2)
    assert "2 rows; written so far" in done.stderr
