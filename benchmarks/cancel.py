"""Time until a cancelled rollout, group or job is over, at every stage and in each kind of sandbox.

    python benchmarks/cancel.py --json                                   # every kind that runs here; ten minutes
    python benchmarks/cancel.py --sandboxes process --repeat 2 --stages running,calling

A real `polar serve --rollout-workers N` and the HTTP client. Two times are measured from the request on: until all of
its rollouts have a final status in the store, and until no process, container, folder or record is left besides those
of the sandbox pool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._stacks.deployed import containers_of, own_folder, python_inside, spread, usable_sandboxes  # noqa: E402
from benchmarks._stacks.kill_targets import EngineProcess, ServiceProcess  # noqa: E402
from benchmarks._stacks.reconcile import left_behind  # noqa: E402
from benchmarks._stacks.stacks import StackError  # noqa: E402
from polar_proxy.api_models import JobRequest  # noqa: E402
from polar_proxy.client import AsyncClient  # noqa: E402
from polar_proxy.rollouts import cancel  # noqa: E402
from polar_proxy.store import RolloutRow, Store, open_store  # noqa: E402
from sandboxes import orphans  # noqa: E402
from sandboxes.base import SandboxKind  # noqa: E402

STAGES = ("queued", "preparing", "running", "calling", "scoring")
"""`calling` means running, while the engine answers a call."""
SIZES = {"rollout": (1, 1), "group": (1, 4), "job": (2, 4)}
"""Number of groups, and of rollouts in each. Four rollouts run at a time; the others of a job wait."""
AGENTS = 4
WAIT_SECONDS = 120.0
LOOK_SECONDS = 0.01
DELAY = 4.0
"""Seconds that the engine waits before each of its eight chunks, so that a call lasts until it is cancelled."""
TREE = "sleep 601 & sh -c 'sleep 602 & sleep 603' & sleep 604"
AGENT = Path(__file__).parent / "_stacks" / "logging_agent.py"


@dataclass
class CancelCase:
    """A cancellation in a stage and kind of sandbox, through the server (http) or the database (store)."""

    kind: SandboxKind
    what: str
    stage: str
    by: str = "http"
    answered: list[float] = field(default_factory=list)
    """Seconds until the call of `cancel` returned, one for each repetition."""
    final: list[float] = field(default_factory=list)
    nothing_left: list[float] = field(default_factory=list)


class SandboxWatcher:
    """Looks for remains of a service's sandboxes."""

    def __init__(self, folder: Path, service: ServiceProcess, client: AsyncClient) -> None:
        self._state = folder / "tmp" / f"polar-sandboxes-{os.getuid()}"
        self._service, self._client = service, client
        self._seen: set[str] = set()

    def records(self) -> set[str]:
        records = {path.stem for path in (self._state / "records").glob("polar-*.json")}
        self._seen |= records
        return records

    async def pooled(self) -> int:
        pool = (await self._client.service()).pool
        assert pool is not None
        return pool.waiting

    async def remains(self, rows: list[RolloutRow]) -> list[str]:
        """Describe what is left besides the warm pool; `["rollouts"]` while a rollout has not ended."""
        if not all(row.final for row in rows):
            return ["rollouts"]
        waiting = await self.pooled()
        registered = self.records()
        if len(registered) > waiting:
            return [f"{len(registered)} sandboxes, {waiting} in the pool"]
        return await asyncio.to_thread(lambda: list(self._strays(registered)))

    def _strays(self, registered: set[str]) -> Iterator[str]:
        for path in self._state.glob("polar-*"):
            if path.name not in registered:
                yield f"folder {path.name}"
        for sandbox_id, pid in orphans.marked_processes(self._seen - registered):
            yield f"process {pid} of {sandbox_id}"

    def containers(self) -> list[str]:
        """Return the containers of this service if it has more of them than registered sandboxes, else an empty
        list."""
        assert self._service.process is not None
        lines = containers_of(self._service.process.pid)
        return lines if len(lines) > len(self.records()) else []


