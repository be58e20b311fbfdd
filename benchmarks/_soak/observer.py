"""The observer of `benchmarks/soak.py`: memory, descriptors, log size and commit times of a running server."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from statistics import fmean

from benchmarks._soak.clients import SoakCounts
from benchmarks._stacks.stacks import RunningStack

BLOCKS = 20
"""Samples are averaged in blocks before the regression, because neighbouring samples are not independent."""
_BUCKET = re.compile(r'^polar_commit_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)
_LOST = re.compile(r"^polar_lost_calls_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    at: float
    """Seconds since the start of the load."""
    calls: int
    """Complete answers so far."""
    rss_mb: float
    cpu: float
    """Seconds of processor time that the server has used, a measure of cost that holds on a busy machine."""
    load: float
    """Number of processes of the machine that run or wait to run, averaged over a minute."""
    descriptors: int
    wal_mb: float
    commits: dict[float, float]
    """Cumulative counts of commits by upper bound in seconds."""
    lost: float
    """Number of calls answered without being recorded, from the server's metrics."""


class Observer:
    """Samples a server until it is stopped. `wal`: returns the size of the database's log in bytes."""

    def __init__(self, server: RunningStack, wal: Callable[[], int], counts: SoakCounts) -> None:
        assert server.process is not None
        self._server, self._pid = server, server.process.pid
        self._url, self._wal, self._counts = f"http://127.0.0.1:{server.port}/metrics", wal, counts
        self._began = time.monotonic()
        self.samples: list[Sample] = []
        self.problem: str | None = None
        """Why the last sample could not be taken; None if it was taken."""

    async def run(self, seconds: float) -> None:
        while True:
            await self.observe()
            await asyncio.sleep(seconds)

    async def observe(self) -> None:
        """Take a sample; if the server does not answer, set `problem` instead."""
        try:
            self.samples.append(await asyncio.to_thread(self._sample))
            self.problem = None
        except (OSError, HTTPException, ValueError) as error:
            self.problem = repr(error)

    def _sample(self) -> Sample:
        with urllib.request.urlopen(self._url, timeout=60) as answer:
            metrics = answer.read().decode()
        status = Path(f"/proc/{self._pid}/status").read_text()
        (resident,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        return Sample(
            at=time.monotonic() - self._began,
            calls=len(self._counts.answered),
            rss_mb=int(resident) / 1024,
            cpu=self._server.cpu_seconds(),
            load=os.getloadavg()[0],
            descriptors=len(os.listdir(f"/proc/{self._pid}/fd")),
            wal_mb=self._wal() / 2**20,
            commits={float(bound): float(count) for bound, count in _BUCKET.findall(metrics)},
            lost=sum(map(float, _LOST.findall(metrics))),
        )


def slope(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the growth of memory in MB per 10,000 calls and its standard error, by least squares over block means."""
    size = max(1, len(samples) // BLOCKS)
    blocks = [samples[start : start + size] for start in range(0, len(samples) - size + 1, size)]
    calls = [fmean(one.calls for one in block) / 10_000 for block in blocks]
    memory = [fmean(one.rss_mb for one in block) for block in blocks]
    count, middle, level = len(blocks), fmean(calls), fmean(memory)
    spread = sum((x - middle) ** 2 for x in calls)
    if count < 3 or spread == 0:
        return math.nan, math.nan
    growth = sum((x - middle) * (y - level) for x, y in zip(calls, memory, strict=True)) / spread
    rest = sum((y - level - growth * (x - middle)) ** 2 for x, y in zip(calls, memory, strict=True))
    return growth, math.sqrt(rest / (count - 2) / spread)


def commit_p99(first: Sample, last: Sample) -> float:
    """Return the 99th percentile in seconds of the commits between two samples, interpolated within its bucket."""
    counts = {bound: total - first.commits.get(bound, 0.0) for bound, total in sorted(last.commits.items())}
    wanted = 0.99 * counts[math.inf]
    below, lower = 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted and count > below:
            return lower if bound == math.inf else lower + (bound - lower) * (wanted - below) / (count - below)
        below, lower = count, bound
    return math.nan
