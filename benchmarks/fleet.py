"""Utilisation of a fleet: the real worker, stage limits, pool and group policies, with modelled agents and engines on a
virtual clock.

    python benchmarks/fleet.py [--json] [--sizes 100,1000,10000] [--settings cold-scattered,...] [--seed 1]

benchmarks/results/fleet.md describes what is real and what is modelled, with the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks._fleet.agents import AgentModel, MemoryUse, ModelAttempt, RolloutTimes, opener  # noqa: E402
from benchmarks._fleet.clock import RealTimeProxy, VirtualLoop  # noqa: E402
from benchmarks._fleet.engine import EngineCount, EngineModel, Fleet  # noqa: E402
from benchmarks._fleet.queue import MemoryQueue  # noqa: E402
from polar_proxy.config import AdmissionSettings  # noqa: E402
from polar_proxy.engines.base import EngineLoad  # noqa: E402
from polar_proxy.rollouts.admission import EngineMonitor, ServiceLimits, StageLimits  # noqa: E402
from polar_proxy.rollouts.pool import SandboxPool  # noqa: E402
from polar_proxy.rollouts.worker import Worker  # noqa: E402
from polar_proxy.store import open_store  # noqa: E402
from polar_proxy.store.service.groups import KEEP_OVERFLOW  # noqa: E402
from polar_proxy.store.service.jobs import NewGroup, NewRollout  # noqa: E402
from polar_proxy.types import Json  # noqa: E402

GROUP = 8
RAMP_SECONDS = 300.0
REAL_STORE_UP_TO = 100
"""Maximum number of agents for which the real database is used: with more, its thread would dominate the run time."""


@dataclass(frozen=True, slots=True)
class Setting:
    warm: bool = False
    """Whether there is a pool of warm sandboxes."""
    together: bool = True
    """Whether the rollouts of a group start together; if not, a task's rollouts are scattered over the whole run."""
    extra: int = 0
    """Number of rollouts per group beyond the eight that decide it (`first_n`)."""
    admission: bool = True
    """Whether the load of the engines limits admission."""
    keep: bool = False
    """Whether overflow (rollouts that still run when their group is complete) is kept for the next group of the task,
    not cancelled."""
    agents_per_engine: int = 24


SETTINGS = {
    "cold-scattered": Setting(together=False),
    "cold": Setting(),
    "warm": Setting(warm=True),
    "warm-over": Setting(warm=True, extra=2),
    "warm-over-keep": Setting(warm=True, extra=2, keep=True),
    "few-engines": Setting(warm=True, agents_per_engine=48),
    "few-engines-open": Setting(warm=True, agents_per_engine=48, admission=False),
}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    agents: int
    groups: int
    seed: int
    store: str
    """sqlite (the real store), or thin (the in-memory queue)."""
    setting: Setting


