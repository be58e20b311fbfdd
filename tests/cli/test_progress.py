"""`polar watch` shows times, stages and rewards; the live view of training shows rollouts, curves and the time left."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import RenderableType

from polar_proxy import api_models as m
from polar_proxy.cli import output
from polar_proxy.cli.views.progress import JobProgressView, RolloutProgressView
from polar_proxy.cli.views.training import TrainingProgressView
from tests.factories import call_record

ROLLOUT: dict[str, Any] = {
    **dict.fromkeys(("job_id", "seed", "cause", "reward", "exit_code", "error", "session_id", "started_at")),
    **dict.fromkeys(("ended_at", "wall_seconds")),
    **dict.fromkeys(("calls", "traces", "prompt_tokens", "completion_tokens", "trained_tokens", "group_index"), 3),
    **dict.fromkeys(("harness", "sandbox", "engine", "model", "status", "group_id"), "x"),
    "attempt": 1,
    "incomplete": False,
    "masked": False,
    "created_at": 0.0,
    "task_id": "swe-task-1",
}


def stage(name: str, started: float, ended: float | None) -> dict[str, Any]:
    own = {"attempt": 1, "stage": name, "started_at": started, "ended_at": ended}
    return {**own, "outcome": "ok", "cause": None, "worker": None}


def rendered(view: RenderableType) -> str:
    """Return what a terminal of 80 columns shows."""
    console = output.SafeConsole(width=80, force_terminal=True, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def event(rollout_id: str, to: str, at: float) -> m.Event:
    return m.Event(id="1-1", event="stage", data={"rollout_id": rollout_id, "from": "x", "to": to, "at": at})


def watched() -> tuple[JobProgressView, float]:
    """Return a view of two rollouts: one is done with reward 1, the other runs."""
    now = time.time()
    rollouts = [m.Rollout.model_validate({**ROLLOUT, "rollout_id": f"roll_{name}"}) for name in "ab"]
    view = JobProgressView(rollouts, quiet=False)
    for at, name, to in ((30, "a", "preparing"), (28, "a", "running"), (20, "b", "running")):
        view.update(event(f"roll_{name}", to, now - at))
    stages = [stage("preparing", now - 30, now - 28), stage("running", now - 28, now - 3)]
    ended = m.RolloutDetail.model_validate(
        {**ROLLOUT, "rollout_id": "roll_a", "reward": 1.0, "stages": stages, "rewards": []}
    )
    done = event("roll_a", "done", time.time())
    assert view.has_ended(done)
    view.update(done, ended)
    return view, now


def test_watching_in_a_pipe_prints_a_line_with_time_for_each_event(capsys: pytest.CaptureFixture[str]) -> None:
    _, now = watched()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith(time.strftime("%H:%M:%S", time.localtime(now)))
    assert lines[-1].endswith("roll_a: done, reward 1, 3 calls (preparing 2.0 s, running 25.0 s)")


def test_watching_on_a_terminal_shows_stages_times_rewards_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.err, "_force_terminal", True)
    view, _ = watched()
    shown = rendered(view._view())
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip().startswith("roll_")}
    assert rows["roll_b"] == ["roll_b", "swe-task-1", "running", "20", "20", "-"]
    assert rows["roll_a"] == ["roll_a", "swe-task-1", "done", "30", "1"]
    assert "1 done, 1 active, 0 queued; mean reward 1.00; about" in shown
    assert max(cell_len(line) for line in shown.splitlines()) <= 80


def test_the_live_view_of_training_has_rollouts_curves_reasons_and_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output.err, "_force_terminal", True)
    view = TrainingProgressView(4, quiet=False)
    view.stage("roll_a", "preparing")
    view.session("roll_a", "sess_1")
    view.stage("roll_a", "running")
    view.call(call_record("sess_1"))
    skipped = {"no_spread": {"rollouts": 2, "traces": 2, "tokens": 50}}
    for step in (1, 2):
        values = {"reward": step / 4, "skipped": skipped, "dropped_stale": 0, "step_seconds": 60.0}
        view.log("step", step, values)
    shown = rendered(view.view())
    assert "step 3 of 4" in shown
    assert "running" in shown
    assert "▁█" in shown
    assert "rollouts not trained: 4 no_spread (100 tokens)" in shown
    assert "about 2 min 0 s left" in shown
    assert max(cell_len(line) for line in shown.splitlines()) <= 80


def test_a_new_step_drops_the_rollouts_that_have_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.err, "_force_terminal", True)
    view = TrainingProgressView(4, quiet=False)
    for name, status in (("a", "done"), ("b", "running")):
        view.stage(f"roll_{name}", "preparing")
        view.stage(f"roll_{name}", status)
    view.log("step", 1, {"skipped": {}, "dropped_stale": 0})
    assert view._rollouts.rollout_ids == ["roll_b"]
    assert capsys.readouterr().err == ""


def test_a_call_of_an_unknown_session_is_ignored() -> None:
    view = RolloutProgressView(quiet=True)
    view.call(call_record("sess_other"))
    assert view.rollout_ids == []
