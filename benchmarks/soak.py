"""Hundreds of thousands of calls through one `polar serve`: do its memory, descriptors or database log keep growing?

    python benchmarks/soak.py                                # 200,000 calls in 2,000 sessions, 500 at a time, on SQLite
    python benchmarks/soak.py --db postgresql
    python benchmarks/soak.py --calls 10000 --sessions 100 --open 50
    python benchmarks/soak.py --long 100                     # 100 sessions of 200 turns that grow to 26,000 tokens

The engine is scripted; some of its answers are errors, broken off or slow. Some requests are broken off, malformed or
repeated. README.md explains the figures. The exit code is 1 if a bound is broken, and 2 if the soak cannot
be run on this machine.

The figures so far are written to the file --out every ten seconds. Its last version also has the reason why the run
ended: it was complete, a process ended (and how), or a signal came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

import uvloop
from sqlalchemy import func, select

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._soak.clients import Shape, SoakCounts, run_clients  # noqa: E402
from benchmarks._soak.observer import Observer, Sample, commit_p99, slope  # noqa: E402
from benchmarks._stacks.kill_targets import Postgres  # noqa: E402
from benchmarks._stacks.stacks import RunningStack, StackError, free_port, spawn, tail, wait_ready  # noqa: E402
from benchmarks._stacks.traffic import MODEL  # noqa: E402
from polar_proxy.store import open_store, schema  # noqa: E402
from tests.fakes.vllm_folder import write_model_folder  # noqa: E402

SHORT = Shape(first=128, added=24, tokens=8, turns=100)
LONG = Shape(first=2000, added=105, tokens=16, turns=200)
WARM_UP = 0.5
"""Share of the run, at its beginning, that the regression leaves out."""
MAX_SLOPE_MB = 1.0
"""Maximum growth of memory, in MB per 10,000 calls after the warm-up, beyond two standard errors."""
MAX_DESCRIPTORS = 32
"""Maximum growth of the median number of descriptors from the second to the last quarter of the calls. A session has
one or two descriptors open at any moment."""
MAX_WAL_MB = {"sqlite": 128.0, "postgresql": 1100.0}
"""Maximum size of the database's log in MB. PostgreSQL keeps up to max_wal_size, which is 1 GB by default."""
MAX_P99_GROWTH, P99_NOISE = 2.0, 0.1
"""The last quarter's p99 of the commit time may be this factor times that of the first quarter, plus these seconds."""


