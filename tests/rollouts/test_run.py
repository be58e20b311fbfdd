"""`polar run` as a program: complete runs with a small agent, and every way in which a run can end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from polar_proxy.errors import StoreError
from polar_proxy.store import RewardRow, Store, open_store
from polar_proxy.traces.builders import build
from sandboxes import self_test
from sandboxes.choice import available
from tests.cli.runner import polar, polar_error, polar_json

pytestmark = pytest.mark.slow

POLAR = [str(Path(sys.executable).with_name("polar")), "run", "swe-task"]
PLAYER = ["--engine", "tests.fakes.player:PlayerEngine"]
AGENT = ["--harness", "tests.fakes.tiny_agent:TinyAgent"]
USABLE = {item.kind: item for item in available()}


def sandbox(kind: str) -> Any:
    """Return a test parameter that is skipped, with the reason, if there is no such sandbox."""
    item = USABLE[kind]  # type: ignore[index]
    skip = pytest.mark.skipif(not item.ok, reason=f"{kind}: {item.why_not}. {item.how_to_get}")
    marks = [skip, pytest.mark.full] if kind == "docker" else [skip]
    return pytest.param(kind, marks=marks)


def run_rollouts(*arguments: str, agent: str = "TinyAgent") -> list[dict[str, Any]]:
    """Run `polar run swe-task` in this process and return its rollouts."""
    harness = f"tests.fakes.tiny_agent:{agent}"
    rollouts: list[dict[str, Any]] = polar_json("run", "swe-task", *PLAYER, "--harness", harness, *arguments)[
        "rollouts"
    ]
    return rollouts


def strays(home: Path) -> list[str]:
    """Return living processes whose environment names this test's home: runs, sandboxes and agents."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if path.parent.name != str(os.getpid()) and str(home).encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture(autouse=True)
def own_sandbox_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the register of sandboxes in the test's own folder, so that a run removes only its own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("POLAR_ADMISSION__MEMORY_MB", "0")  # no check of the machine's load, so that two run at a time


async def open_recorded(home: Path) -> AbstractAsyncContextManager[Store]:
    return open_store(f"sqlite:///{home}/polar.db", create=False)


@pytest.mark.parametrize("kind", [sandbox("process"), sandbox("bubblewrap"), sandbox("docker")])
def test_records_a_solved_run(polar_home: Path, kind: str) -> None:
    rollouts = run_rollouts("--instances", "2", "--samples", "2", "--concurrency", "2", "--sandbox", kind)
    assert [row["seed"] for row in rollouts] == [0, 0, 1, 1]
    assert len({row["group_id"] for row in rollouts}) == 2
    asyncio.run(check_solved(polar_home, rollouts))


async def check_solved(home: Path, rollouts: list[dict[str, Any]]) -> None:
    async with await open_recorded(home) as store:
        for row in rollouts:
            assert (row["status"], row["reward"], row["exit_code"]) == ("done", 1.0, 0)
            calls = await store.calls.of_session(row["session_id"])
            assert len(calls) == row["calls"] >= 4
            for call in calls:
                assert call.status == "ok"
                for choice in call.choices:
                    assert len(choice.token_ids) == len(choice.logprobs) > 0
            stored = await store.traces.find(session_id=row["session_id"], builder="merged")
            for traces in (stored, build(calls, "per_call").traces, build(calls, "tree").traces):
                trained = sum(int(trace.loss_mask.sum()) for trace in traces)
                assert trained == sum(len(c.token_ids) for call in calls for c in call.choices)
                assert all(np.isfinite(t.logprobs[t.loss_mask == 1]).all() for t in traces)
            assert row["trained_tokens"] == row["completion_tokens"]
            names = {item.name for item in await store.artifacts.of_rollout(row["rollout_id"])}
            assert {"agent.log", "patch.diff", "tests.log"} <= names


