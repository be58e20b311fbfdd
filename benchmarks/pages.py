"""The web page: bytes of its assets, server time of each page among a million calls, memory with 50 open pages.

    python benchmarks/pages.py [--calls N] [--db FILE] [--open N] [--seconds N] [--json]

An open page is a client that follows the events and asks for its page and the parts of it as often as a browser does.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks._stacks import million  # noqa: E402
from polar_proxy.view.templates import ASSETS  # noqa: E402

POLL_SECONDS = 5.0
"""As `data-poll` of the overview."""


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


async def stay_open(client: httpx.AsyncClient, until: float, latencies: list[float]) -> None:
    """Behave like an open overview until the time is over, and record the seconds of each of its requests."""

    async def follow() -> None:
        async with client.stream("GET", "/view/events", timeout=None) as answer:
            async for _ in answer.aiter_bytes():
                pass

    events = asyncio.create_task(follow())
    try:
        while time.monotonic() < until:
            for path in ("/", "/view/parts/service"):
                started = time.perf_counter()
                (await client.get(path)).raise_for_status()
                latencies.append(time.perf_counter() - started)
            await asyncio.sleep(POLL_SECONDS)
    finally:
        events.cancel()
        with suppress(asyncio.CancelledError):
            await events


async def open_pages(url: str, process: int, number: int, seconds: float) -> dict[str, float]:
    """Return the server's memory before and with open pages, and the latency of their requests."""
    # The server closes connections that are idle for five seconds; a request must not use one just then.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as client:
        (await client.get("/")).raise_for_status()
        before = resident_mb(process)
        latencies: list[float] = []
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(stay_open(client, until, latencies))
                await asyncio.sleep(POLL_SECONDS / number)  # people do not open pages at the same moment
            await asyncio.sleep(max(0.0, until - time.monotonic() - 1))
            with_pages = resident_mb(process)
        latencies.sort()
        return {
            "open_pages": number,
            "memory_mb": before,
            "memory_open_mb": with_pages,
            "requests": len(latencies),
            "median_ms": round(latencies[len(latencies) // 2] * 1000, 1),
            "p99_ms": round(latencies[len(latencies) * 99 // 100] * 1000, 1),
        }


def measure_open(database: Path, number: int, seconds: float) -> dict[str, float]:
    polar = str(Path(sys.executable).with_name("polar"))
    command = [polar, "view", "--db", str(database), "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads("".join(process.stdout.readline() for _ in range(3)))["url"]
            return asyncio.run(open_pages(url, process.pid, number, seconds))
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=1_000_000, help="calls in the database (1,000,000)")
    parser.add_argument("--db", type=Path, help="keep the database in this file, and use it if it exists")
    parser.add_argument("--open", type=int, default=50, help="open pages (50)")
    parser.add_argument("--seconds", type=float, default=30, help="how long they are open (30)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    arguments = parser.parse_args()
    document = asset_bytes()
    with tempfile.TemporaryDirectory(prefix="polar-pages-") as name:
        database = arguments.db or Path(name) / "million.db"
        if not database.exists():
            million.fill(database, arguments.calls)
        document["pages_ms"] = million.measure_pages(database, arguments.calls)
        document |= measure_open(database, arguments.open, arguments.seconds)
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    for key, value in document.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
