"""Write the metrics of a training run, and compute totals and curves from them.

`MetricsLog` writes one JSON line per event to RUN/metrics.jsonl. It sends copies of the lines to a `MetricsSink` (the
database, or a Polar server), and their numbers to the trackers of `report_to`.

A line of `kind` "step" describes one training step, "eval" an evaluation, "sync" a weight sync, "checkpoint" a
checkpoint and "start" a start or resume. A resumed run first drops the lines of steps that its checkpoint does not
contain, because those steps are repeated. `draw` needs matplotlib (`pip install 'polar-proxy[curves]'`) and no display.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.training.policy import checkpoint
from polar_proxy.training.trackers import MetricsTracker, open_trackers
from polar_proxy.types import Json

FILE = "metrics.jsonl"
STEP_SERIES = (
    "reward",
    "reward_interval",
    "solved_share",
    "loss",
    "entropy",
    "approx_kl",
    "kl_reference",
    "observation_loss",
    "ratio_mean",
    "ratio_max",
    "clipped_share",
    "dropped_share",
    "mismatch_mean",
    "mismatch_max",
    "grad_norm",
    "learning_rate",
    "staleness",
    "dropped_stale",
    "length_mean",
    "length_max",
    "rollouts",
    "trained_rollouts",
    "sampled_tokens",
    "trained_tokens",
    "computed_tokens",
    "flat_tokens",
    "tokens_per_second",
    "rollouts_per_second",
    "rollouts_seconds",
    "waiting_seconds",
    "training_seconds",
    "step_seconds",
    "engine_busy_seconds",
)
"""The values of a step that become curves (docs/guide/training.md explains them)."""
EVAL_SERIES = ("reward", "reward_interval", "solved_share", "scored", "seconds")
SYNC_SERIES = ("largest", "mean", "moved", "seconds")

NORMAL_95 = 1.96
"""97.5 % quantile of the normal distribution: half the width of a 95 % interval, in standard errors."""


def reward_stats(rewards: Sequence[float]) -> Json:
    """Return the mean reward, half the width of its 95 % interval (normal approximation), the number of rewards, and
    the share of rewards that are at least 1. Without rewards, the mean, the width and the share
    are None. With a single reward, only the width is None."""
    n = len(rewards)
    if n == 0:
        return {"reward": None, "reward_interval": None, "scored": 0, "solved_share": None}
    half_width = NORMAL_95 * float(np.std(rewards, ddof=1)) / math.sqrt(n) if n > 1 else None
    solved = sum(reward >= 1.0 for reward in rewards) / n
    return {"reward": float(np.mean(rewards)), "reward_interval": half_width, "scored": n, "solved_share": solved}


class MetricsSink(Protocol):
    """Receives copies of the metrics lines of one run, to store them outside the run's folder."""

    async def store(self, first: int, lines: Sequence[Json]) -> bool:
        """Store the run's lines from number `first` on. If `first` is 0, replace all stored lines. Idempotent.

        Returns False if the lines could not be stored; all lines of the run are then sent again.
        """
        ...


class StoreSink:
    """Keeps a run's lines in the database."""

    def __init__(self, store: Store, run_id: str, name: str, config: Json) -> None:
        self._store, self._run_id, self._name, self._config = store, run_id, name, config

    async def store(self, first: int, lines: Sequence[Json]) -> bool:
        if first == 0:
            await self._store.training.put_run(self._run_id, self._name, self._config, lines)
        else:
            await self._store.training.add_lines(self._run_id, first, lines)
        return True


