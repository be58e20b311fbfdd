"""How soon a cancelled rollout, group or job is over, at every stage and in each kind of sandbox.

    python benchmarks/cancel.py --json                                   # every kind that is there; ten minutes
    python benchmarks/cancel.py --sandboxes process --repeat 2 --stages running,calling

A real `polar serve --rollout-workers N` and the HTTP client. Two times, both from the request on: until all of it has
a final status in the store, and until nothing of it is left: no process, container, folder or record beside those of
the pool's shelf.
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

from benchmarks._stacks.deployed import chosen, containers_of, own_folder, python_inside, spread  # noqa: E402
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
"""`calling`: running, while the engine is answering a call."""
SIZES = {"rollout": (1, 1), "group": (1, 4), "job": (2, 4)}
"""Groups, and rollouts of each. Four run at a time: of the job the others wait."""
AGENTS = 4
WAIT_SECONDS = 120.0
LOOK_SECONDS = 0.01
DELAY = 4.0
"""Of the engine, before each of eight pieces: an answer takes longer than it is waited for."""
TREE = "sleep 601 & sh -c 'sleep 602 & sleep 603' & sleep 604"
AGENT = Path(__file__).parent / "_stacks" / "witness_agent.py"


@dataclass
class Cell:
    """One kind of sandbox, what is cancelled, its stage, and who asks: this server (http) or the database (store)."""

    kind: SandboxKind
    what: str
    stage: str
    by: str = "http"
    answered: list[float] = field(default_factory=list)
    """Seconds until `cancel` returned."""
    final: list[float] = field(default_factory=list)
    nothing_left: list[float] = field(default_factory=list)


class Watched:
    """What exists of a service's sandboxes."""

    def __init__(self, folder: Path, service: ServiceProcess, client: AsyncClient) -> None:
        self._state = folder / "tmp" / f"polar-sandboxes-{os.getuid()}"
        self._service, self._client = service, client
        self._seen: set[str] = set()

    def records(self) -> set[str]:
        found = {path.stem for path in (self._state / "records").glob("polar-*.json")}
        self._seen |= found
        return found

    async def shelf(self) -> int:
        pool = (await self._client.service()).pool
        assert pool is not None
        return pool.on_shelf

    async def remains(self, rows: list[RolloutRow]) -> list[str]:
        """What there is beyond the shelf's; nothing while the rollouts themselves are not over."""
        if not all(row.final for row in rows):
            return ["rollouts"]
        waiting = await self.shelf()
        registered = self.records()
        if len(registered) > waiting:
            return [f"{len(registered)} sandboxes, {waiting} on the shelf"]
        return await asyncio.to_thread(lambda: list(self._strays(registered)))

    def _strays(self, registered: set[str]) -> Iterator[str]:
        for path in self._state.glob("polar-*"):
            if path.name not in registered:
                yield f"folder {path.name}"
        for ident, pid in orphans.marked_processes(self._seen - registered):
            yield f"process {pid} of {ident}"

    def containers(self) -> list[str]:
        """Of this service, beyond those that are registered."""
        assert self._service.process is not None
        lines = containers_of(self._service.process.pid)
        return lines if len(lines) > len(self.records()) else []


def task(kind: SandboxKind, stage: str) -> tuple[dict[str, Any], str]:
    """A task and the agent that keep a rollout in this stage."""
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
        "calling": f"{python_inside()} -S {{mount:{AGENT}}} --witness /tmp --turns 1",
    }
    return row, "shell:" + agents.get(stage, f'sh -c "{TREE}"')


