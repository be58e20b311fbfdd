"""Stages and model calls of a run on a time line: bars in thousandths of the run's duration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polar_proxy.store.repositories.calls import CallSummary
from polar_proxy.store.repositories.rollouts import RolloutRow, StageRow

SCALE = 1000


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the time line. `x` and `width` are in 1/SCALE of the whole line; `kind` is a stage, or a part of a
    call."""

    kind: str
    x: float
    width: float
    seconds: float
    title: str


@dataclass(frozen=True, slots=True)
class TimeRow:
    label: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Timeline:
    seconds: float
    rows: Sequence[TimeRow]
    totals: dict[str, float]
    """Seconds by stage. `engine` (a call waits for the engine) and `agent` (the rest) are the parts of `running`. In a
    session without a rollout, they are the parts of the whole time."""


def draw_timeline(
    rollout: RolloutRow | None, stages: Sequence[StageRow], calls: Sequence[CallSummary], now: float
) -> Timeline | None:
    """Return the time line of a rollout, or of a session without a rollout; None if there is nothing to draw."""
    times = [stage.started_at for stage in stages] + [call.started_at for call in calls]
    ends = [stage.ended_at or now for stage in stages] + [call.ended_at for call in calls]
    if rollout is not None:
        times.append(rollout.created_at)
        ends.append(rollout.ended_at or now)
    if not times:
        return None
    start, end = min(times), max(ends)
    scale = SCALE / max(end - start, 1e-6)

    def bar(kind: str, begins: float, stops: float, title: str) -> Bar:
        width = max((stops - begins) * scale, 1.0)
        return Bar(kind, round((begins - start) * scale, 2), round(width, 2), stops - begins, title)

    rows = []
    totals: dict[str, float] = {}
    if rollout is not None:
        first = min((stage.started_at for stage in stages), default=rollout.ended_at or now)
        bars = [bar("queued", rollout.created_at, first, "queued")]
        for stage in stages:
            title = stage.stage if stage.outcome in (None, "ok") else f"{stage.stage}: {stage.outcome}"
            title += f" ({stage.cause})" if stage.cause else ""
            title += f", attempt {stage.attempt}" if stage.attempt > 1 else ""
            bars.append(bar(stage.stage, stage.started_at, stage.ended_at or now, title))
        for one in bars:
            totals[one.kind] = totals.get(one.kind, 0.0) + one.seconds
        rows.append(TimeRow("stages", bars))
    if calls:
        parts = []
        for number, call in enumerate(calls, 1):
            first_token = call.first_token_at or call.ended_at
            parts.append(bar("waiting", call.started_at, first_token, f"call {number}: until the first token"))
            if call.first_token_at is not None:
                parts.append(bar("sampling", first_token, call.ended_at, f"call {number}: sampling"))
        rows.append(TimeRow("engine", parts))
        busy = covered((call.started_at, call.ended_at) for call in calls)
        totals["engine"] = busy
        running = totals.get("running", end - start if rollout is None else 0.0)
        totals["agent"] = max(running - busy, 0.0)
    return Timeline(end - start, rows, totals)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total = 0.0
    reached = float("-inf")
    for begins, stops in sorted(spans):
        total += max(stops - max(begins, reached), 0.0)
        reached = max(reached, stops)
    return total