def test_repeats_a_rollout_of_this_database(polar_home: Path) -> None:
    (original,) = run_rollouts("--seed", "3", "--sandbox", "process", "--temperature", "0.5")
    again = ("run", "--repeat-of", original["rollout_id"], "--sandbox", "process", *PLAYER)
    assert "a command or Python code" in polar_error(*again)
    (row,) = polar_json(*again, "--samples", "1", *AGENT)["rollouts"]
    assert (row["task_id"], row["seed"], row["status"], row["reward"]) == (original["task_id"], 3, "done", 1.0)

    async def read_options() -> list[Any]:
        async with await open_recorded(polar_home) as store:
            return [one.config["temperature"] for one in await store.rollouts.find()]

    assert asyncio.run(read_options()) == [0.5, 0.5]


def test_records_agents_that_fail(polar_home: Path) -> None:
    (crashed,) = run_rollouts("--seed", "3", "--sandbox", "process", agent="CrashingAgent")
    assert (crashed["status"], crashed["reward"], crashed["exit_code"]) == ("failed", 0.0, 3)
    assert crashed["calls"] == 1
    (vandal,) = run_rollouts("--seed", "3", "--sandbox", "process", agent="VandalAgent")
    assert (vandal["status"], vandal["reward"]) == ("done", 0.0)
    (cheat,) = run_rollouts("--seed", "3", "--sandbox", "process", agent="CheatingAgent")
    assert (cheat["status"], cheat["reward"]) == ("done", 0.0)
    (reward,) = asyncio.run(read_rewards(polar_home, vandal["rollout_id"]))
    assert "longer than" in reward.detail["no_patch"]


