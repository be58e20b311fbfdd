"""What a run says of itself: one JSON line per event in RUN/metrics.jsonl, the same lines where others look for them
(`published`), and TensorBoard where it is installed.

Lines of `kind` "step" hold one step each, of "eval" an evaluation, of "sync" a weight sync, of "start" a (re)start. A
resumed run first drops the lines of steps that its checkpoint does not hold: those steps never happened.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polar_proxy.training.checkpoint import write_file
from polar_proxy.training.published import MetricsSink
from polar_proxy.training.student import t_quantile
from polar_proxy.types import Json

FILE = "metrics.jsonl"


class MetricsLog:
    """The writer of one run; `with Metrics(run) as metrics`. What is written is in the file at once, and published by
    `publish`."""

    def __init__(self, run: Path, published: MetricsSink | None = None) -> None:
        self._run = run
        self._published = published
        self._known: int | None = None
        """Lines that are published; None: whatever is, is to be replaced."""
        self._waiting: list[Json] = []
        self._file: Any = None
        self._board: Any = None

    def __enter__(self) -> MetricsLog:
        self._run.mkdir(parents=True, exist_ok=True)
        self._file = (self._run / FILE).open("ab")
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            done = max((line["step"] for line in read_lines(self._run)), default=0)
            # TensorBoard forgets as the file does: what a killed process wrote of steps behind the checkpoint.
            self._board = SummaryWriter(str(self._run / "tensorboard"), purge_step=done + 1)  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, kind: str, step: int, values: Json) -> None:
        """`step`: how many steps are done."""
        line = {"kind": kind, "step": step, "at": time.time(), **values}
        written = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)
        self._file.write(written + b"\n")
        self._file.flush()
        if self._published is not None:
            self._waiting.append(orjson.loads(written))
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
            self._board.flush()

    async def publish(self) -> None:
        """What is written and not published yet; all of the file at first, and where that did not succeed before."""
        if self._published is None or not self._waiting:
            return
        lines, self._waiting = self._waiting, []
        if self._known is None:
            lines = list(read_lines(self._run))
            kept = await self._published.begin(lines)
        else:
            kept = await self._published.add(self._known, lines)
        self._known = (self._known or 0) + len(lines) if kept else None


class StepTimer:
    """How long a step took, from the line of the step before it to its own, and for how much of that the engine had
    work: what each costs is then told by the sums. Evaluations are left out of both."""

    def __init__(self, busy: Callable[[], float] | None) -> None:
        """`busy`: seconds so far in which at least one call was with the engine; None where nobody counts them."""
        self._busy = busy
        self._began = self._now()

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._busy() if self._busy else 0.0

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        before = self._now()
        yield
        after = self._now()
        self._began = (self._began[0] + after[0] - before[0], self._began[1] + after[1] - before[1])

    def close(self) -> Json:
        """Seconds of this window; the next one begins."""
        now, began = self._now(), self._began
        self._began = now
        return {"step_seconds": now[0] - began[0], "engine_busy_seconds": now[1] - began[1] if self._busy else None}


def time_by_phase(lines: Sequence[Json]) -> Json:
    """Where the time of a run went: seconds in all and in the mean of its steps, and the engine's busy share.

    `rollouts` runs from the begin of a step's first rollout to the end of its last, beside the others where rollouts
    run ahead; `waiting` is for them. `lines`: of metrics.jsonl.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    spent = {
        name: sum(step.get(f"{name}_seconds") or 0.0 for step in steps) for name in ("rollouts", "waiting", "training")
    }
    spent |= {kind: sum(line["seconds"] for line in lines if line["kind"] == kind) for kind in _BESIDE}
    # Lines of an older Polar have neither.
    known = [step for step in steps if step.get("engine_busy_seconds") is not None]
    wall = sum(step["step_seconds"] for step in known)
    return {
        "seconds": {name: round(value, 3) for name, value in spent.items()},
        "seconds_per_step": {
            name: round(value / len(steps), 3) for name, value in spent.items() if steps and name != "eval"
        },
        "engine_busy_share": sum(step["engine_busy_seconds"] for step in known) / wall if wall else None,
    }


_BESIDE = ("sync", "checkpoint", "eval")


def drop_lines_after(run: Path, step: int) -> int:
    """Drop the lines of steps behind `step`; returns how many steps are forgotten so. Before `MetricsLog` is
    entered."""
    lines = list(read_lines(run))
    kept = [line for line in lines if line["step"] <= step]
    if (run / FILE).exists():
        write_file(run / FILE, b"".join(orjson.dumps(line) + b"\n" for line in kept))
    steps: list[int] = [line["step"] for line in lines if line["kind"] == "step"]
    return sum(done > step for done in steps)


def read_lines(run: Path) -> Iterator[Json]:
    """The lines of a run; a last one that a kill cut short is left out."""
    path = run / FILE
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:
            continue


def mean_with_interval(values: Sequence[float]) -> Json:
    """Mean and half the width of its 95 % interval by Student's t; null where there are too few."""
    n = len(values)
    if n == 0:
        return {"reward": None, "reward_interval": None, "scored": 0}
    mean = float(np.mean(values))
    half = None
    if n > 1:
        half = t_quantile(0.975, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return {"reward": mean, "reward_interval": half, "scored": n}
