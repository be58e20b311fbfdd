"""Metrics of a run: statistics of each optimiser step, one JSON line per event in RUN/metrics.jsonl, and copies of
those lines in the database or at a server (`MetricsSink`) and in TensorBoard if it is installed.

A line of `kind` "step" describes one training step, "eval" an evaluation, "sync" a weight sync, "checkpoint" a
checkpoint and "start" a start or resume. A resumed run first drops the lines of steps that its checkpoint does not
contain, because those steps are repeated.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.training import checkpoint, curves
from polar_proxy.training.losses import LossStats
from polar_proxy.types import Json

FILE = "metrics.jsonl"
NORMAL_95 = 1.96
"""97.5 % quantile of the normal distribution: half the width of a 95 % interval in standard errors."""


# Statistics of a step


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of the last epoch of a step. The mismatch is measured with the weights before the step."""

    loss: float
    tokens: int
    """Trained tokens."""
    computed_tokens: int
    """Tree nodes put through the model, forward and backward, in one epoch."""
    flat_tokens: int
    """Token count without prefix sharing."""
    microbatches: int
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    ratio_mean: float
    ratio_max: float
    clipped_share: float
    dropped_share: float
    approx_kl: float
    entropy: float
    mismatch_mean: float
    """Mean of |trainer's log-probability before the step - recorded one|, nats."""
    mismatch_max: float
    kl_reference: float | None
    observation_loss: float | None
    """Cross-entropy of the observed tokens, nats per token; None without ECHO."""
    seconds: float

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(slots=True)
class StepAccumulator:
    """Sums over the microbatches that one process computes in one epoch."""

    loss: float = 0.0
    losses: list[LossStats] = field(default_factory=list)
    kl_sums: list[float] = field(default_factory=list)
    """For each microbatch the KL to the reference, summed over tokens; empty without a reference."""
    observation_sum: float = 0.0
    """Cross-entropy of the observed tokens, summed."""
    observed: int = 0
    computed_tokens: int = 0


def step_stats(
    accumulators: Sequence[StepAccumulator],
    *,
    flat_tokens: int,
    learning_rate: float,
    grad_norm: float,
    seconds: float,
) -> StepStats:
    """Reduce the accumulators of all processes."""
    losses = [stats for each in accumulators for stats in each.losses]
    kl_sums = [kl_sum for each in accumulators for kl_sum in each.kl_sums]
    tokens = sum(stats.tokens for stats in losses)
    observed = sum(each.observed for each in accumulators)
    means = ("ratio_mean", "clipped_share", "dropped_share", "approx_kl", "entropy", "mismatch_mean")
    return StepStats(
        loss=sum(each.loss for each in accumulators),
        tokens=tokens,
        computed_tokens=sum(each.computed_tokens for each in accumulators),
        flat_tokens=flat_tokens,
        microbatches=len(losses),
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        ratio_max=max(stats.ratio_max for stats in losses),
        mismatch_max=max(stats.mismatch_max for stats in losses),
        kl_reference=sum(kl_sums) / tokens if kl_sums else None,
        observation_loss=sum(each.observation_sum for each in accumulators) / observed if observed else None,
        seconds=seconds,
        **{name: sum(getattr(stats, name) * stats.tokens for stats in losses) / tokens for name in means},
    )


def mean_reward(rewards: Sequence[float]) -> Json:
    """Return the mean with half the width of its 95 % interval (normal approximation); null with too few values."""
    n = len(rewards)
    if n == 0:
        return {"reward": None, "reward_interval": None, "scored": 0, "solved_share": None}
    half_width = NORMAL_95 * float(np.std(rewards, ddof=1)) / math.sqrt(n) if n > 1 else None
    solved = sum(reward >= 1.0 for reward in rewards) / n
    return {"reward": float(np.mean(rewards)), "reward_interval": half_width, "scored": n, "solved_share": solved}


# The log of a run


class MetricsSink(Protocol):
    """A second place for the lines of one run. Both methods return whether the lines were stored.

    After a False the whole file is sent again by `replace`.
    """

    async def replace(self, lines: Sequence[Json]) -> bool:
        """Store these as all lines of the run."""
        ...

    async def append(self, first: int, lines: Sequence[Json]) -> bool:
        """Store lines number `first` and following. Idempotent."""
        ...


