"""The web page: bytes of its assets, server time of each page among a million calls, memory with 50 open pages.

    python benchmarks/pages.py [--calls N] [--db FILE] [--open N] [--seconds N]
                               [--changes N] [--json]

An open page is a client that follows the changes and asks for its page and the parts of it as often as a browser does.
In the first half of the time nothing changes. In the second half, a session gets a call `--changes` times a second.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks._stacks import million  # noqa: E402
from polar_proxy.view.templates import ASSETS  # noqa: E402

PART_SECONDS, QUIET_SECONDS, REST = 2.0, 0.3, 10
"""Like PART_MS, QUIET_MS and REST in assets/page.js, with the times in seconds."""


def asset_bytes() -> dict[str, Any]:
    """Return the bytes of each asset, and their sums before and after compression."""
    contents = {file.name: file.read_bytes() for file in sorted(ASSETS.iterdir()) if file.is_file()}
    return {
        "assets": {name: len(content) for name, content in contents.items()},
        "assets_bytes": sum(map(len, contents.values())),
        "assets_deflated_bytes": sum(len(zlib.compress(content, 9)) for content in contents.values()),
    }


def resident_mb(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return round(int(found[1]) / 1024, 1)


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stay_open(client: httpx.AsyncClient, latencies: list[float]) -> None:
    """Send the requests of an open overview page until cancelled, and append the seconds of each to `latencies`."""
    changed = asyncio.Event()

    async def get(path: str) -> float:
        started = time.perf_counter()
        (await client.get(path)).raise_for_status()
        latencies.append(time.perf_counter() - started)
        return latencies[-1]

    async def follow() -> None:
        async with client.stream("GET", "/view/changes/lists", timeout=None) as answer:
            async for piece in answer.aiter_bytes():
                if b"change" in piece:
                    changed.set()

    async def update() -> None:
        while await changed.wait():
            changed.clear()
            await asyncio.sleep(max(QUIET_SECONDS, REST * await get("/")))

    async def show_service() -> None:
        while True:
            await get("/view/parts/service")
            await asyncio.sleep(PART_SECONDS)

    async with asyncio.TaskGroup() as group:
        for work in (follow, update, show_service):
            group.create_task(work())


async def change(database: Path, per_second: float) -> None:
    """Add 1 to the number of calls of the newest session, `per_second` times a second."""
    counted = "UPDATE sessions SET calls = calls + 1 WHERE session_id = (SELECT max(session_id) FROM sessions)"
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        while True:
            connection.execute(counted)
            await asyncio.sleep(1 / per_second)


async def open_pages(
    url: str, process: int, number: int, seconds: float, changing: Callable[[], Coroutine[Any, Any, None]]
) -> dict[str, float]:
    """Return the server's memory before and with open pages, its processor time, and the latency of their requests."""
    # The server closes connections that are idle for five seconds; a request must not use one just then.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as client:
        (await client.get("/")).raise_for_status()
        result: dict[str, float] = {"open_pages": number, "memory_mb": resident_mb(process)}
        latencies: list[float] = []
        tasks = []
        for _ in range(number):
            tasks.append(asyncio.create_task(stay_open(client, latencies)))
            await asyncio.sleep(5 / number)  # people do not open pages at the same moment
        for name in ("idle", "changing"):
            latencies.clear()
            if name == "changing":
                tasks.append(asyncio.create_task(changing()))
            started = processor_seconds(process)
            await asyncio.sleep(seconds / 2)
            result |= {
                f"{name}_processor_share": round((processor_seconds(process) - started) / seconds * 2, 3),
                f"{name}_requests": len(latencies),
                f"{name}_median_ms": round(statistics.median(latencies) * 1000, 1),
                f"{name}_p99_ms": round(statistics.quantiles(latencies, n=100)[98] * 1000, 1),
            }
        result["memory_open_mb"] = resident_mb(process)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return result


def measure_open(database: Path, number: int, seconds: float, per_second: float) -> dict[str, float]:
    polar = str(Path(sys.executable).with_name("polar"))
    command = [polar, "view", "--db", str(database), "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads("".join(process.stdout.readline() for _ in range(3)))["url"]
            return asyncio.run(open_pages(url, process.pid, number, seconds, lambda: change(database, per_second)))
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=1_000_000, help="calls in the database (1,000,000)")
    parser.add_argument("--db", type=Path, help="keep the database in this file, and use it if it exists")
    parser.add_argument("--open", type=int, default=50, help="open pages (50)")
    parser.add_argument("--seconds", type=float, default=30, help="how long they are open (30)")
    parser.add_argument("--changes", type=float, default=5, help="changes a second in the second half (5)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    arguments = parser.parse_args()
    document = asset_bytes()
    with tempfile.TemporaryDirectory(prefix="polar-pages-") as name:
        database = arguments.db or Path(name) / "million.db"
        if not database.exists():
            million.fill(database, arguments.calls)
        document["pages_ms"] = million.measure_pages(database, arguments.calls)
        document |= measure_open(database, arguments.open, arguments.seconds, arguments.changes)
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    for key, value in document.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
