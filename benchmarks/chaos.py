"""`kill -9` of everything, at random moments: is a call lost, or doubled, and does every rollout come to its end?

    python benchmarks/chaos.py --rounds 10 --json
    python benchmarks/chaos.py --rounds 3 --victims engine --engine vllm     # POLAR_VLLM_CPU: a real vLLM's folder
    python benchmarks/chaos.py --rounds 1 --db sqlite --victims service,sandbox,engine

README.md says what is killed, who is the witness, and what the figures mean.
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
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._stacks.kill_targets import AnySandbox, EngineProcess, KillTarget, Postgres, ServiceProcess  # noqa: E402
from benchmarks._stacks.ray_kill_targets import Cluster  # noqa: E402
from benchmarks._stacks.reconcile import Reconciliation, left_behind, reconcile  # noqa: E402
from benchmarks._stacks.stacks import StackError  # noqa: E402
from polar_proxy.errors import StoreError  # noqa: E402
from polar_proxy.rollouts import JobSpec, rollout_ids, submit  # noqa: E402
from polar_proxy.store import open_store  # noqa: E402
from polar_proxy.store.jobs import JobRow  # noqa: E402
from polar_proxy.tasks import get_source  # noqa: E402

T = TypeVar("T")
VICTIMS = ("service", "sandbox", "engine", "postgresql", "node")
AGENT = Path(__file__).parent / "_stacks" / "witness_agent.py"
FINAL_SECONDS = 240.0
"""From the victim's restart to the final status of every rollout: three attempts and a hold of 30 s have room in it."""


@dataclass
class Kill:
    """One kill and what came of it."""

    victim: str
    round: int
    moment: float
    """Seconds after the job was queued."""
    down: float
    """Seconds until it was started again."""
    job_id: str
    in_flight: dict[str, int]
    """Rollouts of the job by status when it was killed."""
    final_after: float | None = None
    """Seconds from the restart to the last final status; None: not within the limit."""
    unfinished: list[str] = field(default_factory=list)


class Chaos:
    """The deployment under test: a database, an engine, a service, all real processes. To kill a `node` the service
    is one over a Ray cluster of two."""

    def __init__(
        self, folder: Path, victims: list[str], given: argparse.Namespace, tell: Callable[[str], None]
    ) -> None:
        self.folder, self.names, self.given, self.tell = folder, victims, given, tell
        self.random = random.Random(given.seed)
        folder.mkdir()
        self.witness = folder / "witness"
        self.witness.mkdir()
        self.kills: list[Kill] = []
        self.rollout_ids: list[str] = []
        self.stopped: str | None = None
        """Why it ended before all rounds were done: a victim could not be started again."""

    def start(self, stack: ExitStack) -> None:
        given = self.given
        self.engine = EngineProcess(self.folder, given.engine)
        stack.callback(self.engine.stop)
        self.engine.start()
        self.victims: dict[str, KillTarget] = {"engine": self.engine}
        self.db = str(self.folder / "home" / "polar.db")
        if given.db == "postgresql":
            postgres = Postgres()
            stack.callback(postgres.stop)
            self.victims["postgresql"] = postgres
            self.db = postgres.url
        self.service = ServiceProcess(self.folder, self.db, self.engine.url, self.engine.model, given.concurrency)
        self.cluster: Cluster | None = None
        if "node" in self.names:
            self.cluster = Cluster(self.service, self.folder, 2, given.concurrency, self.random)
            stack.callback(self.cluster.stop)
            self.victims["node"] = self.cluster
        stack.callback(self.service.stop)
        if self.cluster is None:
            self.service.start()
        else:
            self.cluster.begin()
        self.victims |= {"service": self.service, "sandbox": AnySandbox(self.folder, self.random)}

    async def run(self) -> None:
        async with open_store(self.db) as store:
            self.store = store
            self.length = await self.untouched()
            try:
                for number in range(self.given.rounds):
                    for name in self.names:
                        await self.kill_one(name, number)
            except StackError as error:  # what came before it is counted all the same
                self.stopped = str(error)
                self.tell(self.stopped)
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
        agent = f"shell:{sys.executable} -S {{mount:{AGENT}}} --witness {self.witness} --turns {self.given.turns}"
        spec = JobSpec(harness=agent, sandbox="process", timeout=200.0, samples=self.given.samples)
        tasks = [get_source(str(file)).task(0)]
        job, _ = await patient(lambda: submit(self.store, tasks, spec))
        self.rollout_ids += await patient(lambda: rollout_ids(self.store, job.job_id))
        return job.job_id

    async def untouched(self) -> float:
        """How long a job takes that nobody disturbs; the moments of the kills are spread over as long."""
        began = time.monotonic()
        job_id = await self.queue()
        left = await self.until_final(job_id, FINAL_SECONDS)
        if left:
            raise StackError(f"a job that nobody disturbs does not end: {', '.join(left)}")
        return time.monotonic() - began

    async def kill_one(self, name: str, number: int) -> None:
        victim = self.victims[name]
        began = time.monotonic()
        job_id = await self.queue()
        await asyncio.sleep(self.random.uniform(0, self.length))
        row = await self.job(job_id)
        while not await asyncio.to_thread(victim.kill):
            row = await self.job(job_id)
            if row.status == "done":  # no sandbox was open any more: another job
                began, job_id = time.monotonic(), await self.queue()
            await asyncio.sleep(0.01)
        moment, down = time.monotonic() - began, self.random.uniform(1, 2)
        kill = Kill(name, number, round(moment, 2), round(down, 2), job_id, row.rollouts)
        await asyncio.sleep(down)
        await asyncio.to_thread(victim.start)
        self.kills.append(kill)
        restarted = time.monotonic()
        kill.unfinished = await self.until_final(job_id, FINAL_SECONDS)
        kill.final_after = None if kill.unfinished else round(time.monotonic() - restarted, 2)
        after = "NOT FINAL" if kill.final_after is None else f"final after {kill.final_after:.1f} s"
        self.tell(f"round {number + 1}: {name} killed after {moment:.1f} s with {kill.in_flight}: {after}")

    async def until_final(self, job_id: str, seconds: float) -> list[str]:
        """Wait until every rollout of the job is final and its group settled; what is not, as lines."""
        deadline = time.monotonic() + seconds
        while True:
            if (await self.job(job_id)).status in ("done", "cancelled"):
                return []
            if time.monotonic() > deadline:
                ids = await rollout_ids(self.store, job_id)
                rows = [row for row in await self.store.rollouts.find(rollout_ids=ids) if not row.final]
                return [f"{row.rollout_id}: {row.status}" for row in rows] or [f"{job_id}: not settled"]
            await asyncio.sleep(0.1)

    async def job(self, job_id: str) -> JobRow:
        row = await patient(lambda: self.store.jobs.get(job_id))
        assert row is not None
        return row

    async def settle(self) -> None:
        """Stop the service as its owner would, then count."""
        await asyncio.to_thread(self.service.stop)
        await asyncio.to_thread(self.engine.stop)  # a real one names the folder, too
        if self.cluster is not None:
            await asyncio.to_thread(self.cluster.stop)
        self.remains = left_behind(self.folder)
        self.unfinished = [line for kill in self.kills for line in kill.unfinished]
        final = [row.rollout_id for row in await self.store.rollouts.find(rollout_ids=self.rollout_ids) if row.final]
        self.account = await reconcile(self.store, self.witness, final, echoes=self.given.engine == "echo")