class Bench:
    def __init__(self, store: Store, client: AsyncClient, watched: Watched, choose: random.Random) -> None:
        self.store, self.client, self.watched, self.random = store, client, watched, choose
        self.left: list[str] = []

    async def one(self, cell: Cell) -> None:
        groups, samples = SIZES[cell.what]
        row, agent = task(cell.kind, cell.stage)
        if cell.stage == "queued":
            await self.client.pause_service()
        rows = [{**row, "task_id": f"{row['task_id']}-{number}"} for number in range(groups)]
        request = JobRequest(
            task_specs=rows, samples=samples, harness=agent, sandbox=cell.kind, timeout=500.0, instances=groups
        )
        job_id = (await self.client.submit(request)).job_id
        await self.reached(job_id, cell.stage, min(AGENTS, groups * samples))
        await asyncio.sleep(self.random.uniform(0.0, 0.5))
        self.watched.records()
        mine = await self.store.rollouts.find(job_id=job_id)
        if any(row.final for row in mine):
            raise StackError(f"a rollout ended before it was cancelled: {mine[0].status} {mine[0].error}")
        what = {"rollout": mine[0].rollout_id, "group": mine[0].group_id, "job": job_id}[cell.what]
        began = time.monotonic()
        looking = asyncio.create_task(self.look(job_id, began))
        await (self.client.cancel(what) if cell.by == "http" else cancel(self.store, what))
        cell.answered.append(time.monotonic() - began)
        final, nothing_left = await looking
        cell.final.append(final)
        cell.nothing_left.append(nothing_left)
        await asyncio.sleep(0.3)  # what was about to be opened would show itself by now
        self.left += [f"{cell.kind}, {cell.what}, {cell.stage}: {line}" for line in await self.over(job_id)]
        if cell.stage == "queued":
            await self.client.resume_service()

    async def reached(self, job_id: str, stage: str, count: int) -> None:
        """So many are in the stage, and of `calling`, with a call in flight."""
        status = "running" if stage == "calling" else stage
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            rows = await self.store.rollouts.find(job_id=job_id)
            if sum(row.status == status for row in rows) >= count:
                break
            if time.monotonic() > deadline or any(row.final for row in rows):
                told = ", ".join(f"{row.status} {row.error or ''}" for row in rows)
                raise StackError(f"no rollout stays in {stage}: {told}")
            await asyncio.sleep(0.02)
        if stage == "calling":
            await asyncio.sleep(0.7)  # the agent's Python starts, and asks

    async def look(self, job_id: str, began: float) -> tuple[float, float]:
        """Seconds until all is final, and until nothing is left."""
        final: float | None = None
        while True:
            rows = await self.store.rollouts.find(job_id=job_id)
            if final is None and all(row.final for row in rows):
                final = time.monotonic() - began
            if final is not None and not (remains := await self.watched.remains(rows)):
                return final, time.monotonic() - began
            if time.monotonic() - began > WAIT_SECONDS:
                raise StackError(f"not over after {WAIT_SECONDS:g} s: {remains if final else 'not final'}")
            await asyncio.sleep(LOOK_SECONDS)

    async def over(self, job_id: str) -> list[str]:
        rows = await self.store.rollouts.find(job_id=job_id)
        found = [*await self.watched.remains(rows), *await asyncio.to_thread(self.watched.containers)]
        for row in rows:
            if row.status != "cancelled":
                found.append(f"{row.rollout_id} is {row.status}, not cancelled")
            closed = await self.store.sessions.ids_of_rollout(row.rollout_id, closed=True)
            every = await self.store.sessions.ids_of_rollout(row.rollout_id)
            found += [f"session {one} is open" for one in every if one not in closed]
        return found


async def of_kind(folder: Path, service: ServiceProcess, cells: list[Cell], given: argparse.Namespace) -> list[str]:
    key = (folder / "home" / "api-key").read_text().strip()
    async with AsyncClient(service.url, key) as client, open_store(service.db) as store:
        bench = Bench(store, client, Watched(folder, service, client), random.Random(given.seed))
        for cell in cells:
            for _ in range(given.repeat):
                await bench.one(cell)
            told = spread(cell.nothing_left)
            print(f"{cell.kind}, {cell.what}, {cell.stage}, by {cell.by}: {told}", file=sys.stderr, flush=True)
        return bench.left


def measure(kinds: list[SandboxKind], folder: Path, given: argparse.Namespace) -> tuple[list[Cell], list[str]]:
    found: list[Cell] = []
    left: list[str] = []
    for kind in kinds:
        with ExitStack() as stack:
            own = folder / kind
            own.mkdir()
            engine = EngineProcess(own, "echo", DELAY)
            stack.callback(engine.stop)
            engine.start()
            service = ServiceProcess(own, str(own / "home" / "polar.db"), engine.url, engine.model, AGENTS)
            # What the machine has free decides how long a stage takes to be reached, which is not measured here.
            service.environment |= {"POLAR_ADMISSION__MEMORY_MB": "1", "POLAR_ADMISSION__MEMORY_RESERVE_MB": "0"}
            stack.callback(service.stop)
            service.start()
            cells = [Cell(kind, what, stage) for stage in given.stages for what in SIZES]
            cells += [Cell(kind, "job", "running", "store")] if "running" in given.stages else []
            left += asyncio.run(of_kind(own, service, cells, given))
            found += cells
            assert service.process is not None
            pid = service.process.pid
        left += [*left_behind(own), *containers_of(pid)]
    return found, left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", help="comma-separated; default: all that can be used here")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated")
    parser.add_argument("--repeat", type=int, default=5, help="cancellations of each sort")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.stages = given.stages.split(",")
    if unknown := set(given.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    try:
        kinds, missing = chosen(given.sandboxes)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped then, too
    try:
        with own_folder("cancel") as folder:
            cells, left = measure(kinds, folder, given)
    except StackError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [
        {"sandbox": cell.kind, "what": cell.what, "stage": cell.stage, "by": cell.by}
        | {name: spread(getattr(cell, name), 3) for name in ("answered", "final", "nothing_left")}
        for cell in cells
    ]
    times = [value for cell in cells for value in cell.nothing_left]
    share = sum(value < 1.0 for value in times) / max(1, len(times))
    document = {"rows": rows, "repeat": given.repeat, "cancelled": len(times), "within_a_second": round(share, 3)}
    document |= {"seconds": spread(times, 3), "missing": missing, "left_behind": left}
    print(json.dumps(document, indent=1) if given.json else table(rows))
    for line in left:
        print(line, file=sys.stderr)
    return 1 if left else 0


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: seconds, median / most."""
    lines = ["| sandbox | stage | asked | what | final in the store | nothing left |", "|---|---|---|---|---|---|"]
    for row in rows:
        times = [f"{row[name]['median']:.2f} / {row[name]['most']:.2f}" for name in ("final", "nothing_left")]
        lines.append("| " + " | ".join([row["sandbox"], row["stage"], row["by"], row["what"], *times]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