def jobs(case: Case) -> list[NewGroup]:
    """Return groups of rollouts, each with a number (its plan) and a task (its shared prefix).

    Each task has two groups: the second one comes half of the job later, as in a second epoch.
    """
    size = GROUP + case.setting.extra
    config: Json = {"group_policy": "first_n" if case.setting.extra else "wait_for_all"}
    if case.setting.keep:
        config |= KEEP_OVERFLOW
    tasks = math.ceil(case.groups / 2)
    groups = []
    for group in range(case.groups):
        rollouts = []
        for index in range(size):
            # Scattered: the rollouts of a task are in different groups, far from each other.
            task = (group if case.setting.together else group + index * tasks // size) % tasks
            seed = group * (GROUP + 8) + index
            rollouts.append(NewRollout("h", "process", "e", "m", seed, {"task": f"task-{task}"}))
        groups.append(NewGroup(f"task-{group % tasks}", GROUP, config, tuple(rollouts)))
    return groups


async def simulate(case: Case, agents: AgentModel, engines: EngineModel) -> dict[str, Any]:
    if case.store == "thin":
        return await _simulate(case, agents, engines, MemoryQueue())
    with tempfile.TemporaryDirectory(prefix="polar-fleet-") as folder:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.outside += 1  # opening the store is not measured
        async with open_store(str(Path(folder) / "polar.db"), create=True) as store:
            loop.outside -= 1
            found = await _simulate(case, agents, engines, store)
            loop.outside += 1
        loop.outside -= 1
        return found


async def _simulate(case: Case, agents: AgentModel, engines: EngineModel, inner: Any) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    began, cpu = time.perf_counter(), time.process_time()
    n = case.agents
    store, memory = RealTimeProxy(inner, loop), MemoryUse()
    fleet = Fleet(math.ceil(n / case.setting.agents_per_engine), engines, loop)
    groups = jobs(case)
    for task_id in sorted({group.task_id for group in groups}):
        await store.tasks.put(task_id, "fleet", 1, "", {})
    job, _ = await store.jobs.submit({}, groups)
    ours = {group.group_id for group in await store.groups.of_job(job.job_id)}
    store.seconds, store.operations = 0.0, 0  # submission is not measured
    # As ServiceLimits.of, for a service of a hundred agents on each machine. No other process uses the queue, so claims
    # need not be renewed often.
    preparing = 4 * math.ceil(n / 100)
    limits = ServiceLimits(2 * n, preparing, n, n, lease_seconds=1e9, poll_seconds=60.0)
    size = n if case.setting.warm else 0
    pool = SandboxPool(size, refill=case.setting.warm, opener=opener(agents, memory, case.seed))
    monitor = EngineMonitor(_Loads(fleet), 60.0, AdmissionSettings())
    may_run = (lambda request: monitor.busy()) if case.setting.admission else None
    stages = StageLimits(limits, may_run=may_run)
    attempt = ModelAttempt(store, fleet, pool, stages, agents, case.seed, memory, case.setting.warm)
    for group in groups:
        for rollout in group.rollouts:
            task = str(rollout.config["task"])
            attempt.left[task] = attempt.left.get(task, 0) + 1
    settled: dict[str, float] = {}
    watch = _Watch(fleet, n)
    over = asyncio.Event()

    def on_settled(group: str) -> None:
        if group in ours:
            settled[group] = loop.time()
        if len(settled) == len(groups):
            over.set()

    async with pool, monitor:
        async with Worker(store, attempt, limits, on_settled=on_settled) as worker:
            watching = asyncio.create_task(watch.run(worker, stages))
            await over.wait()
            watching.cancel()
        shelf = pool.counts()
    took = time.perf_counter() - began
    return {
        "case": asdict(case),
        "virtual_seconds": round(max(settled.values())),
        **_rates(watch, settled, attempt.times),
        "engine": watch.engine(),
        "refusals": dict(stages.running.refusals),
        "pool": {"hits": shelf["hits"], "misses": shelf["misses"], "waited_seconds": round(shelf["waited_seconds"])},
        "sandboxes_most_gb": round(memory.most / 1024, 1),
        "wall_seconds": round(took, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "store_seconds": round(store.seconds, 1),
        "store_calls": store.operations,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


class _Loads:
    """The part of an engine that EngineMonitor uses."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def health(self) -> str | None:
        return None

    async def load(self) -> EngineLoad:
        engines = self._fleet.engines
        usage = statistics.fmean(engine.kv_usage for engine in engines)
        waiting, running = sum(e.waiting for e in engines), sum(e.in_batch for e in engines)
        return EngineLoad(usage, waiting, running, len(engines))


class _Watch:
    """Samples the fleet's state every few virtual seconds.

    The steady part of a run begins when all agents run for the first time, or after `RAMP_SECONDS` if that is earlier.
    It ends when no rollout is left to start.
    """

    def __init__(self, fleet: Fleet, agents: int) -> None:
        self._fleet = fleet
        self._agents = agents
        self._first: tuple[float, EngineCount] | None = None
        self._last: tuple[float, EngineCount] | None = None
        self._taken: list[int] = []

    async def run(self, worker: Worker, stages: StageLimits) -> None:
        loop = asyncio.get_running_loop()
        gate = stages.running
        while True:
            await asyncio.sleep(5.0)
            full = gate.inside >= self._agents
            if self._first is None and (full or loop.time() > RAMP_SECONDS):
                self._first = loop.time(), self._sum()
            if self._first is None:
                continue
            busy = worker.in_flight > gate.inside + stages.scoring.inside
            if busy or self._last is None:  # some rollouts have not reached their agent yet
                self._last = loop.time(), self._sum()
                self._taken.append(gate.inside)

    @property
    def span(self) -> tuple[float, float]:
        assert self._first is not None
        assert self._last is not None
        return self._first[0], self._last[0]

    @property
    def places_taken(self) -> float:
        return statistics.fmean(self._taken) / self._agents

    def _sum(self) -> EngineCount:
        total = EngineCount()
        for engine in self._fleet.engines:
            engine._catch_up()
            for name in EngineCount.__slots__:
                ours, theirs = getattr(total, name), getattr(engine.count, name)
                setattr(total, name, max(ours, theirs) if name == "longest_queue" else ours + theirs)
        return total

    def engine(self) -> dict[str, Any]:
        """Return statistics of all engines together in the steady part."""
        assert self._first is not None
        assert self._last is not None
        (began, first), (ended, last) = self._first, self._last
        seconds = max(1e-9, (ended - began) * len(self._fleet.engines))
        change = {name: getattr(last, name) - getattr(first, name) for name in EngineCount.__slots__}
        return {
            "engines": len(self._fleet.engines),
            "busy_share": round(change["busy"] / seconds, 4),
            "mean_batch": round(change["batch"] / seconds, 2),
            "prefill_share": round(change["prefilling"] / seconds, 4),
            "kv_held_share": round(change["held"] / seconds, 4),
            "prefix_hit_rate": round(1 - change["computed_tokens"] / max(1, change["prompt_tokens"]), 4),
            "sampled_tokens_per_second": round(change["output_tokens"] / seconds, 1),
            "waiting_seconds_per_call": round(change["waited"] / max(1.0, change["batch"]), 4),
            "longest_queue": last.longest_queue,
        }


def _rates(watch: _Watch, settled: dict[str, float], times: dict[str, RolloutTimes]) -> dict[str, Any]:
    began, ended = watch.span
    most = sorted(settled.values())[
        : math.ceil(0.9 * len(settled))
    ]  # without the last tenth, which waits for a few stragglers
    first: dict[str, float] = {}
    for one in times.values():
        first[one.group_id] = min(
            first.get(one.group_id, math.inf), one.running if one.running == one.running else math.inf
        )
    spans = [when - first[group] for group, when in settled.items()]
    done = [one for one in times.values() if one.status == "done"]
    sampled = sum(one.sampled for one in times.values())
    return {
        "steady_seconds": round(ended - began),
        "places_taken": round(watch.places_taken, 4),
        "rollouts": len(times),
        "done": len(done),
        "groups_per_hour": round(len(most) / most[-1] * 3600, 1),
        "group_seconds": _two(spans),
        "agent_seconds": _two([one.scoring - one.running for one in done]),
        "preparing_seconds": _two([one.prepared - one.claimed for one in times.values()]),
        "ready_seconds": _two([one.running - one.prepared for one in times.values()]),
        "sampled_tokens": sampled,
        "sampled_in_vain": round(1 - sum(one.sampled for one in done) / max(1, sampled), 4),
        "empty_tail_seconds": round(max(settled.values()) - ended),
    }


def _two(values: Sequence[float]) -> dict[str, float]:
    """Return median and 95th percentile of the known values."""
    known = sorted(value for value in values if not math.isnan(value) and not math.isinf(value))
    if not known:
        return {"p50": math.nan, "p95": math.nan}
    return {"p50": round(known[len(known) // 2], 1), "p95": round(known[int(len(known) * 0.95)], 1)}


def run_one(case: Case) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(simulate(case, AgentModel(), EngineModel()))


def _in_process(case: Case) -> dict[str, Any]:
    """Run a case in its own process, so that its memory is measured separately."""
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case.name} with {case.agents} agents failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"{case.agents:>6} {case.name}: {found['wall_seconds']} s", file=sys.stderr, flush=True)
    return found


def cases(sizes: Sequence[int], names: Sequence[str], seed: int, store: str, waves: float | None) -> list[Case]:
    made = []
    for agents in sizes:
        kind = ("sqlite" if agents <= REAL_STORE_UP_TO else "thin") if store == "auto" else store
        groups = math.ceil(agents * (waves or (4 if agents <= 1_000 else 2)) / GROUP)
        made += [Case(name, agents, groups, seed, kind, SETTINGS[name]) for name in names]
    return made


COLUMNS = (
    ("agents", lambda r: r["case"]["agents"]),
    ("setting", lambda r: r["case"]["name"]),
    ("groups/h", lambda r: r["groups_per_hour"]),
    ("group s p50/p95", lambda r: f"{r['group_seconds']['p50']:.0f} / {r['group_seconds']['p95']:.0f}"),
    ("places", lambda r: f"{r['places_taken']:.1%}"),
    ("prepare s p50/p95", lambda r: f"{r['preparing_seconds']['p50']:.0f} / {r['preparing_seconds']['p95']:.0f}"),
    ("engine busy", lambda r: f"{r['engine']['busy_share']:.1%}"),
    ("batch", lambda r: r["engine"]["mean_batch"]),
    ("tok/s", lambda r: r["engine"]["sampled_tokens_per_second"]),
    ("prefix hits", lambda r: f"{r['engine']['prefix_hit_rate']:.1%}"),
    ("in vain", lambda r: f"{r['sampled_in_vain']:.1%}"),
    ("tail s", lambda r: r["empty_tail_seconds"]),
    ("GB", lambda r: r["sandboxes_most_gb"]),
    ("RSS MB", lambda r: r["rss_mb"]),
    ("CPU s", lambda r: r["cpu_seconds"]),
    ("wall s (store)", lambda r: f"{r['wall_seconds']} ({r['store_seconds']})"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", default="100,1000,10000")
    parser.add_argument("--settings", default=",".join(SETTINGS), help=", ".join(SETTINGS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=("auto", "sqlite", "thin"), default="auto")
    parser.add_argument("--waves", type=float, help="rollouts per concurrent agent; default 4, with 10,000 agents 2")
    parser.add_argument("--at-once", type=int, default=2, help="simulations at a time, each in a process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        logging.getLogger("polar_proxy").setLevel(logging.ERROR)  # a line for each stage of 10,000 rollouts is noise
        case = json.loads(arguments.one)
        print(json.dumps(run_one(Case(**{**case, "setting": Setting(**case["setting"])}))))
        return 0
    sizes = [int(size) for size in arguments.sizes.split(",")]
    wanted = cases(sizes, arguments.settings.split(","), arguments.seed, arguments.store, arguments.waves)
    with ThreadPoolExecutor(arguments.at_once) as threads:
        rows = list(threads.map(_in_process, wanted))
    if arguments.json:
        models = {
            "agent": asdict(AgentModel()),
            "engine": asdict(EngineModel()),
        }
        print(json.dumps({"rows": rows, "models": models, "group": GROUP, "cores": os.cpu_count()}, indent=1))
        return 0
    print("| " + " | ".join(name for name, _ in COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(str(value(row)) for _, value in COLUMNS) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