class MetricsLog:
    """Writer of one run's metrics: `with MetricsLog(run) as log`.

    `write` goes to the file and to the trackers, `publish` to the sink.
    """

    def __init__(
        self,
        run: Path,
        sink: MetricsSink | None = None,
        *,
        report_to: Sequence[str] = (),
        config: Json | None = None,
        observer: MetricsTracker | None = None,
    ) -> None:
        """`report_to`: names of trackers, which get the run's `config`. `observer`: gets every line too."""
        self._run = run
        self._sink = sink
        self._report_to = report_to
        self._config = config or {}
        self._trackers: list[MetricsTracker] = []
        self._observer = observer
        self._published = 0
        """Number of lines that the sink holds. 0: unknown, so the next `publish` replaces them all."""
        self._unpublished: list[Json] = []
        self._file: Any = None

    def __enter__(self) -> MetricsLog:
        self._run.mkdir(parents=True, exist_ok=True)
        self._file = (self._run / FILE).open("ab")
        last = max((line["step"] for line in read_lines(self._run)), default=0)
        self._trackers = open_trackers(self._report_to, self._run, self._config, last)
        if self._observer is not None:
            self._trackers.append(self._observer)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def write(self, kind: str, step: int, values: Json) -> None:
        """Append a line. `step` is the number of steps done."""
        line = orjson.dumps(
            {"kind": kind, "step": step, "at": time.time(), **values}, option=orjson.OPT_SERIALIZE_NUMPY
        )
        self._file.write(line + b"\n")
        self._file.flush()
        if self._sink is not None:
            self._unpublished.append(orjson.loads(line))
        for tracker in self._trackers:
            tracker.log(kind, step, values)

    async def publish(self) -> None:
        """Send the new lines to the sink. The first time, and after a failure, send the whole file."""
        if self._sink is None or not self._unpublished:
            return
        lines, self._unpublished = self._unpublished, []
        if self._published == 0:
            lines = list(read_lines(self._run))
        stored = await self._sink.store(self._published, lines)
        self._published = self._published + len(lines) if stored else 0


class StepTimer:
    """Measures the wall time of each step, and for how much of it the engine was busy. Evaluations are left out."""

    def __init__(self, engine_busy_seconds: Callable[[], float] | None) -> None:
        """`engine_busy_seconds` returns the total time in which the engine had a call; None: not measured."""
        self._engine_busy_seconds = engine_busy_seconds
        self._wall_start, self._busy_start = time.monotonic(), self._busy()

    def _busy(self) -> float:
        return self._engine_busy_seconds() if self._engine_busy_seconds else 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        wall, busy = time.monotonic(), self._busy()
        yield
        self._wall_start += time.monotonic() - wall
        self._busy_start += self._busy() - busy

    def lap(self) -> Json:
        """Return the wall seconds and the engine's busy seconds since the last lap, and start the next lap."""
        wall, busy = time.monotonic(), self._busy()
        values = {
            "step_seconds": wall - self._wall_start,
            "engine_busy_seconds": busy - self._busy_start if self._engine_busy_seconds else None,
        }
        self._wall_start, self._busy_start = wall, busy
        return values


def read_lines(run: Path) -> Iterator[Json]:
    """Yield the lines of a run. A last line that a kill cut short is skipped."""
    path = run / FILE
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:
            continue


def planned_steps(run: Path) -> int | None:
    """Return the number of steps that the run is to have; None if its settings are not stored."""
    file = run / "config.json"
    return int(orjson.loads(file.read_bytes())["steps"]) if file.exists() else None


def drop_lines_after(run: Path, step: int) -> int:
    """Drop the lines of all steps after `step`, and return the number of dropped steps.

    Call this function before `MetricsLog` is entered.
    """
    lines = list(read_lines(run))
    kept = [line for line in lines if line["step"] <= step]
    if (run / FILE).exists():
        checkpoint.write_file(run / FILE, b"".join(orjson.dumps(line) + b"\n" for line in kept))
    steps: list[int] = [line["step"] for line in lines if line["kind"] == "step"]
    return sum(done > step for done in steps)