class StoreSink:
    """Keeps a run's lines in the database."""

    def __init__(self, store: Store, run_id: str, name: str, config: Json) -> None:
        self._store, self._run_id, self._name, self._config = store, run_id, name, config

    async def replace(self, lines: Sequence[Json]) -> bool:
        await self._store.training.put_run(self._run_id, self._name, self._config, lines)
        return True

    async def append(self, first: int, lines: Sequence[Json]) -> bool:
        await self._store.training.add_lines(self._run_id, first, lines)
        return True


class MetricsLog:
    """Writer of one run's metrics: `with MetricsLog(run) as log`. `write` goes to the file, `publish` to the sink."""

    def __init__(self, run: Path, sink: MetricsSink | None = None) -> None:
        self._run = run
        self._sink = sink
        self._published: int | None = None
        """Lines that the sink holds. None: unknown, so the next `publish` replaces them all."""
        self._unpublished: list[Json] = []
        self._file: Any = None
        self._tensorboard: Any = None

    def __enter__(self) -> MetricsLog:
        self._run.mkdir(parents=True, exist_ok=True)
        self._file = (self._run / FILE).open("ab")
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            last = max((line["step"] for line in read_lines(self._run)), default=0)
            # Like the file, TensorBoard drops what a killed process wrote after its last checkpoint.
            self._tensorboard = SummaryWriter(str(self._run / "tensorboard"), purge_step=last + 1)  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def write(self, kind: str, step: int, values: Json) -> None:
        """Append a line. `step` is the number of steps done."""
        line = orjson.dumps(
            {"kind": kind, "step": step, "at": time.time(), **values}, option=orjson.OPT_SERIALIZE_NUMPY
        )
        self._file.write(line + b"\n")
        self._file.flush()
        if self._sink is not None:
            self._unpublished.append(orjson.loads(line))
        if self._tensorboard is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._tensorboard.add_scalar(f"{kind}/{name}", value, step)
            self._tensorboard.flush()

    async def publish(self) -> None:
        """Send new lines to the sink; the whole file at first, and after a failure."""
        if self._sink is None or not self._unpublished:
            return
        lines, self._unpublished = self._unpublished, []
        if self._published is None:
            lines = list(read_lines(self._run))
            stored = await self._sink.replace(lines)
        else:
            stored = await self._sink.append(self._published, lines)
        self._published = (self._published or 0) + len(lines) if stored else None


class StepTimer:
    """Measures the wall time of each step, and for how much of it the engine was busy. Evaluations are left out."""

    def __init__(self, engine_busy_seconds: Callable[[], float] | None) -> None:
        """`engine_busy_seconds`: seconds so far in which at least one call was with the engine; None if unknown."""
        self._engine_busy_seconds = engine_busy_seconds
        self._started = self._now()

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._engine_busy_seconds() if self._engine_busy_seconds else 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = self._now()
        yield
        after = self._now()
        self._started = (self._started[0] + after[0] - before[0], self._started[1] + after[1] - before[1])

    def lap(self) -> Json:
        """Return the seconds since the last lap, and start the next one."""
        now, started = self._now(), self._started
        self._started = now
        busy = now[1] - started[1] if self._engine_busy_seconds else None
        return {"step_seconds": now[0] - started[0], "engine_busy_seconds": busy}


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


def drop_lines_after(run: Path, step: int) -> int:
    """Drop the lines of later steps and return the number of those steps. Call it before `MetricsLog` is entered."""
    lines = list(read_lines(run))
    kept = [line for line in lines if line["step"] <= step]
    if (run / FILE).exists():
        checkpoint.write_file(run / FILE, b"".join(orjson.dumps(line) + b"\n" for line in kept))
    steps: list[int] = [line["step"] for line in lines if line["kind"] == "step"]
    return sum(done > step for done in steps)


def time_by_phase(lines: Sequence[Json]) -> Json:
    """Return the seconds that a run spent in each phase, in total and per step, and the engine's busy share.

    `rollouts` lasts from the start of a step's first rollout to the end of its last one, and overlaps with the other
    phases when rollouts run ahead; `waiting` is the time spent waiting for them. `lines`: those of metrics.jsonl.
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
        "series": curves.series(lines),
    }
