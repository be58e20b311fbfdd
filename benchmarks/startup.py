"""From the queue to the agent's first call: cold and warm, in each kind of sandbox, with the warm pool and without.

    python benchmarks/startup.py --json
    python benchmarks/startup.py --harness mini-swe-agent --sandboxes bubblewrap --repeat 3

The agent is a script whose first act is its first call, so that the time is Polar's; with --harness it is a real one's.
The rollouts are siblings of one group: what waits on the shelf was opened for the sibling before.
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
    chosen,
    containers_of,
    finished,
    own_folder,
    python_inside,
    service,
    spread,
)
from benchmarks._stacks.reconcile import left_behind
from polar_proxy.config import EngineSettings, Settings
from polar_proxy.engines.factory import make_engine
from polar_proxy.rollouts import JobSpec, ServiceLimits
from polar_proxy.rollouts.worker import WorkerLimits
from polar_proxy.store import RolloutRow, Store
from polar_proxy.tasks import get_source
from sandboxes.base import SandboxKind

REST_SECONDS = 1.0
"""What the scripted agent does after its call: a real one works for minutes, while the next sandboxes are opened."""
AGENT = Path(__file__).parent / "_stacks" / "witness_agent.py"


async def times_of(store: Store, row: RolloutRow) -> dict[str, float]:
    """Seconds of one rollout; raises RuntimeError where its agent never called."""
    assert row.session_id is not None
    calls = await store.calls.summaries(row.session_id)
    if not calls:
        raise RuntimeError(f"no call: {row.status} {row.error}")
    stages = {stage.stage: stage for stage in await store.rollouts.stages(row.rollout_id)}
    began, ready, running = stages["preparing"].started_at, stages["preparing"].ended_at, stages["running"].started_at
    assert ready is not None
    first = calls[0].started_at
    return {
        "to_first_call": first - began,
        "preparing": ready - began,
        "agent": first - running,
    }


async def one(kind: SandboxKind, pool: bool, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A group, one sibling after the other, the first in a process whose register, repositories and shelf are empty."""
    folder.mkdir()
    limits = ServiceLimits(
        WorkerLimits(in_flight=1, running=1, poll_seconds=0.05), pool_size=2 if pool else 0, refill=pool
    )
    harness = (
        given.harness or f"shell:{python_inside()} -S {{mount:{AGENT}}} --witness /tmp --turns 1 --rest {REST_SECONDS}"
    )
    task = get_source("swe-task").task(0)
    async with (
        make_engine(EngineSettings(kind="scripted")) as engine,
        service(folder, engine, limits, Settings().harness_cache) as (running, store),
    ):
        spec = JobSpec(harness=harness, sandbox=kind, timeout=120.0, samples=given.repeat + 1)
        rows = await finished(running, store, [task], spec)
        # The queue is worked off in no order that a sibling's number would tell.
        measured = [await times_of(store, row) for row in sorted(rows, key=lambda row: row.started_at or 0.0)]
        counts = running.pool.count
    names = measured[0].keys()
    return {
        "cold": {name: round(measured[0][name], 3) for name in names},
        "warm": {name: spread([each[name] for each in measured[1:]], 3) for name in names},
        "pool": {"hits": counts.hits, "misses": counts.misses},
    }


async def measure(kinds: list[SandboxKind], folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in kinds:
        found[kind] = {}
        for pool in (False, True):
            name = "pool" if pool else "no_pool"
            print(f"{kind}, {name} ...", file=sys.stderr, flush=True)
            found[kind][name] = await one(kind, pool, folder / f"{kind}-{name}", given)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", help="comma-separated; default: all that can be used here")
    parser.add_argument("--repeat", type=int, default=8, help="warm rollouts of each")
    parser.add_argument("--harness", help="a real agent, by name; it must be installed")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        kinds, missing = chosen(given.sandboxes)
    except ValueError as error:
        parser.error(str(error))
    with own_folder("startup") as folder:
        found = asyncio.run(measure(kinds, folder, given))
        remains = [*left_behind(folder), *containers_of(os.getpid())]
    agent = given.harness or "a script"
    document = {"kinds": found, "repeat": given.repeat, "agent": agent, "missing": missing, "left_behind": remains}
    if given.json:
        print(json.dumps(document, indent=1))
        return 1 if remains else 0
    print("| sandbox | pool | cold, s | warm, s: median (least - most) | of it: preparing, s | agent, s |")
    print("|---|---|---|---|---|---|")
    for kind, both in found.items():
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