def task(kind: SandboxKind, stage: str) -> tuple[dict[str, Any], str]:
    """Return a task and an agent command that keep a rollout in this stage."""
    files = {f"part{number % 40}/file{number}.txt": f"{number}\n" for number in range(3000)}
    row = {
        "task_id": f"cancel-{stage}",
        "instruction": "Sleep.",
        "files": files if stage == "preparing" else {"readme.txt": "Nothing to see.\n"},
        "evaluator": {"kind": "command", "argv": ["sh", "-c", TREE]},
        "timeout_seconds": 600,
    }
    agents = {
        "scoring": "true",
        "calling": f"{python_inside()} -S {{mount:{AGENT}}} --log /tmp --turns 1",
    }
    return row, "shell:" + agents.get(stage, f'sh -c "{TREE}"')


class CancelBenchmark:
    def __init__(
        self, store: Store, client: AsyncClient, watcher: SandboxWatcher, random_source: random.Random
    ) -> None:
        self.store, self.client, self.watcher, self.random = store, client, watcher, random_source
        self.left: list[str] = []

    async def one(self, case: CancelCase) -> None:
        groups, samples = SIZES[case.what]
        row, agent = task(case.kind, case.stage)
        if case.stage == "queued":
            await self.client.pause_service()
        tasks = [{**row, "task_id": f"{row['task_id']}-{number}"} for number in range(groups)]
        request = JobRequest(
            task_specs=tasks, samples=samples, harness=agent, sandbox=case.kind, timeout=500.0, instances=groups
        )
        job_id = (await self.client.submit(request)).job_id
        await self.reached(job_id, case.stage, min(AGENTS, groups * samples))
        await asyncio.sleep(self.random.uniform(0.0, 0.5))
        self.watcher.records()
        rows = await self.store.rollouts.find(job_id=job_id)
        if any(row.final for row in rows):
            raise StackError(f"a rollout ended before it was cancelled: {rows[0].status} {rows[0].error}")
        what = {"rollout": rows[0].rollout_id, "group": rows[0].group_id, "job": job_id}[case.what]
        started = time.monotonic()
        watching = asyncio.create_task(self.watch(job_id, started))
        await (self.client.cancel(what) if case.by == "http" else cancel(self.store, what))
        case.answered.append(time.monotonic() - started)
        final, nothing_left = await watching
        case.final.append(final)
        case.nothing_left.append(nothing_left)
        await asyncio.sleep(0.3)  # a sandbox that was still being opened would be visible by now
        self.left += [f"{case.kind}, {case.what}, {case.stage}: {line}" for line in await self.problems(job_id)]
        if case.stage == "queued":
            await self.client.resume_service()

    async def reached(self, job_id: str, stage: str, count: int) -> None:
        """Wait until `count` rollouts are in the stage, with a call in flight for `calling`."""
        status = "running" if stage == "calling" else stage
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            rows = await self.store.rollouts.find(job_id=job_id)
            if sum(row.status == status for row in rows) >= count:
                break
            if time.monotonic() > deadline or any(row.final for row in rows):
                states = ", ".join(f"{row.status} {row.error or ''}" for row in rows)
                raise StackError(f"no rollout stays in {stage}: {states}")
            await asyncio.sleep(0.02)
        if stage == "calling":
            await asyncio.sleep(0.7)  # the agent's Python starts, and calls the model

    async def watch(self, job_id: str, started: float) -> tuple[float, float]:
        """Return the seconds from `started` until all rollouts are final, and until nothing of them is left."""
        final: float | None = None
        while True:
            rows = await self.store.rollouts.find(job_id=job_id)
            if final is None and all(row.final for row in rows):
                final = time.monotonic() - started
            if final is not None and not (remains := await self.watcher.remains(rows)):
                return final, time.monotonic() - started
            if time.monotonic() - started > WAIT_SECONDS:
                raise StackError(f"not over after {WAIT_SECONDS:g} s: {remains if final else 'not final'}")
            await asyncio.sleep(LOOK_SECONDS)

    async def problems(self, job_id: str) -> list[str]:
        rows = await self.store.rollouts.find(job_id=job_id)
        problems = [*await self.watcher.remains(rows), *await asyncio.to_thread(self.watcher.containers)]
        for row in rows:
            if row.status != "cancelled":
                problems.append(f"{row.rollout_id} is {row.status}, not cancelled")
            closed = await self.store.sessions.ids_of_rollout(row.rollout_id, closed=True)
            every = await self.store.sessions.ids_of_rollout(row.rollout_id)
            problems += [f"session {one} is open" for one in every if one not in closed]
        return problems


