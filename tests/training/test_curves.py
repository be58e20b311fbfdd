"""The curves of a run: as lists of equal length, and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest
from click.testing import Result
from typer.testing import CliRunner

from polar_proxy.cli.train import app
from polar_proxy.errors import UsageError
from polar_proxy.training import metrics
from polar_proxy.types import Json

pytestmark = pytest.mark.slow


def line(kind: str, step: int, **values: object) -> Json:
    return {"kind": kind, "step": step, "at": 0.0, **values}


def step(number: int, *, updated: bool = True) -> Json:
    stats = {"loss": -0.1, "entropy": 2.0 - number / 10, "approx_kl": 0.01, "mismatch_max": 1e-4} if updated else {}
    return line(
        "step",
        number,
        reward=number / 4,
        reward_interval=0.1,
        solved_share=0.5,
        updated=updated,
        skipped={"no_spread": {"rollouts": 4, "traces": 4, "tokens": 9}},
        rollouts=8,
        trained_tokens=30,
        dropped_stale=0,
        waiting_seconds=2.0,
        training_seconds=1.0,
        mismatch_max=stats.get("mismatch_max"),
        **{name: value for name, value in stats.items() if name != "mismatch_max"},
    )


LINES = [
    line("start", 0, steps_lost=0),
    line("sync", 0, seconds=0.5, largest=1e-6, mean=1e-7, moved=None),
    line("eval", 0, reward=0.25, reward_interval=None, solved_share=0.25, scored=1, seconds=3.0),
    step(1),
    line("sync", 1, seconds=0.25, largest=1e-6, mean=1e-7, moved=0.1),
    step(2, updated=False),
    step(3),
]


def test_series_have_one_value_per_line_and_null_for_missing_values() -> None:
    series = metrics.series(LINES)
    assert series["step"]["step"] == [1, 2, 3]
    assert series["step"]["reward"] == [0.25, 0.5, 0.75]
    assert series["step"]["loss"] == [-0.1, None, -0.1]
    assert {len(values) for values in series["step"].values()} == {3}
    assert (series["eval"]["step"], series["eval"]["reward"]) == ([0], [0.25])
    assert (series["sync"]["step"], series["sync"]["seconds"]) == ([0, 1], [0.5, 0.25])


def test_picture_is_a_png_and_changes_with_the_values() -> None:
    one = metrics.draw(metrics.series(LINES), "run")
    assert one.startswith(b"\x89PNG\r\n")
    other = [{**each, "reward": 0.0} if each["kind"] == "step" else each for each in LINES]
    assert metrics.draw(metrics.series(other), "run") != one
    with pytest.raises(UsageError, match="not finished a training step"):
        metrics.draw(metrics.series(LINES[:3]), "run")


def test_missing_matplotlib_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'polar-proxy\[curves\]'"):
        metrics.draw(metrics.series(LINES), "run")


def test_status_command_prints_series_and_draws_them(
    tmp_path: Path, polar_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in LINES))
    png = tmp_path / "curves.png"
    summary = orjson.loads(invoke_status(str(run), "--png", str(png), "--json").stdout)
    assert summary["series"]["step"]["entropy"] == [1.9, None, 1.7]
    assert summary["seconds"]["waiting"] == 6.0
    assert png.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(metrics, "draw", lambda series, title: b"")  # drawing takes seconds
    assert "Cannot write" in str(invoke_status(str(run), "--png", str(tmp_path)).exception)
    assert "no run" in str(invoke_status(str(tmp_path / "none")).exception)


def invoke_status(*arguments: str) -> Result:
    """Run `polar train status` in this process, because a new process loads PyTorch for seconds."""
    return CliRunner().invoke(app, ["status", *arguments])