async def patient(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The benchmark's own questions to a database that may have been killed."""
    for _ in range(300):
        try:
            return await ask()
        except StoreError:
            await asyncio.sleep(0.1)
    return await ask()


def document(found: list[Chaos], given: argparse.Namespace) -> dict[str, Any]:
    account = sum((chaos.account for chaos in found), Reconciliation())
    kills = [kill for chaos in found for kill in chaos.kills]
    unfinished = [line for chaos in found for line in chaos.unfinished]
    remains = [line for chaos in found for line in chaos.remains]
    killed: dict[str, dict[str, Any]] = {}
    for name in given.victims:
        own = [kill for kill in kills if kill.victim == name]
        after = sorted(kill.final_after for kill in own if kill.final_after is not None)
        killed[name] = {
            "kills": len(own),
            "unfinished": sum(len(kill.unfinished) for kill in own),
            "final_after_s": {"median": after[len(after) // 2], "most": after[-1]} if after else None,
            "moments_s": [kill.moment for kill in own],
        }
    return {
        "rounds": given.rounds,
        "acknowledged": account.acknowledged,
        "lost": len(account.lost),
        "doubled": len(account.doubled),
        "unfinished": len(unfinished),
        "left_behind": len(remains),
        "wrong": len(account.wrong),
        "unaccounted": len(account.unaccounted),
        "asked_again": account.asked_again,
        "calls": {"recorded": account.recorded, "trained": account.trained, "excluded": dict(account.excluded)},
        "rollouts": {
            "statuses": dict(account.statuses),
            "causes": dict(account.causes),
            "attempts": {str(number): count for number, count in sorted(account.attempts.items())},
        },
        "killed": killed,
        "not_killed": [name for name in VICTIMS if name not in given.victims],
        "stopped": [chaos.stopped for chaos in found if chaos.stopped is not None],
        "engine": given.engine,
        "db": given.db,
        "seed": given.seed,
        "cases": [*account.lost, *account.doubled, *account.wrong, *account.unaccounted, *unfinished, *remains],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="kills of each victim")
    parser.add_argument("--victims", default="all", help=f"of {', '.join(VICTIMS)}")
    parser.add_argument("--engine", choices=("echo", "vllm"), default="echo")
    parser.add_argument("--db", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--samples", type=int, default=4, help="rollouts of each job; a job for each kill")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the run's folder, with all logs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    known = [name for name in VICTIMS if given.db == "postgresql" or name not in ("postgresql", "node")]
    given.victims = known if given.victims == "all" else given.victims.split(",")
    if unknown := set(given.victims) - set(known):
        parser.error(f"cannot be killed here: {', '.join(sorted(unknown))}; there are {', '.join(known)}")

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped then, too
    folder = Path(tempfile.mkdtemp(prefix="polar-chaos-"))
    alone = [name for name in given.victims if name != "node"]
    found = []
    try:
        for number, victims in enumerate([alone, [name for name in given.victims if name == "node"]]):
            if victims:
                with ExitStack() as stack:
                    chaos = Chaos(folder / str(number), victims, given, tell)
                    chaos.start(stack)
                    asyncio.run(chaos.run())
                    found.append(chaos)
    except StackError as error:
        tell(str(error))
        return 2
    finally:
        if given.keep:
            tell(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    told = document(found, given)
    if given.json:
        print(json.dumps(told, indent=1))
    else:
        for name in ("rounds", "acknowledged", "lost", "doubled", "unfinished", "left_behind", "wrong", "unaccounted"):
            print(f"{name:14}{told[name]}")
    for line in told["cases"]:
        tell(line)
    bad = ("lost", "doubled", "unfinished", "left_behind", "wrong", "unaccounted")
    if any(told[name] for name in bad):
        return 1
    return 2 if told["stopped"] else 0


if __name__ == "__main__":
    sys.exit(main())
