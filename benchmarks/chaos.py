"""`kill -9` of every process, a full disk and a stopped database at random moments: is a call lost or doubled, and does
every rollout end?

    python benchmarks/chaos.py --rounds 200 --json
    python benchmarks/chaos.py --rounds 3 --targets engine --engine vllm     # POLAR_VLLM_CPU: folder of a real vLLM
    python benchmarks/chaos.py --rounds 4 --db sqlite --targets service,sandbox,engine,disk

README.md explains what is killed, how answers are logged independently, and what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._stacks.kill_targets import (  # noqa: E402
    AnySandbox,
    EngineProcess,
    KillTarget,
    Postgres,
    PostgresAway,
    ServiceProcess,
    SmallDisk,
)
from benchmarks._stacks.ray_kill_targets import RayCluster  # noqa: E402
from benchmarks._stacks.reconcile import Reconciliation, left_behind, reconcile  # noqa: E402
from benchmarks._stacks.stacks import StackError  # noqa: E402
from polar_proxy.errors import StoreError  # noqa: E402
from polar_proxy.rollouts import JobSpec, submit  # noqa: E402
from polar_proxy.store import open_store  # noqa: E402
from polar_proxy.store.service.jobs import JobRow  # noqa: E402
from polar_proxy.tasks import get_source  # noqa: E402

T = TypeVar("T")
TARGETS = ("service", "sandbox", "engine", "postgresql", "disk", "away", "node")
BAD = ("lost", "doubled", "unfinished", "left_behind", "wrong", "unaccounted", "tracebacks")
"""Figures that must be 0."""
NEEDS_POSTGRESQL = ("postgresql", "away", "node")
AGENT = Path(__file__).parent / "_stacks" / "logging_agent.py"
FINAL_SECONDS = 240.0
"""Limit from the restart to the final status of every rollout: enough for three attempts and claims of 30 s."""


@dataclass
class Kill:
    """One kill and its outcome."""

    target: str
    round: int
    moment: float
    """Seconds after the job was queued."""
    down: float
    """Seconds from the kill until the target was started again."""
    job_id: str
    in_flight: dict[str, int]
    """Number of the job's rollouts by status at the kill."""
    final_after: float | None = None
    """Seconds from the restart to the last final status; None: not within the limit."""
    unfinished: list[str] = field(default_factory=list)


