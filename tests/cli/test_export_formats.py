"""`polar export --format trl|verl|slime|nemo-rl|tinker` from a real store, by the real command."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from polar_proxy.store import open_store
from polar_proxy.training.advantages import dr_grpo
from polar_proxy.types import Json
from tests.cli.process import error_text, polar, polar_json
from tests.export.recorded_runs import rollout, session_without_rollout


@pytest.fixture
async def database(tmp_path: Path) -> str:
    """Two groups of one rollout each, one of them unscored, and a session of no rollout."""
    url = f"sqlite:///{tmp_path}/polar.db"
    async with open_store(url) as store:
        await rollout(store, reward=1.0)
        await rollout(store, reward=None, base=30)
        await session_without_rollout(store, base=50)
    return url


def rows(path: Path) -> list[Json]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


async def test_every_format_says_what_it_left_out(tmp_path: Path, database: str) -> None:
    found = {}
    for form in ("trl", "verl", "slime", "nemo-rl", "tinker"):
        out = tmp_path / f"{form}.jsonl"
        told = polar_json("export", "--format", form, "--db", database, "--out", str(out), cwd=tmp_path)
        found[form] = (told["rows"], {k: v for k, v in told["left_out"].items() if k != "client_gone"})
        assert len(rows(out)) == told["rows"]
    # Of the five traces each rollout has two; the session's two belong to no group.
    assert found["verl"] == (2, {"no_reward": 4})
    assert found["slime"] == (2, {"no_reward": 4})
    assert found["nemo-rl"] == (0, {"several_traces": 6})
    assert found["trl"][0] == found["tinker"][0] == 2
    assert found["tinker"][1] == {"no_advantage": 4}


async def test_a_group_of_several_gives_each_rollout_its_advantage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/polar.db"
    async with open_store(url) as store:
        one, _ = await rollout(store, reward=1.0, samples=3)
        group_id = (await store.rollouts.find(rollout_ids=[one]))[0].group_id
        others = await store.rollouts.find(group_id=group_id, statuses=["queued"])
        for other, reward in zip(others, (0.0, 0.5), strict=True):
            await store.rollouts.update(other.rollout_id, status="done")
            await store.rewards.add(other.rollout_id, reward, "tests", {})
    out = tmp_path / "out.jsonl"
    told = polar_json(
        "export", "--format", "tinker", "--advantage", "dr_grpo", "--db", url, "--out", str(out), cwd=tmp_path
    )
    assert told["rows"] == 2
    values = {value for row in rows(out) for value in row["loss_fn_inputs"]["advantages"]["data"]}
    assert values == {0.0, float(dr_grpo([1.0, 0.0, 0.5])[0])}


async def test_what_cannot_be_is_said(tmp_path: Path, database: str) -> None:
    known = ("export", "--db", database, "--format")
    assert "no advantage 'best'" in error_text(polar(*known, "trl", "--advantage", "best", cwd=tmp_path))
    assert "whole sequences" in error_text(polar(*known, "trl", "--builder", "tree", cwd=tmp_path))
    assert "no format 'parquet'" in error_text(polar(*known, "parquet", cwd=tmp_path))
