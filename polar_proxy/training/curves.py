"""The curves of a run: its metrics as series for the web page and for scripts, and as a picture.

`draw` needs matplotlib (`pip install 'polar-proxy[curves]'`) and no display.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from polar_proxy.errors import UsageError
from polar_proxy.types import Json

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
    """Return a PNG of six panels. Raises UsageError if matplotlib is missing or there is no step yet."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("Curves need matplotlib: pip install 'polar-proxy[curves]'") from error
    step, heldout, sync = curves["step"], curves["eval"], curves["sync"]
    if not step["step"]:
        raise UsageError("There is no step to draw yet.")
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