class Soak:
    """One run: database, engine and server in processes of their own, and the clients in this process."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments = folder, arguments
        self.shape: Shape = arguments.shape
        self.counts = SoakCounts()

    def start(self, stack: ExitStack) -> None:
        if self.arguments.db == "postgresql":
            postgres = Postgres()
            stack.callback(postgres.stop)
            self.db, self._wal = postgres.url, postgres.wal_bytes
        else:
            file = self.folder / "polar.db"
            self.db, self._wal = str(file), lambda: _size(Path(f"{file}-wal"))
        self.engine = self._start_engine(stack)
        self.server = self._start_server(stack)

    def _start_engine(self, stack: ExitStack) -> RunningStack:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks._soak.engine", "--port", str(port)]
        command += ["--faults", str(self.arguments.faults), "--seed", str(self.arguments.seed)]
        command += ["--folder", str(write_model_folder(self.folder / "model"))]
        for name in ("first", "added", "tokens", "turns"):
            command += [f"--{name}", str(getattr(self.shape, name))]
        process, log = spawn("engine", command, None, self.folder)
        engine = RunningStack("engine", "", port, process=process, log=log)
        stack.callback(engine.stop)
        return wait_ready(engine, f"http://127.0.0.1:{port}/health")

    def _start_server(self, stack: ExitStack) -> RunningStack:
        port = free_port()
        leak = self.arguments.leak_bytes
        prepare = f"from benchmarks._soak.leak import leak; leak({leak}); " if leak else ""
        command = [
            sys.executable,
            "-c",
            f"{prepare}import sys; from polar_proxy.cli import main; sys.exit(main())",
            "serve",
        ]
        command += ["--port", str(port), "--db", self.db, "--model", MODEL]
        command += ["--engine", "vllm", "--engine-url", f"http://127.0.0.1:{self.engine.port}"]
        environment = {"POLAR_HOME": str(self.folder / "home")}
        if self.arguments.retry_window is not None:
            environment["POLAR_GATEWAY__RETRY_WINDOW_SECONDS"] = str(self.arguments.retry_window)
        if self.arguments.cache_mb is not None:
            environment["POLAR_GATEWAY__CACHE_MB"] = str(self.arguments.cache_mb)
        if self.arguments.calls_in_memory is not None:
            environment["POLAR_GATEWAY__CALLS_IN_MEMORY"] = str(self.arguments.calls_in_memory)
        process, log = spawn("server", command, None, self.folder, **environment)
        server = RunningStack("server", "", port, process=process, log=log)
        stack.callback(server.stop)
        return wait_ready(server, f"http://127.0.0.1:{port}/healthz")

    async def run(self) -> dict[str, Any]:
        """Run the clients, and return the figures. The run ends early if a process ends or a signal comes."""
        observer = Observer(self.server, self._wal, self.counts)
        clients = asyncio.create_task(self._run_clients())
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, _end, ended, f"the soak was ended by {number.name}")
        observing = [
            asyncio.create_task(observer.run(self.arguments.interval)),
            asyncio.create_task(self._report_progress(observer)),
            asyncio.create_task(self._watch_processes(ended)),
        ]
        began = time.monotonic()
        await asyncio.wait([clients, ended, *observing], return_when=asyncio.FIRST_COMPLETED)
        seconds = time.monotonic() - began
        if not ended.done():
            await observer.observe()
        for task in (clients, *observing):
            task.cancel()
        for outcome in await asyncio.gather(clients, *observing, return_exceptions=True):
            if isinstance(outcome, Exception):
                _end(ended, f"the soak failed: {outcome!r}")
        await asyncio.to_thread(self.server.stop)
        result = self._figures(observer, seconds) | {"ended": ended.result() if ended.done() else None}
        self.write(result)
        return result | await self._stored()

    async def _run_clients(self) -> None:
        given = self.arguments
        await run_clients(
            self.server.port, given.sessions, given.open, self.shape, given.faults, given.seed, self.counts
        )

    async def _watch_processes(self, ended: asyncio.Future[str]) -> None:
        """Set `ended` to the name of the first process that ends, with its exit code or signal."""
        while True:
            for stack in (self.server, self.engine):
                assert stack.process is not None
                assert stack.log is not None
                code = stack.process.poll()
                if code is not None:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    _end(ended, f"the {stack.name} {how}; the end of its log: {tail(stack.log) or 'empty'}")
            await asyncio.sleep(0.5)

    async def _report_progress(self, observer: Observer) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(10)
            if observer.problem is not None:
                print(f"no sample: {observer.problem}", file=sys.stderr, flush=True)
            if not observer.samples:
                continue
            last = observer.samples[-1]
            print(
                f"{last.at:6.0f} s  {last.calls:7,} calls  {self.counts.open:4} sessions open  {last.rss_mb:7.1f} MB"
                f"  {last.descriptors:5} descriptors  WAL {last.wal_mb:6.1f} MB  load {last.load:4.1f}",
                file=sys.stderr,
                flush=True,
            )
            self.write(self._figures(observer, time.monotonic() - began) | {"ended": "not yet"})

    def write(self, result: dict[str, Any]) -> None:
        """Replace the file --out, so that it is whole at any moment."""
        out: Path = self.arguments.out
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(out)

    def _figures(self, observer: Observer, seconds: float) -> dict[str, Any]:
        counts, samples = self.counts, observer.samples
        if not samples:
            return {"db": self.arguments.db, "answered": len(counts.answered), "unobserved": observer.problem}
        steady = [one for one in samples if one.calls >= WARM_UP * samples[-1].calls]
        # While the last sessions end, fewer and fewer are open.
        busy = [one for one in steady if one.at <= seconds - self.arguments.interval]
        growth, error = slope(busy)
        quarters = [_quarter(samples, number) for number in range(4)]
        memory = {str(share): _at(samples, share).rss_mb for share in (0.1, 0.25, 0.5, 0.75, 1.0)}
        return {
            "db": self.arguments.db,
            "seconds": round(seconds, 1),
            "calls_per_second": round(len(counts.answered) / seconds, 1),
            "sessions": self.arguments.sessions,
            "open_at_once": counts.most_open,
            "last_prompt_tokens": self.shape.last_prompt,
            "answered": len(counts.answered),
            "sent": counts.sent,
            "faults_of_clients": dict(counts.habits),
            "failed_attempts": {str(status): number for status, number in sorted(counts.failed.items())},
            "rss_mb_at_share_of_calls": {share: round(mb, 1) for share, mb in memory.items()},
            "slope_mb_per_10000_calls": [round(growth, 3), round(error, 3)],
            "descriptors": [round(median(one.descriptors for one in quarter)) for quarter in quarters],
            "wal_mb": [round(max(one.wal_mb for one in quarter), 1) for quarter in quarters],
            "server_cpu_ms_per_call": [round(_cpu_ms_per_call(quarter), 2) for quarter in quarters],
            "load_of_machine": [round(fmean(one.load for one in quarter), 1) for quarter in quarters],
            "commit_p99_ms": [round(1e3 * commit_p99(quarter[0], quarter[-1]), 1) for quarter in quarters],
            "call_p99_ms": [round(1e3 * self._latency_p99(number), 1) for number in range(4)],
            "lost": samples[-1].lost,
            "wrong": counts.wrong,
        }

    def _latency_p99(self, quarter: int) -> float:
        latencies = [latency for _, latency in self.counts.finished]
        own = sorted(latencies[len(latencies) * quarter // 4 : len(latencies) * (quarter + 1) // 4])
        return own[int(0.99 * len(own))] if own else float("nan")

    async def _stored(self) -> dict[str, Any]:
        """Compare the stored calls with the clients' counts."""
        call = schema.calls.c
        async with open_store(self.db, create=False) as store, store.database.reading() as connection:
            rows = (await connection.execute(select(call.call_id, call.status))).all()
            repeated = select(call.session_id).where(call.status == "ok").group_by(call.session_id, call.messages_node)
            doubled = select(func.count()).select_from(repeated.having(func.count() > 1).subquery())
            twice = (await connection.execute(doubled)).scalar_one()
        stored = {row.call_id for row in rows if row.status == "ok"}
        missing = [call_id for call_id in self.counts.answered if call_id not in stored]
        statuses: dict[str, int] = {}
        for row in rows:
            statuses[row.status] = statuses.get(row.status, 0) + 1
        return {
            "stored": statuses,
            "missing": len(missing),
            "missing_examples": missing[:3],
            "recorded_twice": twice,
            "unexplained": max(0, len(rows) - self.counts.sent),
        }

    def broken_bounds(self, result: dict[str, Any]) -> list[str]:
        """Return a line for each bound that the figures break."""
        broken = [] if result["ended"] is None else [result["ended"]]
        if "slope_mb_per_10000_calls" not in result:
            return [*broken, f"no sample could be taken: {result['unobserved']}"]
        growth, error = result["slope_mb_per_10000_calls"]
        if not growth - 2 * error <= MAX_SLOPE_MB:
            broken.append(f"memory grows by {growth} +- {error} MB per 10,000 calls; the bound is {MAX_SLOPE_MB}")
        _, second, _, fourth = result["descriptors"]
        if fourth > second + MAX_DESCRIPTORS:
            broken.append(f"descriptors grew from {second} to {fourth}")
        if max(result["wal_mb"]) > MAX_WAL_MB[self.arguments.db]:
            broken.append(f"the database's log reached {max(result['wal_mb'])} MB")
        first, *_, last = result["commit_p99_ms"]
        if not last <= MAX_P99_GROWTH * first + 1e3 * P99_NOISE:
            broken.append(f"p99 of a commit rose from {first} to {last} ms")
        for name in ("missing", "recorded_twice", "unexplained", "lost", "wrong"):
            if result[name]:
                examples = f": {result[name][:3]}" if isinstance(result[name], list) else ""
                number = len(result[name]) if isinstance(result[name], list) else result[name]
                broken.append(f"{number:g} {name.replace('_', ' ')}{examples}")
        return broken