class KillTest:
    """The deployment under test: database, engine and service, all real processes.

    To kill a `node`, the service runs on a Ray cluster of two nodes.
    """

    def __init__(
        self,
        folder: Path,
        targets: list[str],
        db: str,
        rounds: Iterator[int],
        arguments: argparse.Namespace,
        report: Callable[[str], None],
    ) -> None:
        """`rounds`: iterator over the numbers of all rounds. The deployments share it: each takes the next number when
        it is ready."""
        self.folder, self.names, self.arguments, self.report = folder, targets, arguments, report
        self.db_kind, self.rounds = db, rounds
        self.random = random.Random(f"{arguments.seed} {targets}")
        folder.mkdir()
        self.answer_log = folder / "answers"
        self.answer_log.mkdir()
        self.kills: list[Kill] = []
        self.rollout_ids: list[str] = []
        self.stopped: str | None = None
        """Why it ended early: a target could not be started again."""

    def start(self, stack: ExitStack) -> None:
        arguments = self.arguments
        self.engine = EngineProcess(self.folder, arguments.engine)
        stack.callback(self.engine.stop)
        self.engine.start()
        self.targets: dict[str, KillTarget] = {"engine": self.engine}
        self.db = str(self.folder / "home" / "polar.db")
        if "disk" in self.names:
            disk = SmallDisk(self.folder / "home")
            stack.callback(disk.stop)
            self.targets["disk"] = disk
        if self.db_kind == "postgresql":
            postgres = Postgres()
            stack.callback(postgres.stop)
            self.targets |= {"postgresql": postgres, "away": PostgresAway(postgres, arguments.away)}
            self.db = postgres.url
        self.service = ServiceProcess(self.folder, self.db, self.engine.url, self.engine.model, arguments.concurrency)
        self.cluster: RayCluster | None = None
        if "node" in self.names:
            self.cluster = RayCluster(self.service, self.folder, 2, arguments.concurrency, self.random)
            stack.callback(self.cluster.stop)
            self.targets["node"] = self.cluster
        stack.callback(self.service.stop)
        if self.cluster is None:
            self.service.start()
        else:
            self.cluster.start_all()
        self.targets |= {"service": self.service, "sandbox": AnySandbox(self.folder, self.random)}

    async def run(self) -> None:
        async with open_store(self.db) as store:
            self.store = store
            self.length = await self.undisturbed_seconds()
            try:
                for name, number in zip(cycle(self.names), self.rounds, strict=False):
                    await self.kill_one(name, number)
            except StackError as error:  # what came before is still counted
                self.stopped = str(error)
                self.report(self.stopped)
            await self.settle()

    async def queue(self) -> str:
        row = {
            "task_id": f"chaos-{len(self.rollout_ids)}",
            "instruction": "Say the words that you are asked for.",
            "files": {"readme.txt": "Nothing to see.\n"},
            "evaluator": {"kind": "command", "argv": ["test", "-f", "done.txt"]},
        }
        file = self.folder / "task.jsonl"
        file.write_text(json.dumps(row) + "\n")
        agent = f"shell:{sys.executable} -S {{mount:{AGENT}}} --log {self.answer_log} --turns {self.arguments.turns}"
        spec = JobSpec(harness=agent, sandbox="process", timeout=200.0, samples=self.arguments.samples)
        tasks = [get_source(str(file)).task(0)]
        job, _ = await retry(lambda: submit(self.store, tasks, spec))
        rows = await retry(lambda: self.store.rollouts.find(job_id=job.job_id))
        self.rollout_ids += [row.rollout_id for row in rows]
        return job.job_id

    async def undisturbed_seconds(self) -> float:
        """Run a job without kills and return its duration, over which the kills are then spread."""
        began = time.monotonic()
        job_id = await self.queue()
        left = await self.until_final(job_id, FINAL_SECONDS)
        if left:
            raise StackError(f"an undisturbed job does not end: {', '.join(left)}")
        return time.monotonic() - began

    async def kill_one(self, name: str, number: int) -> None:
        target = self.targets[name]
        began = time.monotonic()
        job_id = await self.queue()
        await asyncio.sleep(self.random.uniform(0, self.length))
        row = await self.job(job_id)
        if row.status == "done":  # the next kills come earlier
            self.length *= 0.8
        while not await asyncio.to_thread(target.kill):
            row = await self.job(job_id)
            if row.status == "done":  # no sandbox was open: start another job
                began, job_id = time.monotonic(), await self.queue()
            await asyncio.sleep(0.01)
        moment, down = time.monotonic() - began, self.random.uniform(*target.down)
        kill = Kill(name, number, round(moment, 2), round(down, 2), job_id, row.rollouts)
        await asyncio.sleep(down)
        await asyncio.to_thread(target.start)
        self.kills.append(kill)
        restarted = time.monotonic()
        kill.unfinished = await self.until_final(job_id, FINAL_SECONDS)
        kill.final_after = None if kill.unfinished else round(time.monotonic() - restarted, 2)
        after = "NOT FINAL" if kill.final_after is None else f"final after {kill.final_after:.1f} s"
        self.report(f"round {number + 1}: {name} killed after {moment:.1f} s with {kill.in_flight}: {after}")

    async def until_final(self, job_id: str, seconds: float) -> list[str]:
        """Wait until every rollout of the job is final and its group is settled. Return descriptions of the rollouts
        that are not final after `seconds`; an empty list if all are."""
        deadline = time.monotonic() + seconds
        while True:
            if (await self.job(job_id)).status in ("done", "cancelled"):
                return []
            if time.monotonic() > deadline:
                rows = [row for row in await self.store.rollouts.find(job_id=job_id) if not row.final]
                return [f"{row.rollout_id}: {row.status}" for row in rows] or [f"{job_id}: not settled"]
            await asyncio.sleep(0.1)

    async def job(self, job_id: str) -> JobRow:
        row = await retry(lambda: self.store.jobs.get(job_id))
        assert row is not None
        return row

    async def settle(self) -> None:
        """Stop the service normally, then count."""
        await asyncio.to_thread(self.service.stop)
        await asyncio.to_thread(self.engine.stop)  # the processes of a real vLLM name the folder too
        if self.cluster is not None:
            await asyncio.to_thread(self.cluster.stop)
        self.remains = left_behind(self.folder)
        self.tracebacks = self.service.log.read_text(errors="replace").count("Traceback (most recent call last)")
        self.unfinished = [line for kill in self.kills for line in kill.unfinished]
        final = [row.rollout_id for row in await self.store.rollouts.find(rollout_ids=self.rollout_ids) if row.final]
        self.result = await reconcile(self.store, self.answer_log, final, echoes=self.arguments.engine == "echo")


