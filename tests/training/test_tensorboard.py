"""TensorBoard's own reader finds every metric of a run, and no step that was rolled back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.training import metrics
from polar_proxy.training.metrics import MetricsLog, drop_lines_after
from tests.training.bandit import CONFIG, opened, trainer

pytestmark = pytest.mark.slow

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'polar-proxy[tensorboard]'"
)

EXPECTED = {
    "reward with its interval": ("reward", "reward_interval"),
    "solved share": ("solved_share",),
    "entropy": ("entropy",),
    "KL": ("approx_kl", "kl_reference"),
    "ratio and what is clipped": ("ratio_mean", "ratio_max", "clipped_share", "dropped_share"),
    "mismatch of trainer and engine": ("mismatch_mean", "mismatch_max"),
    "staleness": ("staleness", "dropped_stale"),
    "lengths": ("length_mean", "length_max"),
    "throughput": ("tokens_per_second", "rollouts_per_second"),
    "computation": ("computed_tokens", "flat_tokens", "trained_tokens"),
    "time by phase": ("rollouts_seconds", "waiting_seconds", "training_seconds", "step_seconds"),
    "the update": ("loss", "grad_norm", "learning_rate"),
}


def read_events(run: Path) -> Any:
    events = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={accumulator.SCALARS: 0})
    events.Reload()
    return events


@pytest.mark.usefixtures("one_thread")
async def test_tensorboard_has_every_metric_of_a_run(tmp_path: Path, model: Path) -> None:
    config = CONFIG.model_copy(update={"steps": 2, "report_to": ("tensorboard",)})
    async with opened(tmp_path, model) as (store, engine):
        await trainer(tmp_path, model, store, engine, config).train()
    events, lines = read_events(tmp_path / "run"), list(metrics.read_lines(tmp_path / "run"))
    steps = [line for line in lines if line["kind"] == "step"]
    assert any(line["updated"] for line in steps)
    for what, names in EXPECTED.items():
        for name in names:
            expected = [(line["step"], line[name]) for line in steps if line.get(name) is not None]
            if name == "kl_reference":  # there is no reference model, so no value and no curve
                assert not expected
                assert f"step/{name}" not in events.Tags()["scalars"]
                continue
            assert expected, what
            got = [(event.step, event.value) for event in events.Scalars(f"step/{name}")]
            assert [step for step, _ in got] == [step for step, _ in expected], what
            assert [value for _, value in got] == pytest.approx([float(value) for _, value in expected], rel=1e-6), what
    for tag in ("sync/largest", "sync/mean", "sync/seconds", "checkpoint/seconds"):
        assert [event.step for event in events.Scalars(tag)][-1] == 2


def test_steps_after_the_checkpoint_disappear_from_tensorboard(tmp_path: Path) -> None:
    """Steps 2 and 3 come after the checkpoint, so the resumed run makes them again."""
    with MetricsLog(tmp_path, report_to=["tensorboard"]) as before:
        for step in (1, 2, 3):
            before.write("step", step, {"reward": step / 10})
        # Not closed, as after a kill: what was written is on disk anyway.
        assert [event.step for event in read_events(tmp_path).Scalars("step/reward")] == [1, 2, 3]
    assert drop_lines_after(tmp_path, 1) == 2
    time.sleep(1)  # TensorBoard orders the files of two writers by the second in which they began
    with MetricsLog(tmp_path, report_to=["tensorboard"]) as after:
        after.write("step", 2, {"reward": 0.9})
    assert [event.step for event in read_events(tmp_path).Scalars("step/reward")] == [1, 2]
    assert [event.value for event in read_events(tmp_path).Scalars("step/reward")] == pytest.approx([0.1, 0.9])
