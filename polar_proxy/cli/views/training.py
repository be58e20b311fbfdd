"""The view of a training run: its curves as sparklines, counts of the data that was left out, and the remaining time.
While the run goes on, the rollouts of the current step are shown, too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from polar_proxy.cli.output import err, format_counts, format_number, format_seconds, make_table, styled
from polar_proxy.cli.views.progress import RolloutProgressView, live_view
from polar_proxy.types import Json

if TYPE_CHECKING:
    from rich.table import Table

    from polar_proxy.types import CallRecord

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
"""Width of a sparkline in columns; a longer curve shows its last values."""
_TIMED_STEPS = 10
"""Number of the latest steps whose mean duration predicts the time left."""
CURVES = (
    ("reward", "reward"),
    ("solved_share", "solved"),
    ("loss", "loss"),
    ("entropy", "entropy"),
    ("approx_kl", "kl"),
    ("mismatch_max", "mismatch"),
    ("length_mean", "length"),
    ("step_seconds", "seconds"),
)
"""Pairs (field of a step's line in metrics.jsonl, name of the field's curve)."""


def sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """Return the last `width` values as block characters. The height of a block shows where its value lies between the
    least and the largest of these values. A missing value is a space."""
    shown = values[-width:]
    known = [value for value in shown if value is not None]
    if not known:
        return " " * len(shown)
    low, span = min(known), (max(known) - min(known)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(" " if value is None else _BLOCKS[round((value - low) / span * top)] for value in shown)


def curve_table(steps: Sequence[Json]) -> Table:
    """Return a sparkline for each curve, with its least, largest and last value. `steps`: lines of metrics.jsonl."""
    rows = []
    for name, label in CURVES:
        values = [step.get(name) for step in steps]
        known = [value for value in values if value is not None]
        if known:
            ends = (format_number(value, ".3g") for value in (min(known), max(known), values[-1]))
            rows.append((label, sparkline(values), *ends))
    return make_table(("", "curve", "least", "largest", "last"), rows, right=("least", "largest", "last"))


def left_out_lines(steps: Sequence[Json]) -> Iterator[str]:
    """Yield a line for each reason why data was left out of training, with the numbers of rollouts and tokens."""
    rollouts: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for step in steps:
        for reason, counts in step["skipped"].items():
            rollouts[reason] = rollouts.get(reason, 0) + counts["rollouts"]
            tokens[reason] = tokens.get(reason, 0) + counts.get("tokens", 0)
    if rollouts:
        yield f"rollouts not trained: {format_counts(rollouts)} ({sum(tokens.values()):,} tokens)"
    if stale := sum(step["dropped_stale"] for step in steps):
        yield f"groups dropped as too stale: {stale}"


def seconds_left(steps: Sequence[Json], planned: int) -> float | None:
    """Estimate the seconds until the last planned step, from the mean of the latest steps; None if no step has
    ended."""
    times = [step["step_seconds"] for step in steps[-_TIMED_STEPS:] if step.get("step_seconds") is not None]
    return sum(times) / len(times) * max(0, planned - steps[-1]["step"]) if times else None


class TrainingProgressView:
    """The progress of `polar train grpo`: a live view on a terminal, else one line for each stage of a rollout.

    It is the run's TrainingObserver.
    """

    def __init__(self, planned: int, *, quiet: bool) -> None:
        """`planned`: number of steps of the run."""
        self._planned = planned
        self._steps: list[Json] = []
        self._is_live = err.is_terminal and not quiet
        self._rollouts = RolloutProgressView(quiet=True, prints=not self._is_live)
        self.headline = "loading the trainer"
        self._since = time.monotonic()

    def show(self) -> AbstractContextManager[object]:
        return live_view(self.view, self._is_live)

    def resume(self, steps: Sequence[Json]) -> None:
        """Show the curves of the steps that a resumed run has done, from their lines in metrics.jsonl."""
        self._steps = list(steps)

    def stage(self, rollout_id: str, status: str, detail: str = "", reward: float | None = None) -> None:
        self._rollouts.stage(rollout_id, status, detail, reward)

    def session(self, rollout_id: str, session_id: str) -> None:
        self._rollouts.session(rollout_id, session_id)

    def call(self, record: CallRecord) -> None:
        self._rollouts.call(record)

    def log(self, kind: str, step: int, values: Json) -> None:
        self.headline, self._since = f"after {kind} {step}", time.monotonic()
        if kind == "step":
            self._steps = [*(line for line in self._steps if line["step"] < step), {"step": step, **values}]
            self._rollouts.forget_ended()

    def close(self) -> None: ...

    def view(self) -> RenderableType:
        done = self._steps[-1]["step"] if self._steps else 0
        waited = format_seconds(time.monotonic() - self._since)
        parts: list[RenderableType] = [
            styled(
                "[bold]step {} of {}[/]  {}, {} ago", min(done + 1, self._planned), self._planned, self.headline, waited
            )
        ]
        parts.append(self._rollouts.table())
        if self._steps:
            parts += [curve_table(self._steps), *map(Text, left_out_lines(self._steps))]
            parts.append(Text(f"about {format_seconds(seconds_left(self._steps, self._planned))} left"))
        return Group(*parts)
