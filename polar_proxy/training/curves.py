"""The curves of a run: its metrics as series, for the dashboard and scripts, and as a picture.

`series` is pure. `draw` needs matplotlib (`pip install 'polar-proxy[curves]'`) and no display.
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
"""What a step's line is asked for (docs/training.md, "What is measured")."""
_EVAL = ("reward", "reward_interval", "solved_share", "scored", "seconds")
_SYNC = ("largest", "mean", "moved", "seconds")


def series(lines: Iterable[Json]) -> Json:
    """{"step": {"step": [...], name: [...]}, "eval": {...}, "sync": {...}}: lists of one length within each kind.

    `lines`: of metrics.jsonl. What a line does not have is null: a step without spread has no loss.
    """
    kept: dict[str, list[Json]] = {"step": [], "eval": [], "sync": []}
    for line in lines:
        if line["kind"] in kept:
            kept[line["kind"]].append(line)
    return {
        kind: {name: [line.get(name) for line in kept[kind]] for name in ("step", *names)}
        for kind, names in (("step", STEP_SERIES), ("eval", _EVAL), ("sync", _SYNC))
    }


def draw(told: Json, title: str) -> bytes:
    """A PNG of six panels. Raises UsageError where matplotlib is missing or there is no step yet."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("Curves need matplotlib: pip install 'polar-proxy[curves]'") from error
    step, held, sync = told["step"], told["eval"], told["sync"]
    if not step["step"]:
        raise UsageError("There is no step to draw yet.")
    figure = Figure(figsize=(13, 7), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(2, 3).ravel()
    _line(panels[0], step, "reward", label="training")
    _band(panels[0], step)
    _line(panels[0], held, "reward", label="held out", marker="o")
    _line(panels[1], step, "entropy")
    _line(panels[2], step, "approx_kl", label="KL to the sampling policy")
    _line(panels[2], step, "mismatch_mean", label="mismatch, mean")
    _line(panels[2], step, "mismatch_max", label="mismatch, largest")
    panels[2].set_yscale("symlog", linthresh=1e-6)
    _line(panels[3], step, "clipped_share", label="clipped")
    _line(panels[3], step, "dropped_share", label="dropped")
    _line(panels[4], step, "length_mean", label="sampled per sequence, mean")
    _line(panels[4], step, "length_max", label="largest")
    waiting, training = ([value or 0.0 for value in step[f"{name}_seconds"]] for name in ("waiting", "training"))
    syncing = dict(zip(sync["step"], sync["seconds"], strict=True))
    panels[5].stackplot(
        step["step"],
        waiting,
        training,
        [syncing.get(at) or 0.0 for at in step["step"]],
        labels=("waiting for rollouts", "training", "sync"),
    )
    names = ("reward", "entropy, nats", "nats", "share of tokens", "tokens", "seconds per step")
    for panel, name in zip(panels, names, strict=True):
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=110)
    return made.getvalue()


def _line(panel: Any, told: Json, name: str, **look: Any) -> None:
    """Only what is there: a gap is not 0."""
    points = [(at, value) for at, value in zip(told["step"], told[name], strict=True) if value is not None]
    if points:
        panel.plot(*zip(*points, strict=True), **look)


def _band(panel: Any, step: Json) -> None:
    rows = zip(step["step"], step["reward"], step["reward_interval"], strict=True)
    known = [(at, mean - half, mean + half) for at, mean, half in rows if mean is not None and half is not None]
    if known:
        at, low, high = zip(*known, strict=True)
        panel.fill_between(at, low, high, alpha=0.2)
