"""Curves of training runs as SVG drawings. Each panel shows one or a few related quantities, and overlays all runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from polar_proxy.types import Json

WIDTH = 320
HEIGHT = 150
"""Width and height of a panel, in the units of its SVG paths."""

_LARGEST = 1e30
"""Values of this size or larger are not drawn: no real measurement is so large, but a client may send such a value."""

Value = Callable[[Json], float | None]
"""Function that returns one value of a line of metrics.jsonl; None if the line does not have the value."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity that a panel draws as one curve for each run. `read` gets the value from a line of metrics.jsonl.
    Only lines whose field `kind` equals `kind` are read."""

    name: str
    read: Value
    kind: str = "step"


@dataclass(frozen=True, slots=True)
class Curve:
    """The curve of one quantity in one run. `run`: index of the run, which selects the colour; `quantity`: index of the
    quantity in the panel, which selects the dashes."""

    label: str
    run: int
    quantity: int
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """A drawing with the range of its axes."""

    title: str
    unit: str
    legend: Mapping[int, str]
    """Name of each drawn quantity by its index; empty if the panel has only one quantity."""
    curves: Sequence[Curve]
    low: float
    high: float
    first: int
    last: int

    def path(self, curve: Curve) -> str:
        """Return a curve as the path of an SVG."""
        width, height = max(self.last - self.first, 1), self.high - self.low
        points = [
            f"{WIDTH * (step - self.first) / width:.1f} {HEIGHT * (self.high - value) / height:.1f}"
            for step, value in zip(curve.steps, curve.values, strict=True)
        ]
        return "M" + "L".join(points) + ("h0" if len(points) == 1 else "")  # h0: a dot


def _of(name: str) -> Value:
    return lambda line: _number(line.get(name))


def _number(value: object) -> float | None:
    """Return a value of a line if it is a number to draw, else None: a client may have sent anything."""
    return value if isinstance(value, int | float) and abs(value) < _LARGEST else None


def _busy_share(line: Json) -> float | None:
    busy, wall = _number(line.get("engine_busy_seconds")), _number(line.get("step_seconds"))
    return busy / wall if busy is not None and wall else None


PANELS: tuple[tuple[str, str, tuple[Quantity, ...]], ...] = (
    ("Reward", "", (Quantity("training", _of("reward")), Quantity("held out", _of("reward"), "eval"))),
    ("Loss", "", (Quantity("loss", _of("loss")),)),
    ("KL", "nats", (Quantity("to the sampler", _of("approx_kl")), Quantity("to the reference", _of("kl_reference")))),
    ("Entropy", "nats", (Quantity("entropy", _of("entropy")),)),
    ("Mismatch", "nats", (Quantity("mean", _of("mismatch_mean")), Quantity("largest", _of("mismatch_max")))),
    ("Staleness", "policy versions", (Quantity("largest", _of("staleness")),)),
    ("Engine busy", "share of the time", (Quantity("busy", _busy_share),)),
    (
        "Tokens",
        "per step",
        tuple(Quantity(name, _of(f"{name}_tokens")) for name in ("sampled", "trained", "computed")),
    ),
    (
        "Time",
        "seconds per step",
        (
            Quantity("waiting for rollouts", _of("waiting_seconds")),
            Quantity("training", _of("training_seconds")),
            Quantity("weight sync", _of("seconds"), "sync"),
        ),
    ),
)
"""Title, unit and quantities of each panel."""


def draw_panels(runs: Sequence[tuple[str, Sequence[Json]]]) -> list[Panel]:
    """Draw the curves of runs. `runs`: name and lines of metrics.jsonl of each run. Panels without a curve are left
    out."""
    found = (_draw(title, unit, quantities, runs) for title, unit, quantities in PANELS)
    return [panel for panel in found if panel is not None]


def _draw(
    title: str, unit: str, quantities: Sequence[Quantity], runs: Sequence[tuple[str, Sequence[Json]]]
) -> Panel | None:
    curves = []
    for run, (name, lines) in enumerate(runs):
        for index, quantity in enumerate(quantities):
            label = name if len(quantities) == 1 else f"{name}: {quantity.name}"
            points = list(_points(quantity, lines))
            if points:
                curves.append(Curve(label, run, index, [step for step, _ in points], [value for _, value in points]))
    if not curves:
        return None
    steps = [step for curve in curves for step in curve.steps]
    values = [value for curve in curves for value in curve.values]
    low, high = min(values), max(values)
    if low == high:  # one step, or equal values: the axis begins or ends at zero
        low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
    drawn = sorted({curve.quantity for curve in curves}) if len(quantities) > 1 else []
    legend = {index: quantities[index].name for index in drawn}
    return Panel(title, unit, legend, curves, low, high, min(steps), max(steps))


def _points(quantity: Quantity, lines: Iterable[Json]) -> Iterable[tuple[int, float]]:
    for line in lines:
        value = quantity.read(line) if line["kind"] == quantity.kind else None
        if value is not None and math.isfinite(value):
            yield line["step"], value