def _end(ended: asyncio.Future[str], reason: str) -> None:
    if not ended.done():
        ended.set_result(reason)


def _cpu_ms_per_call(quarter: list[Sample]) -> float:
    calls = quarter[-1].calls - quarter[0].calls
    return 1e3 * (quarter[-1].cpu - quarter[0].cpu) / calls if calls else math.nan


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _at(samples: list[Sample], share: float) -> Sample:
    return next(one for one in samples if one.calls >= share * samples[-1].calls)


def _quarter(samples: list[Sample], number: int) -> list[Sample]:
    """Return the samples in a quarter (0 to 3) of the calls, preceded by the last sample before it."""
    ends = [samples.index(_at(samples, share / 4)) for share in (number, number + 1)]
    return samples[ends[0] : ends[1] + 1]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--calls", type=int, default=200_000, help="in all")
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--open", type=int, default=None, help="sessions at a time (500; with --long 8)")
    parser.add_argument("--long", type=int, metavar="N", help="N long sessions instead")
    parser.add_argument("--faults", type=float, default=0.02, help="share of bad habits of clients, and of bad answers")
    parser.add_argument("--cache-mb", type=int, help="the server's gateway.cache_mb")
    parser.add_argument("--calls-in-memory", type=int, help="the server's gateway.calls_in_memory")
    parser.add_argument("--retry-window", type=float, help="the server's gateway.retry_window_seconds")
    parser.add_argument("--leak-bytes", type=int, help="let the server leak memory with each call, to test the bounds")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and database")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file of the figures (soak-DB.json in the folder for temporary files)")
    arguments = parser.parse_args()
    arguments.out = arguments.out or Path(tempfile.gettempdir()) / f"soak-{arguments.db}.json"
    if arguments.long:
        arguments.shape, arguments.sessions = LONG, arguments.long
    else:
        turns = max(1, round(arguments.calls / arguments.sessions))
        arguments.shape = Shape(SHORT.first, SHORT.added, SHORT.tokens, turns)
    arguments.open = min(arguments.sessions, arguments.open or (8 if arguments.long else 500))
    return arguments


def main() -> int:
    arguments = parse_arguments()
    folder = Path(tempfile.mkdtemp(prefix="polar-soak-"))
    try:
        with ExitStack() as stack:
            soak = Soak(folder, arguments)
            soak.start(stack)
            print(f"figures: {arguments.out}", file=sys.stderr, flush=True)
            result = uvloop.run(soak.run())
            result["broken"] = soak.broken_bounds(result)
            if lines := [line for line in (folder / "server.log").read_text().splitlines() if _is_problem(line)]:
                result["broken"].append(f"the server's log has {len(lines)} problems: {lines[:3]}")
            soak.write(result)
    except StackError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if arguments.keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:26}{json.dumps(value)}")
    for line in result["broken"]:
        print(f"BROKEN: {line}", file=sys.stderr)
    return 1 if result["broken"] else 0


def _is_problem(line: str) -> bool:
    return "Traceback" in line or "cannot be recorded" in line or "could not be recorded" in line


if __name__ == "__main__":
    sys.exit(main())