async def retry(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeat a database operation while the database is away."""
    deadline = time.monotonic() + FINAL_SECONDS
    while True:
        try:
            return await ask()
        except StoreError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def deployments(targets: list[str], db: str) -> list[tuple[str, list[str]]]:
    """Return database and targets of each deployment. Deployments run side by side, because most of a round is waiting.

    A full disk, a long absence of the database, and a Ray cluster each have a deployment of their own.
    """
    own = ("disk", "away", "node")
    found = [(db, [name for name in targets if name not in own])]
    found += [("sqlite" if name == "disk" else db, [name]) for name in own if name in targets]
    return [(kind, names) for kind, names in found if names]


async def run_all(tests: list[KillTest]) -> None:
    async with asyncio.TaskGroup() as group:
        for test in tests:
            group.create_task(test.run())


def summarise(tests: list[KillTest], arguments: argparse.Namespace) -> dict[str, Any]:
    result = sum((test.result for test in tests), Reconciliation())
    kills = [kill for test in tests for kill in test.kills]
    unfinished = [line for test in tests for line in test.unfinished]
    remains = [line for test in tests for line in test.remains]
    killed: dict[str, dict[str, Any]] = {}
    for name in arguments.targets:
        own = [kill for kill in kills if kill.target == name]
        after = sorted(kill.final_after for kill in own if kill.final_after is not None)
        killed[name] = {
            "kills": len(own),
            "unfinished": sum(len(kill.unfinished) for kill in own),
            "final_after_s": {"median": after[len(after) // 2], "most": after[-1]} if after else None,
            "moments_s": [kill.moment for kill in own],
        }
    return {
        "rounds": arguments.rounds,
        "acknowledged": result.acknowledged,
        "lost": len(result.lost),
        "doubled": len(result.doubled),
        "unfinished": len(unfinished),
        "left_behind": len(remains),
        "wrong": len(result.wrong),
        "unaccounted": len(result.unaccounted),
        "tracebacks": sum(test.tracebacks for test in tests),
        "repeated": result.repeated,
        "calls": {"recorded": result.recorded, "trained": result.trained, "excluded": dict(result.excluded)},
        "rollouts": {
            "statuses": dict(result.statuses),
            "causes": dict(result.causes),
            "attempts": {str(number): count for number, count in sorted(result.attempts.items())},
        },
        "killed": killed,
        "not_killed": [name for name in TARGETS if name not in arguments.targets],
        "stopped": [test.stopped for test in tests if test.stopped is not None],
        "engine": arguments.engine,
        "db": arguments.db,
        "seed": arguments.seed,
        "cases": [*result.lost, *result.doubled, *result.wrong, *result.unaccounted, *unfinished, *remains],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="kills in all; the targets take turns")
    parser.add_argument("--targets", default="all", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--engine", choices=("echo", "vllm"), default="echo")
    parser.add_argument("--db", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--away", type=float, default=60.0, help="seconds for which the target `away` is away")
    parser.add_argument("--samples", type=int, default=4, help="rollouts per job; each kill has its own job")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the run's folder with all logs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    known = [name for name in TARGETS if arguments.db == "postgresql" or name not in NEEDS_POSTGRESQL]
    arguments.targets = known if arguments.targets == "all" else arguments.targets.split(",")
    if unknown := set(arguments.targets) - set(known):
        parser.error(f"cannot be killed here: {', '.join(sorted(unknown))}; there are {', '.join(known)}")

    def report_line(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave the with blocks, which stop all processes
    folder = Path(tempfile.mkdtemp(prefix="polar-chaos-"))
    rounds = iter(range(arguments.rounds))
    tests = []
    try:
        with ExitStack() as stack:
            for number, (db, targets) in enumerate(deployments(arguments.targets, arguments.db)):
                test = KillTest(folder / str(number), targets, db, rounds, arguments, report_line)
                test.start(stack)
                tests.append(test)
            asyncio.run(run_all(tests))
    except StackError as error:
        report_line(str(error))
        return 2
    finally:
        if arguments.keep:
            report_line(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    report = summarise(tests, arguments)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        for name in ("rounds", "acknowledged", *BAD):
            print(f"{name:14}{report[name]}")
    for line in report["cases"]:
        report_line(line)
    if any(report[name] for name in BAD):
        return 1
    return 2 if report["stopped"] else 0


if __name__ == "__main__":
    sys.exit(main())