async def measure_kind(
    folder: Path, service: ServiceProcess, cases: list[CancelCase], arguments: argparse.Namespace
) -> list[str]:
    key = (folder / "home" / "api-key").read_text().strip()
    async with AsyncClient(service.url, key) as client, open_store(service.db) as store:
        benchmark = CancelBenchmark(
            store, client, SandboxWatcher(folder, service, client), random.Random(arguments.seed)
        )
        for case in cases:
            for _ in range(arguments.repeat):
                await benchmark.one(case)
            seconds = spread(case.nothing_left)
            print(f"{case.kind}, {case.what}, {case.stage}, by {case.by}: {seconds}", file=sys.stderr, flush=True)
        return benchmark.left


def measure(
    kinds: list[SandboxKind], folder: Path, arguments: argparse.Namespace
) -> tuple[list[CancelCase], list[str]]:
    found: list[CancelCase] = []
    left: list[str] = []
    for kind in kinds:
        with ExitStack() as stack:
            own = folder / kind
            own.mkdir()
            engine = EngineProcess(own, "echo", DELAY)
            stack.callback(engine.stop)
            engine.start()
            service = ServiceProcess(own, str(own / "home" / "polar.db"), engine.url, engine.model, AGENTS)
            # Admission by free memory would only delay reaching a stage, which is not measured.
            service.environment |= {"POLAR_ADMISSION__MEMORY_MB": "1", "POLAR_ADMISSION__MEMORY_RESERVE_MB": "0"}
            stack.callback(service.stop)
            service.start()
            cases = [CancelCase(kind, what, stage) for stage in arguments.stages for what in SIZES]
            cases += [CancelCase(kind, "job", "running", "store")] if "running" in arguments.stages else []
            left += asyncio.run(measure_kind(own, service, cases, arguments))
            found += cases
            assert service.process is not None
            pid = service.process.pid
        left += [*left_behind(own), *containers_of(pid)]
    return found, left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", help="comma-separated list; default: all that run here")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated list")
    parser.add_argument("--repeat", type=int, default=5, help="cancellations of each case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.stages = arguments.stages.split(",")
    if unknown := set(arguments.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    try:
        kinds, missing = usable_sandboxes(arguments.sandboxes)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave the with blocks, which stop all processes
    try:
        with own_folder("cancel") as folder:
            cases, left = measure(kinds, folder, arguments)
    except StackError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [
        {"sandbox": case.kind, "what": case.what, "stage": case.stage, "by": case.by}
        | {name: spread(getattr(case, name), 3) for name in ("answered", "final", "nothing_left")}
        for case in cases
    ]
    times = [value for case in cases for value in case.nothing_left]
    share = sum(value < 1.0 for value in times) / max(1, len(times))
    document = {"rows": rows, "repeat": arguments.repeat, "cancelled": len(times), "within_a_second": round(share, 3)}
    document |= {"seconds": spread(times, 3), "missing": missing, "left_behind": left}
    print(json.dumps(document, indent=1) if arguments.json else table(rows))
    for line in left:
        print(line, file=sys.stderr)
    return 1 if left else 0


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of seconds: median / maximum."""
    lines = ["| sandbox | stage | asked | what | final in the store | nothing left |", "|---|---|---|---|---|---|"]
    for row in rows:
        times = [f"{row[name]['median']:.2f} / {row[name]['most']:.2f}" for name in ("final", "nothing_left")]
        lines.append("| " + " | ".join([row["sandbox"], row["stage"], row["by"], row["what"], *times]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
