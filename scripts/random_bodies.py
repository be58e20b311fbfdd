#!/usr/bin/env python
"""Send random bodies to every model route of a temporary gateway and print how often each status came.

    scripts/random_bodies.py --count 10000 [--seed 1] [--json]

Exit status 1 if an answer is neither in its route's format nor a 4xx in its error format, if an answered call is not in
the store, or if a route does not answer a valid body afterwards. Needs the dependencies of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from polar_proxy.config import GatewaySettings
from polar_proxy.gateway import Gateway
from polar_proxy.store import open_store
from tests.gateway.random_bodies import RandomAnswers, StormReport, send_random_bodies


async def run(count: int, seed: int) -> StormReport:
    engine = RandomAnswers(random.Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        async with (
            open_store(f"sqlite:///{folder}/calls.db") as store,
            engine,
            Gateway(engine, store, GatewaySettings(port=0)) as gateway,
        ):
            return await send_random_bodies(gateway, store, count, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    arguments = parser.parse_args()
    started = time.monotonic()
    report = asyncio.run(run(arguments.count, arguments.seed))
    seconds = time.monotonic() - started
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, "seconds": round(seconds, 1), **report.to_json()}, indent=1))
    else:
        print(report.table())
        print(f"{arguments.count} bodies in {seconds:.0f} s, seed {arguments.seed}; wrong: {len(report.wrong)}")
    for problem in report.wrong:
        print(problem, file=sys.stderr)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
