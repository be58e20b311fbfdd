"""The live view and the end of `polar run`: each sample with its state, calls and reward; steps that fit the result."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.live import Live

from polar_proxy.cli import output
from polar_proxy.cli.views import progress
from polar_proxy.cli.views.progress import RolloutProgressView
from polar_proxy.cli.views.run_summary import next_steps, print_run
from polar_proxy.store import RolloutRow
from tests.factories import call_record
from tests.training.group_factories import rollout

ROW = replace(
    rollout(0, 0.0),
    task_id="swe-task-0",
    harness="mini-swe-agent 2.4.6",
    engine="local transformers 5",
    model="polar-tiny",
    seed=7,
)


def rows(*rewards: float | None, **changes: object) -> list[RolloutRow]:
    """Return the rollouts of one group, with these rewards."""
    return [
        replace(ROW, rollout_id=f"roll_{number}", reward=reward, **changes)  # type: ignore[arg-type]
        for number, reward in enumerate(rewards)
    ]


EXPORT = "polar export --format tokens-jsonl --where 'reward>=1' --out train.jsonl"
TRAIN = "polar train grpo --task swe-task --engine local --steps 2 --samples 4 --groups 1 --run first"


def see(rollout_id: str) -> list[str]:
    return [f"polar show {rollout_id}", f"polar view {rollout_id}"]


@pytest.mark.parametrize(
    ("found", "commands"),
    [
        ([], []),
        (rows(None, None), ["polar show roll_0"]),
        (rows(0.0), [*see("roll_0"), "polar run swe-task --samples 4"]),
        (rows(0.0, 1.0, 0.0, None), [*see("roll_1"), EXPORT, TRAIN]),
        (rows(0.0, 1.0, 0.0, 1.0), [*see("roll_1"), EXPORT, TRAIN]),
        (rows(0.0, 1.0, engine="vllm 1", model="m"), [*see("roll_1"), EXPORT]),
        (rows(0.0, 0.0, harness="codex 0.1.0"), [*see("roll_0")]),
        (rows(1.0, 1.0), [*see("roll_0"), EXPORT, "polar run swe-task --seed 8 --samples 4"]),
        (rows(0.0, 0.0, 0.0, 0.0, 0.0), [*see("roll_0"), "polar run swe-task --seed 8 --samples 5"]),
        (rows(0.0, 0.0, seed=None), [*see("roll_0"), "polar run swe-task --samples 4"]),
    ],
    ids=[
        "none",
        "no reward",
        "one",
        "different",
        "different, all",
        "own model",
        "other harness",
        "all solved",
        "all failed",
        "no seed",
    ],
)
def test_the_steps_fit_the_result(found: list[RolloutRow], commands: list[str]) -> None:
    assert [command for _, command in next_steps(found, "swe-task")] == commands


def test_equal_rewards_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    print_run(rows(1.0, 1.0), "my tasks.jsonl", "sqlite:///x.db", "my runs.db")
    shown = capsys.readouterr().out
    assert "all rewards of a group are equal" in shown
    last = shlex.split(shown.splitlines()[-1])
    assert last == ["polar", "run", "my tasks.jsonl", "--seed", "8", "--samples", "4", "--db", "my runs.db"]


def watched() -> RolloutProgressView:
    """Return the view of two samples: one is done, with one call; the other is queued."""
    view = RolloutProgressView(quiet=False)
    with view.show() as live:
        for number in range(2):
            view.stage(f"roll_{number}", "queued", "swe-task-0")
        view.session("roll_0", "sess_0")
        view.stage("roll_0", "running")
        view.call(call_record("sess_0"))
        view.stage("roll_0", "done", "submitted", 0.5)
        if isinstance(live, Live):
            live.refresh()
    return view


def test_a_piped_run_prints_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    watched()
    running, done = capsys.readouterr().err.splitlines()
    assert running == "swe-task-0 roll_0: running"
    assert done == "swe-task-0 roll_0: done, reward 0.5 (1 calls, 5 tokens) submitted"


def test_the_live_table_has_each_sample(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output.err, "_force_terminal", True)
    monkeypatch.setattr(output.err, "is_interactive", True)
    monkeypatch.setenv("TERM", "xterm")
    watched()
    table = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    lines = [line.split() for line in table.splitlines() if "swe-task-0" in line]
    assert lines[-2][:6] == ["1", "swe-task-0", "done", "1", "5", "0.5"]
    assert lines[-1][:6] == ["2", "swe-task-0", "queued", "0", "0", "-"]
    assert "1 finished, 0 active, 1 queued" in table


def test_the_live_view_shows_how_long_an_installation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", clock := Mock(return_value=100.0))
    view = RolloutProgressView(quiet=False)
    view.note("installing mini-swe-agent 2.4.6 (once; a minute or two)")
    clock.return_value = 137.0
    console = Console(width=200)
    with console.capture() as captured:
        console.print(view.table())
    assert "installing mini-swe-agent 2.4.6 (once; a minute or two): 37 s" in captured.get()
    view.stage("roll_0", "queued", "swe-task-0")
    with console.capture() as captured:
        console.print(view.table())
    assert "swe-task-0" in captured.get()
    assert "installing" not in captured.get()


def test_a_rollout_that_runs_before_it_is_announced_keeps_its_stage(capsys: pytest.CaptureFixture[str]) -> None:
    view = RolloutProgressView(quiet=False)
    view.stage("roll_0", "running")
    view.stage("roll_0", "queued", "swe-task-0")
    view.stage("roll_0", "done", "submitted", 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "roll_0 roll_0: running",
        "swe-task-0 roll_0: done, reward 1 (0 calls, 0 tokens) submitted",
    ]
