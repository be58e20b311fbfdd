"""Time by stage of 64 rollouts of `swe-task` (8 groups of 8) in each kind of sandbox.

python benchmarks/rollouts.py --engine vllm --json           # POLAR_VLLM_CPU: folder of scripts/vllm_cpu.sh
python benchmarks/rollouts.py --engine local --groups 2 --samples 2 --sandboxes bubblewrap
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks._stacks import kill_targets
from benchmarks._stacks.deployed import containers_of, finished, own_folder, service, spread, usable_sandboxes
from benchmarks._stacks.reconcile import left_behind
from benchmarks._stacks.stacks import StackError
from polar_proxy.config import EngineSettings, Settings
from polar_proxy.engines.factory import make_engine
from polar_proxy.rollouts import JobSpec, ServiceLimits
from polar_proxy.store import RolloutRow, Store
from polar_proxy.tasks import get_source
from sandboxes.base import SandboxKind

STAGES = ("queued", "preparing", "ready", "running", "scoring")


async def run_kind(
    kind: SandboxKind, folder: Path, arguments: argparse.Namespace, settings: EngineSettings
) -> dict[str, Any]:
    folder.mkdir()
    limits = ServiceLimits.of(Settings(), agents=arguments.concurrency)
    source = get_source("swe-task")
    tasks = [source.task(seed) for seed in range(arguments.groups)]
    spec = JobSpec(harness=arguments.harness, sandbox=kind, timeout=arguments.timeout, samples=arguments.samples)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(make_engine(settings))
        harnesses = Settings().harness_cache  # with the agents that are installed already
        running, store = await stack.enter_async_context(service(folder, engine, limits, harnesses))
        started = time.time()
        rows = await finished(running, store, tasks, spec)
        seconds = time.time() - started
        pool = running.pool.count
        return {
            "rollouts": len(rows),
            "seconds": round(seconds, 1),
            "statuses": dict(Counter(row.status for row in rows)),
            "attempts": dict(Counter(str(row.attempt) for row in rows)),
            "rewards": dict(Counter("none" if row.reward is None else f"{row.reward:g}" for row in rows)),
            "stages": await stage_times(store, rows),
            "pool": {
                "hits": pool.hits,
                "misses": pool.misses,
                "dead": pool.dead,
                "hit_rate": round(pool.hits / max(1, pool.hits + pool.misses), 3),
                "waited_s": round(pool.waited, 1),
            },
            **await engine_times(store, rows, started, seconds),
        }


async def stage_times(store: Store, rows: list[RolloutRow]) -> dict[str, Any]:
    """Return the seconds in each stage over all attempts; `queued` lasts until the first attempt starts."""
    times: dict[str, list[float]] = {name: [] for name in STAGES}
    for row in rows:
        stages = await store.rollouts.stages(row.rollout_id)
        if stages:
            times["queued"].append(stages[0].started_at - row.created_at)
        for stage in stages:
            if stage.ended_at is not None and stage.stage in times:
                times[stage.stage].append(stage.ended_at - stage.started_at)
    return {name: spread(values) for name, values in times.items()}


async def engine_times(store: Store, rows: list[RolloutRow], started: float, seconds: float) -> dict[str, Any]:
    """Return the share of time in which at least one call was with the engine, and the mean number of such calls.

    Times are those of the gateway, so they include its own cost of a call.
    """
    spans, tokens = [], 0
    for row in rows:
        for session_id in await store.sessions.ids_of_rollout(row.rollout_id):
            for call in await store.calls.summaries(session_id):
                spans.append((call.started_at, call.ended_at))
                tokens += call.completion_tokens
    busy, end = 0.0, started
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {
        "calls": len(spans),
        "completion_tokens": tokens,
        "engine": {
            "busy_share": round(busy / seconds, 3),
            "in_flight": round(sum(stop - start for start, stop in spans) / seconds, 2),
            "call_s": spread([stop - start for start, stop in spans]),
        },
    }


async def measure(kinds: list[SandboxKind], folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    settings = EngineSettings(kind="local")
    server: kill_targets.EngineProcess | None = None
    if arguments.engine == "vllm":
        server = kill_targets.EngineProcess(folder, "vllm")
        await asyncio.to_thread(server.start)
        settings = EngineSettings(kind="vllm", url=server.url, model=server.model)
    results = {}
    try:
        for kind in kinds:
            print(f"{kind}: {arguments.groups} groups of {arguments.samples} ...", file=sys.stderr, flush=True)
            results[kind] = await run_kind(kind, folder / kind, arguments, settings)
    finally:
        if server is not None:
            server.stop()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "local"), default="vllm")
    parser.add_argument("--sandboxes", default="docker,bubblewrap")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=8, help="agents at a time")
    parser.add_argument("--harness", default="mini-swe-agent")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        kinds, _ = usable_sandboxes(arguments.sandboxes)
    except ValueError as error:
        parser.error(str(error))
    try:
        with own_folder("rollouts") as folder:
            results = asyncio.run(measure(kinds, folder, arguments))
            remains = [*left_behind(folder), *containers_of(os.getpid())]
    except StackError as error:
        print(error, file=sys.stderr)
        return 2
    setting = {name: getattr(arguments, name) for name in ("engine", "groups", "samples", "concurrency", "harness")}
    document = {"setting": setting, "kinds": results, "left_behind": len(remains), "remains": remains}
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print(table(document))
        for line in remains:
            print(line, file=sys.stderr)
    return 1 if remains else 0


def table(document: dict[str, Any]) -> str:
    """Return a Markdown table of seconds: median / 90th percentile."""
    kinds = document["kinds"]
    lines = ["| | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]

    def line(name: str, values: list[str]) -> None:
        lines.append(f"| {name} | " + " | ".join(values) + " |")

    for stage in STAGES:
        times = [one["stages"][stage] for one in kinds.values()]
        line(stage, ["-" if each is None else f"{each['median']:.1f} / {each['p90']:.1f}" for each in times])
    line("whole run, s", [f"{one['seconds']:.0f}" for one in kinds.values()])
    line("ends", [", ".join(f"{n} {name}" for name, n in one["statuses"].items()) for one in kinds.values()])
    line("calls", [str(one["calls"]) for one in kinds.values()])
    line("pool hit rate", [f"{one['pool']['hit_rate']:.2f}" for one in kinds.values()])
    line("engine busy share", [f"{one['engine']['busy_share']:.2f}" for one in kinds.values()])
    line("left behind", [str(document["left_behind"])] * len(kinds))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