def time_by_phase(lines: Sequence[Json]) -> Json:
    """Return the seconds that a run spent in each phase, in total and per step, and the engine's busy share.

    The phase `rollouts` lasts from the start of a step's first rollout to the end of its last one. It overlaps with
    other phases when rollouts run ahead. In the phase `waiting`, the trainer waits for rollouts. `lines`: the lines of
    metrics.jsonl.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    seconds = {
        name: sum(step.get(f"{name}_seconds") or 0.0 for step in steps) for name in ("rollouts", "waiting", "training")
    }
    for kind in ("sync", "checkpoint", "eval"):
        seconds[kind] = sum(line["seconds"] for line in lines if line["kind"] == kind)
    measured = [step for step in steps if step.get("engine_busy_seconds") is not None]
    wall = sum(step["step_seconds"] for step in measured)
    return {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "seconds_per_step": {
            name: round(value / len(steps), 3) for name, value in seconds.items() if steps and name != "eval"
        },
        "engine_busy_share": sum(step["engine_busy_seconds"] for step in measured) / wall if wall else None,
    }


def run_summary(run: Path) -> Json:
    """Return totals, rewards and curves of a run, as `polar train status --json` prints them.

    Raises UsageError if there is no run in the folder.
    """
    lines = list(read_lines(run))
    if not lines:
        raise UsageError(f"There is no run in {run}.")
    steps = [line for line in lines if line["kind"] == "step"]
    last = checkpoint.latest(run)
    skipped: Counter[str] = Counter()
    for step in steps:
        skipped.update({reason: counts["rollouts"] for reason, counts in step["skipped"].items()})
    return {
        "run": str(run),
        "steps": len(steps),
        "updates": sum(step["updated"] for step in steps),
        "rewards": [step["reward"] for step in steps],
        "heldout": [{"step": line["step"], "reward": line["reward"]} for line in lines if line["kind"] == "eval"],
        "rollouts": sum(step["rollouts"] for step in steps),
        "trained_tokens": sum(step["trained_tokens"] for step in steps),
        "skipped": dict(skipped),
        "dropped_stale": sum(step["dropped_stale"] for step in steps),
        "mismatch_max": max((step["mismatch_max"] for step in steps if step["updated"]), default=None),
        **time_by_phase(lines),
        "checkpoint": None if last is None else str(last),
        "series": series(lines),
    }


# Curves


def series(lines: Iterable[Json]) -> Json:
    """Return {"step": {"step": [...], name: [...]}, "eval": {...}, "sync": {...}} for the lines of metrics.jsonl.

    All lists of a kind have the same length. Missing values are null: a step without a signal has no loss.
    """
    by_kind: dict[str, list[Json]] = {"step": [], "eval": [], "sync": []}
    for line in lines:
        if line["kind"] in by_kind:
            by_kind[line["kind"]].append(line)
    return {
        kind: {name: [line.get(name) for line in by_kind[kind]] for name in ("step", *names)}
        for kind, names in (("step", STEP_SERIES), ("eval", EVAL_SERIES), ("sync", SYNC_SERIES))
    }


def draw(curves: Json, title: str) -> bytes:
    """Plot the curves and return a PNG of six panels. Raises UsageError if matplotlib or a finished step is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("Curves need matplotlib: pip install 'polar-proxy[curves]'") from error
    step, heldout, sync = curves["step"], curves["eval"], curves["sync"]
    if not step["step"]:
        raise UsageError("The run has not finished a training step yet, so there are no curves to plot.")
    figure = Figure(figsize=(13, 7), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(2, 3).ravel()
    _plot(panels[0], step, "reward", label="training")
    _fill_interval(panels[0], step)
    _plot(panels[0], heldout, "reward", label="held out", marker="o")
    _plot(panels[1], step, "entropy")
    _plot(panels[2], step, "approx_kl", label="KL to the sampling policy")
    _plot(panels[2], step, "mismatch_mean", label="mismatch, mean")
    _plot(panels[2], step, "mismatch_max", label="mismatch, largest")
    panels[2].set_yscale("symlog", linthresh=1e-6)
    _plot(panels[3], step, "clipped_share", label="clipped")
    _plot(panels[3], step, "dropped_share", label="dropped")
    _plot(panels[4], step, "length_mean", label="sampled per sequence, mean")
    _plot(panels[4], step, "length_max", label="largest")
    waiting, training = ([value or 0.0 for value in step[f"{name}_seconds"]] for name in ("waiting", "training"))
    sync_seconds = dict(zip(sync["step"], sync["seconds"], strict=True))
    panels[5].stackplot(
        step["step"],
        waiting,
        training,
        [sync_seconds.get(number) or 0.0 for number in step["step"]],
        labels=("waiting for rollouts", "training", "sync"),
    )
    names = ("reward", "entropy, nats", "nats", "share of tokens", "tokens", "seconds per step")
    for panel, name in zip(panels, names, strict=True):
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    return png.getvalue()


def _plot(panel: Any, curves: Json, name: str, **style: Any) -> None:
    """Plot the known values; missing values are left out."""
    points = [(step, value) for step, value in zip(curves["step"], curves[name], strict=True) if value is not None]
    if points:
        panel.plot(*zip(*points, strict=True), **style)


def _fill_interval(panel: Any, step: Json) -> None:
    rows = zip(step["step"], step["reward"], step["reward_interval"], strict=True)
    known = [(at, mean - half, mean + half) for at, mean, half in rows if mean is not None and half is not None]
    if known:
        at, low, high = zip(*known, strict=True)
        panel.fill_between(at, low, high, alpha=0.2)
