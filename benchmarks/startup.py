"""Time from the queue to the agent's first call: cold and warm, in each kind of sandbox, with and without warm pool.

    python benchmarks/startup.py --json
    python benchmarks/startup.py --harness mini-swe-agent --sandboxes bubblewrap --repeat 3

The agent is a script that calls at once, so that only Polar's time is measured; --harness measures a real agent. The
rollouts belong to one group, so each of them finds sandboxes that the pool opened during the rollout before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks._stacks.deployed import (
    containers_of,
    finished,
    own_folder,
    python_inside,
    service,
    spread,
    usable_sandboxes,
)
from benchmarks._stacks.reconcile import left_behind
from polar_proxy.config import EngineSettings, Settings
from polar_proxy.engines.factory import make_engine
from polar_proxy.rollouts import JobSpec, ServiceLimits
from polar_proxy.store import RolloutRow, Store
from polar_proxy.tasks import get_source
from sandboxes.base import SandboxKind

REST_SECONDS = 1.0
"""Time that the scripted agent keeps running after its call, in which the pool opens the next sandboxes."""
AGENT = Path(__file__).parent / "_stacks" / "logging_agent.py"


async def times_of(store: Store, row: RolloutRow) -> dict[str, float]:
    """Return the seconds of one rollout by phase. Raises RuntimeError if its agent never called the model."""
    assert row.session_id is not None
    calls = await store.calls.summaries(row.session_id)
    if not calls:
        raise RuntimeError(f"no call: {row.status} {row.error}")
    stages = {stage.stage: stage for stage in await store.rollouts.stages(row.rollout_id)}
    started, ready, running = stages["preparing"].started_at, stages["preparing"].ended_at, stages["running"].started_at
    assert ready is not None
    first = calls[0].started_at
    return {
        "to_first_call": first - started,
        "preparing": ready - started,
        "agent": first - running,
    }


async def measure_group(kind: SandboxKind, pool: bool, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the rollouts of a group one after the other; the first one starts with empty caches and an empty pool."""
    folder.mkdir()
    limits = ServiceLimits(in_flight=1, running=1, poll_seconds=0.05, pool_size=2 if pool else 0, refill=pool)
    harness = (
        arguments.harness or f"shell:{python_inside()} -S {{mount:{AGENT}}} --log /tmp --turns 1 --rest {REST_SECONDS}"
    )
    task = get_source("swe-task").task(0)
    async with (
        make_engine(EngineSettings(kind="scripted")) as engine,
        service(folder, engine, limits, Settings().harness_cache) as (running, store),
    ):
        spec = JobSpec(harness=harness, sandbox=kind, timeout=120.0, samples=arguments.repeat + 1)
        rows = await finished(running, store, [task], spec)
        # The queue does not preserve the order of siblings.
        measured = [await times_of(store, row) for row in sorted(rows, key=lambda row: row.started_at or 0.0)]
        counts = running.pool.count
    names = measured[0].keys()
    return {
        "cold": {name: round(measured[0][name], 3) for name in names},
        "warm": {name: spread([each[name] for each in measured[1:]], 3) for name in names},
        "pool": {"hits": counts.hits, "misses": counts.misses},
    }


async def measure(kinds: list[SandboxKind], folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in kinds:
        results[kind] = {}
        for pool in (False, True):
            name = "pool" if pool else "no_pool"
            print(f"{kind}, {name} ...", file=sys.stderr, flush=True)
            results[kind][name] = await measure_group(kind, pool, folder / f"{kind}-{name}", arguments)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", help="comma-separated list; default: all that run here")
    parser.add_argument("--repeat", type=int, default=8, help="warm rollouts of each case")
    parser.add_argument("--harness", help="name of a real agent, which must be installed")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        kinds, missing = usable_sandboxes(arguments.sandboxes)
    except ValueError as error:
        parser.error(str(error))
    with own_folder("startup") as folder:
        results = asyncio.run(measure(kinds, folder, arguments))
        remains = [*left_behind(folder), *containers_of(os.getpid())]
    agent = arguments.harness or "a script"
    document = {
        "kinds": results,
        "repeat": arguments.repeat,
        "agent": agent,
        "missing": missing,
        "left_behind": remains,
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
        return 1 if remains else 0
    print("| sandbox | pool | cold, s | warm, s: median (least - most) | of it: preparing, s | agent, s |")
    print("|---|---|---|---|---|---|")
    for kind, both in results.items():
        for name, times in both.items():
            warm, parts = times["warm"]["to_first_call"], times["warm"]
            row = [kind, "on" if name == "pool" else "off", f"{times['cold']['to_first_call']:.2f}"]
            row += [f"{warm['median']:.2f} ({warm['least']:.2f} - {warm['most']:.2f})"]
            row += [f"{parts['preparing']['median']:.2f}", f"{parts['agent']['median']:.2f}"]
            print("| " + " | ".join(row) + " |")
    for line in remains:
        print(line, file=sys.stderr)
    return 1 if remains else 0


if __name__ == "__main__":
    sys.exit(main())
