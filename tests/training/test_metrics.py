"""Time measurements of a run, against values worked out by hand."""

from __future__ import annotations

import pytest

from polar_proxy.training import metrics
from polar_proxy.training.metrics import StepTimer, time_by_phase
from polar_proxy.types import Json


def test_timer_excludes_evaluations_from_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now, busy = 50.0, 7.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    timer = StepTimer(lambda: busy)
    now, busy = 54.0, 9.0
    with timer.paused():
        now, busy = 154.0, 99.0
    now, busy = 160.0, 104.0
    assert timer.lap() == {"step_seconds": 10.0, "engine_busy_seconds": 7.0}
    now, busy = 162.0, 106.0
    assert timer.lap() == {"step_seconds": 2.0, "engine_busy_seconds": 2.0}


def test_engine_time_is_none_without_a_meter() -> None:
    timer = StepTimer(None)
    assert timer.lap()["engine_busy_seconds"] is None


def line(kind: str, **values: float | None) -> Json:
    return {"kind": kind, "step": 1, "at": 0.0, **values}


def test_time_by_phase_sums_and_averages_over_steps() -> None:
    lines = [
        line("sync", seconds=0.5),
        line("eval", seconds=100.0),
        line("step", waiting_seconds=4.0, training_seconds=1.0),  # no engine time, as at a server
        line("step", rollouts_seconds=9.0, waiting_seconds=2.0, training_seconds=2.0, step_seconds=5.0),
        line("sync", seconds=0.1),
    ]
    lines[3]["engine_busy_seconds"] = 4.0
    assert time_by_phase(lines) == {
        "seconds": {
            "rollouts": 9.0,
            "waiting": 6.0,
            "training": 3.0,
            "sync": 0.6,
            "checkpoint": 0,
            "eval": 100.0,
        },
        "seconds_per_step": {"rollouts": 4.5, "waiting": 3.0, "training": 1.5, "sync": 0.3, "checkpoint": 0.0},
        "engine_busy_share": 0.8,
    }
    assert time_by_phase(lines[:1])["seconds_per_step"] == {}
    assert time_by_phase(lines[:3])["engine_busy_share"] is None
