"""`polar run` on tasks of every source, with an agent that knows the answer and one that does nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from polar_proxy.store import RewardRow, Store, open_store
from polar_proxy.tasks import get_source, task_to_json
from tests.cli.runner import polar_error, polar_json
from tests.rewards.conftest import EXAMPLES, needs

pytestmark = pytest.mark.slow

HARBOR = EXAMPLES / "harbor"
ROWS = EXAMPLES / "swebench"
SOLVE = f"shell:sh {{mount:{HARBOR}/running-mean/solution/solve.sh}}"
APPLY = f"shell:git apply {{mount:{ROWS}/example__tally-1.gold.patch}}"


PLAYER = ("--engine", "tests.fakes.player:PlayerEngine")


def run_tasks(*arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = polar_json("run", *arguments, *PLAYER)
    return document


T = TypeVar("T")


def from_store(home: Path, read: Callable[[Store], Awaitable[T]]) -> T:
    """Return what `read` reads from the database of a run."""

    async def opened() -> T:
        async with open_store(f"sqlite:///{home}/polar.db", create=False) as store:
            return await read(store)

    return asyncio.run(opened())


def rewards_of(home: Path, rollout_id: str) -> Sequence[RewardRow]:
    return from_store(home, lambda store: store.rewards.of_rollout(rollout_id))


@pytest.mark.parametrize("kind", [needs("bubblewrap")])
@pytest.mark.parametrize(("agent", "reward"), [(SOLVE, 1.0), ("shell:true", 0.0)])
def test_runs_a_harbor_folder(polar_home: Path, kind: str, agent: str, reward: float) -> None:
    (row,) = run_tasks(str(HARBOR), "--sandbox", kind, "--harness", agent)["rollouts"]
    assert (row["task_id"], row["status"], row["reward"]) == ("polar/running-mean", "done", reward)
    (stored,) = rewards_of(polar_home, row["rollout_id"])
    assert (stored.source, stored.value, stored.detail["exit_code"]) == ("harbor", reward, 0)


@pytest.mark.parametrize("kind", [needs("process"), needs("bubblewrap")])
@pytest.mark.parametrize(("agent", "reward"), [(APPLY, 1.0), ("shell:true", 0.0)])
def test_runs_a_swebench_row(polar_home: Path, kind: str, agent: str, reward: float) -> None:
    (row,) = run_tasks(str(ROWS / "rows.jsonl"), "--seed", "0", "--sandbox", kind, "--harness", agent)["rollouts"]
    assert (row["task_id"], row["status"], row["reward"]) == ("example__tally-1", "done", reward)


def test_runs_the_good_tasks_of_a_file_with_bad_ones(polar_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    good = (EXAMPLES / "jsonl" / "tasks.jsonl").read_text().splitlines()
    file.write_text("\n".join([good[0], good[1], "{", '{"task_id": "no-words", "instruction": " "}', good[2]]))
    document = run_tasks(str(file), "--sandbox", "process", "--harness", "shell:true")
    assert [row["task_id"] for row in document["rollouts"]] == ["greet-1", "sorted-1"]
    assert [row["seed"] for row in document["rollouts"]] == [0, 3]
    assert [(item["where"], item["name"]) for item in document["refused"]] == [
        ("mixed.jsonl:3", None),
        ("mixed.jsonl:4", "no-words"),
    ]
    refused = polar_error("run", str(file), "--seed", "2", *PLAYER)
    assert "mixed.jsonl:4 (no-words): instruction: is empty" in " ".join(refused.split())


def test_stores_null_for_a_missing_reward(polar_home: Path, tmp_path: Path) -> None:
    task = {
        "task_id": "t",
        "instruction": "Do.",
        "evaluator": {"kind": "command", "argv": ["true"], "reward": "last_line"},
    }
    (tmp_path / "one.jsonl").write_text(json.dumps(task))
    (row,) = run_tasks(str(tmp_path / "one.jsonl"), "--sandbox", "process", "--harness", "shell:true")["rollouts"]
    assert (row["status"], row["reward"]) == ("done", None)
    (stored,) = rewards_of(polar_home, row["rollout_id"])
    assert stored.value is None
    assert "printed nothing" in stored.detail["no_reward"]


def test_stores_rewards_of_single_calls(polar_home: Path, tmp_path: Path) -> None:
    """Runs a `swe-task` instance as a row, with its tests and a function that rewards single calls."""
    row = task_to_json(get_source("swe-task").task(0))
    del row["seed"]
    judge = {"kind": "python", "weight": 1, "function": "examples.tasks.judges:brevity", "options": {"limit": 10_000}}
    row["evaluators"] = [{"kind": "tests", "weight": 3}, judge]
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    agent = ("--harness", "tests.fakes.tiny_agent:TinyAgent")
    (rollout,) = run_tasks(
        str(tmp_path / "one.jsonl"), "--sandbox", "process", *agent, "--allow-code", judge["function"]
    )["rollouts"]
    assert (rollout["status"], rollout["reward"]) == ("done", 1.0)
    rewards = rewards_of(polar_home, rollout["rollout_id"])
    recorded = from_store(polar_home, lambda store: store.calls.of_session(rollout["session_id"]))
    calls = {call.call_id for call in recorded}
    of_calls = [reward for reward in rewards if reward.call_id is not None]
    assert {reward.call_id for reward in of_calls} == calls
    assert {(reward.value, reward.source) for reward in of_calls} == {(1.0, "tests+python")}
    assert [reward.value for reward in rewards if reward.call_id is None] == [1.0]