@pytest.mark.parametrize("kind", [sandbox("process"), sandbox("bubblewrap"), sandbox("docker")])
@pytest.mark.parametrize("agent", ["FillingAgent", "HoardingAgent"])
def test_an_agent_that_fills_its_disk_has_failed(
    polar_home: Path, kind: str, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scores 0 at its first attempt: a full disk inside is no fault of the machine, and null would pay."""
    monkeypatch.setenv("POLAR_SANDBOXES__DISK_MB", "64")
    (row,) = run_rollouts("--seed", "3", "--sandbox", kind, agent=agent)
    assert (row["reward"], row["attempt"]) == (0.0, 1)
    (reward,) = asyncio.run(read_rewards(polar_home, row["rollout_id"]))
    if row["status"] == "failed":  # stopped by the watcher, where the sandbox has no file system of its own
        assert row["cause"] == "agent"
        assert "more than the 64 MiB that it may use" in row["error"]
    else:
        assert row["status"] == "done"
        assert kind == "bubblewrap"
        assert os.geteuid() == 0
    assert reward.detail["solved"] is False
    assert not strays(polar_home)


def test_notes_answers_of_another_distribution(polar_home: Path) -> None:
    options = ("--seed", "3", "--sandbox", "process")
    for temperature, noted in (("0", 1), ("1", 0)):
        done = polar("run", "swe-task", *PLAYER, *AGENT, *options, "--temperature", temperature)
        assert done.exit_code == 0, done.stderr
        notes = [line for line in done.stderr.splitlines() if "their traces are approximate" in line]
        assert len(notes) == noted
        assert all(
            "sampled with temperature 0," in note and "With --temperature 1, polar serve, run" in note for note in notes
        )


async def read_rewards(home: Path, rollout_id: str) -> Sequence[RewardRow]:
    async with await open_recorded(home) as store:
        return await store.rewards.of_rollout(rollout_id)


@pytest.mark.parametrize("kind", [sandbox("bubblewrap")])
def test_a_sandbox_that_leaks_ends_the_run(polar_home: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find_leaks(*given: object) -> list[str]:
        return ["/proc/sys can be written"]

    monkeypatch.setattr(self_test, "find_leaks", find_leaks)
    error = polar_error("run", "swe-task", *PLAYER, *AGENT, "--sandbox", kind)
    assert "The bubblewrap sandbox fails its self-test on this machine: /proc/sys can be written" in error
    assert asyncio.run(read_statuses(polar_home)) == [("cancelled", 1, 0)]


async def read_statuses(home: Path) -> list[tuple[str, int, int]]:
    async with await open_recorded(home) as store:
        return [(row.status, row.attempt, row.calls) for row in await store.rollouts.find()]


def test_a_run_that_times_out_keeps_its_calls(polar_home: Path) -> None:
    (row,) = run_rollouts("--seed", "4", "--timeout", "6", "--sandbox", "process", agent="SleepyAgent")
    assert (row["status"], row["calls"], row["exit_code"]) == ("timed_out", 1, None)
    assert row["trained_tokens"] > 0
    assert not strays(polar_home)


@pytest.mark.parametrize("kind", [sandbox("process"), sandbox("bubblewrap"), sandbox("docker")])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_a_stopped_run_leaves_nothing_behind(polar_home: Path, kind: str, how: signal.Signals) -> None:
    """Ctrl-C cleans up at once, and after kill -9 the next start does. Every answered call is in the store."""
    command = [
        *POLAR,
        *PLAYER,
        "--harness",
        "tests.fakes.tiny_agent:SleepyAgent",
        "--instances",
        "2",
        "--sandbox",
        kind,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    await _until_calls(polar_home, 2)
    process.send_signal(how)
    _, words = process.communicate(timeout=120)
    if how is signal.SIGINT:
        assert process.returncode == 130, words
        assert not strays(polar_home)
    else:
        assert process.returncode == -9
        # Other kinds end with their owner; a container is removed by the next start.
        assert strays(polar_home) or kind != "docker"
        again = [*POLAR, *PLAYER, *AGENT, "--seed", "9", "--sandbox", kind]
        second = subprocess.run(again, capture_output=True, text=True, timeout=240, check=True)
        assert "interrupted" in second.stderr
        assert not strays(polar_home)
    async with await open_recorded(polar_home) as store:
        stopped = [row for row in await store.rollouts.find() if row.seed in (0, 1)]
        assert [row.status for row in stopped] == ["cancelled" if how is signal.SIGINT else "failed"] * 2
        assert [row.calls for row in stopped] == [1, 1]
        assert [row.reward for row in stopped] == [None, None]
        assert [row.trained_tokens == row.completion_tokens > 0 for row in stopped] == [True, True]
    assert not strays(polar_home)


async def test_ctrl_c_prints_the_rollouts_that_finished(polar_home: Path, tmp_path: Path) -> None:
    """The first rollout makes a folder and ends; the second finds it and sleeps."""
    agent = f"shell:sh -c 'mkdir {tmp_path}/first 2>/dev/null || sleep 600'"
    command = [*POLAR, *PLAYER, "--harness", agent, "--instances", "2", "--concurrency", "1", "--sandbox", "process"]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not _one_ended_and_one_runs(statuses := await _read_statuses_by_seed(polar_home)):
        assert time.monotonic() < deadline, statuses
        await asyncio.sleep(0.2)
    process.send_signal(signal.SIGINT)
    document, words = process.communicate(timeout=120)
    assert process.returncode == 130, words
    (row,) = orjson.loads(document)["rollouts"]
    assert statuses[row["seed"]] == row["status"] != "running"
    assert "stopped by SIGINT" in words
    assert not strays(polar_home)


def _one_ended_and_one_runs(statuses: dict[int | None, str]) -> bool:
    return "running" in statuses.values() and bool({"done", "failed"} & set(statuses.values()))


async def _read_statuses_by_seed(home: Path) -> dict[int | None, str]:
    if not (home / "polar.db").exists():
        return {}
    try:
        async with await open_recorded(home) as store:
            return {row.seed: row.status for row in await store.rollouts.find()}
    except StoreError:  # the schema may be half made yet
        return {}


async def _until_calls(home: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (home / "polar.db").exists():
            try:
                async with await open_recorded(home) as store:
                    if sum(row.calls for row in await store.sessions.recent()) >= count:
                        return
            except Exception as error:  # noqa: BLE001  the schema may be half made yet
                print(error)
        time.sleep(0.2)
    raise AssertionError(f"{count} calls were not recorded within 120 s")


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-family"],
        ["swe-task", "--engine", "no-such-engine"],
        ["swe-task", "--engine", "vllm"],
        ["swe-task", "--harness", "no-such-harness", *PLAYER],
    ],
)
def test_usage_errors_are_one_line(polar_home: Path, arguments: list[str]) -> None:
    assert "error:" in polar_error("run", *arguments)
