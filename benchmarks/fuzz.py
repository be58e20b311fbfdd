"""Random requests to all routes of a real gateway, beside an honest session whose answers and latency are checked.

    python benchmarks/fuzz.py                              # 100,000 requests
    python benchmarks/fuzz.py --requests 3000 --seed 5 --db postgresql
    python benchmarks/fuzz.py --seed 5 --only 1234         # one request again, and its answer

The exit code is 1 if there is a finding. Findings are:

* an answer 5xx, unless it is a documented refusal (503 with a reason, or the engine's own failure)
* an answer that is not in the route's format; a WebSocket that is closed without an answer
* a wait of more than five seconds for an answer, or for the next chunk of one (a whole export may take longer)
* a traceback in the gateway's log; memory that keeps growing
* a wrong answer to the honest session, or a p99 of 250 ms or more in any ten seconds of it
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402

from benchmarks._stacks.fuzz_cases import CaseGenerator, FuzzCase  # noqa: E402
from benchmarks._stacks.fuzz_websockets import UNKNOWN_STEM, WebSocketCase, WebSocketResult, run_websocket  # noqa: E402
from benchmarks._stacks.shared_gateway import (  # noqa: E402
    HONEST_KEY,
    GatewayProcess,
    HonestSession,
    honest_session,
    quantile,
    shared_gateway,
)
from tests.gateway.random_bodies import find_fault  # noqa: E402

TOGETHER = 16
HANG_SECONDS = 5.0
P99_SECONDS = 0.25
WINDOW_SECONDS = 10.0
LARGE = 1 << 20
"""Size in bytes from which an answer takes long to check."""
MEMORY_MB = 400
"""MB by which the gateway's memory may grow after a fifth of the requests; or half of its size then, if that is
more."""
ENGINE_CODES = ("engine_error", "not_recorded", "unavailable")
"""Codes of documented refusals with status 5xx."""
LOGGED_FAULTS = ("failed inside Polar", "Traceback")
"""Words in the gateway's log that show an error in the gateway."""


@dataclass
class FuzzReport:
    requests: int = 0
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    by_route: dict[str, Counter[int]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    refused_5xx: int = 0
    """Number of documented answers 5xx: the engine's failure, or 503 with a reason."""
    longest_wait: float = 0.0
    """Longest wait, in seconds, for the head of an answer, a chunk of it, or a whole WebSocket conversation."""
    memory_mb: list[float] = field(default_factory=list)
    honest: dict[str, float] = field(default_factory=dict)
    longest_stall: float = 0.0
    """Longest stall of the gateway's event loop, in seconds, without the time in which it waited for a processor."""

    def count(self, name: str, status: int, seconds: float) -> str | None:
        """Count an answer. `seconds`: the client's longest wait for it. Return a problem if that was too long."""
        self.requests += 1
        self.statuses[status] += 1
        self.by_route.setdefault(name, Counter())[status] += 1
        self.longest_wait = max(self.longest_wait, seconds)
        return f"a wait of {seconds:.1f} s" if seconds > HANG_SECONDS else None

    def to_json(self) -> dict[str, Any]:
        routes = {name: {str(code): n for code, n in sorted(found.items())} for name, found in self.by_route.items()}
        return {
            "requests": self.requests,
            "requests_per_second": round(self.requests / max(self.seconds, 1e-9)),
            "statuses": {str(code): n for code, n in sorted(self.statuses.items())},
            "documented_5xx": self.refused_5xx,
            "longest_wait_seconds": round(self.longest_wait, 2),
            "memory_mb": [round(value) for value in self.memory_mb[:: max(1, len(self.memory_mb) // 20)]],
            "honest": self.honest,
            "longest_stall_ms": round(self.longest_stall * 1e3, 1),
            "findings": self.findings,
            "routes": routes,
        }


class Patience:
    """Limits and measures a client's reads: `longest` is the longest one in seconds. Raises TimeoutError after 30 s."""

    longest = 0.0

    async def wait(self, reading: Awaitable[bytes]) -> bytes:
        started = time.monotonic()
        try:
            async with asyncio.timeout(6 * HANG_SECONDS):
                return await reading
        finally:
            self.longest = max(self.longest, time.monotonic() - started)


class FuzzConnection:
    """A connection that is opened again when the gateway closes it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.patience = Patience()
        """Waits of the current exchange."""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, case: FuzzCase) -> httpx.Response | None:
        """Return the answer; None if the connection was closed without one, or a read took too long."""
        stem, self.patience = UNKNOWN_STEM, Patience()
        for request in case.before:
            sent = request.replace(UNKNOWN_STEM.encode(), stem.encode())
            answer = await self._exchange(replace(case, request=sent, endless=False))
            if answer is None or answer.status_code >= 500:
                return answer
            stem = _created_stem(answer) or stem
        return await self._exchange(replace(case, request=case.request.replace(UNKNOWN_STEM.encode(), stem.encode())))

    async def _exchange(self, case: FuzzCase) -> httpx.Response | None:
        for last in (False, True):
            fresh = self._streams is None
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
            reader, writer = self._streams
            try:
                writer.write(case.request)
                if case.route is None and case.name == "damaged HTTP":
                    writer.write_eof()  # otherwise the gateway would wait for the rest of a damaged request
                answer = await read_answer(reader, case, self.patience)
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                self.close()
                if fresh or last:
                    return None
                continue  # the gateway had closed the idle connection
            keeps = answer.headers.get("connection") != "close" and case.name != "damaged HTTP" and not case.endless
            if not keeps or answer.request.method == "HEAD":
                self.close()
            return answer
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


def _created_stem(answer: httpx.Response) -> str | None:
    """Return the id, without its prefix, of the response or conversation that a request created; None if it created
    none."""
    if (call_id := answer.headers.get("x-polar-call-id")) is not None:
        return call_id.removeprefix("call_")
    found = re.match(rb'\{"id":"conv_(\w+)"', answer.content)
    return None if found is None else found[1].decode()


async def read_answer(reader: asyncio.StreamReader, case: FuzzCase, patience: Patience) -> httpx.Response:
    while True:
        head = (await patience.wait(reader.readuntil(b"\r\n\r\n"))).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        status = int(first.split(" ")[1])
        if status >= 200:
            break
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    method = case.request.split(b" ", 1)[0].decode("latin-1")
    if (case.endless and status == 200) or method == "HEAD" or status in (204, 304):
        body = b""
    elif headers.get("transfer-encoding") == "chunked":
        body = await read_chunks(reader, patience)
    else:
        body = await patience.wait(reader.readexactly(int(headers["content-length"])))
    kept = {name: value for name, value in headers.items() if name != "transfer-encoding"}
    request = httpx.Request("HEAD" if method == "HEAD" else "POST", "http://localhost/")
    return httpx.Response(status, headers=kept, content=body, request=request)


async def read_chunks(reader: asyncio.StreamReader, patience: Patience) -> bytes:
    parts = []
    while True:
        size = int((await patience.wait(reader.readuntil(b"\r\n")))[:-2], 16)
        parts.append((await patience.wait(reader.readexactly(size + 2)))[:-2])
        if size == 0:
            return b"".join(parts)


async def judge(case: FuzzCase, answer: httpx.Response | None, seconds: float, report: FuzzReport) -> str | None:
    """Count an answer, and return what is wrong with it."""
    status = 0 if answer is None else answer.status_code
    if problem := report.count(case.name, status, seconds):
        return problem
    if answer is None:
        return None if case.name == "damaged HTTP" else "closed without an answer"
    if status >= 500:
        if code_of(answer) in ENGINE_CODES:
            report.refused_5xx += 1
            return None
        return f"status {status}: {answer.text[:300]}"
    if case.route is None:
        return None
    if len(answer.content) < LARGE:
        return find_fault(case.route, answer)
    return await asyncio.to_thread(find_fault, case.route, answer)  # the other clients must not wait for it


def code_of(answer: httpx.Response) -> str | None:
    """Return the machine-readable code of an error: its `code`, or its `type` in dialects without a code; None if the
    answer is not an error object."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return error.get("code") if isinstance(error.get("code"), str) else error.get("type")


async def attempt(case: FuzzCase | WebSocketCase, connection: FuzzConnection, report: FuzzReport) -> str | None:
    """Send a case, count its answer, and return what is wrong with it."""
    if isinstance(case, FuzzCase):
        answer = await connection.exchange(case)
        return await judge(case, answer, connection.patience.longest, report)
    started = time.monotonic()
    result = WebSocketResult(0, "no answer")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(6 * HANG_SECONDS):
            result = await run_websocket(connection.port, case, ENGINE_CODES)
    return report.count(case.name, result.status, time.monotonic() - started) or result.problem


async def fuzz(gateway: GatewayProcess, cases: CaseGenerator, requests: int, report: FuzzReport) -> None:
    numbers = count()

    async def client() -> None:
        connection = FuzzConnection(gateway.port)
        while (number := next(numbers)) < requests:
            case = cases.make(number)
            if problem := await attempt(case, connection, report):
                report.findings.append(f"--only {number}: {case.name}: {problem}")
        connection.close()

    async def watch() -> None:
        while True:
            report.memory_mb.append(gateway.rss_mb())
            print(f"{report.requests} requests, {len(report.findings)} findings", file=sys.stderr)
            await asyncio.sleep(2)

    watching = asyncio.create_task(watch())
    started = time.monotonic()
    await asyncio.gather(*(client() for _ in range(TOGETHER)))
    report.seconds = time.monotonic() - started
    watching.cancel()
    report.memory_mb.append(gateway.rss_mb())


def judge_the_rest(honest: HonestSession, started: float, report: FuzzReport) -> None:
    """Add findings about the honest session, window by window, and about the memory."""
    requests = honest.since(started)
    seconds = [seconds for _, seconds, _ in requests]
    report.honest = {name: round(quantile(seconds, q) * 1e3, 1) for name, q in (("p50_ms", 0.5), ("p99_ms", 0.99))}
    windows = Counter[int]()
    worst = 0.0
    for window in range(int(report.seconds / WINDOW_SECONDS) + 1):
        begin = started + window * WINDOW_SECONDS
        inside = [seconds for ended, seconds, _ in requests if begin <= ended < begin + WINDOW_SECONDS]
        windows[window] = len(inside)
        if inside:
            worst = max(worst, quantile(inside, 0.99))
    report.honest |= {"requests": len(requests), "worst_window_p99_ms": round(worst * 1e3, 1)}
    if worst >= P99_SECONDS:
        report.findings.append(f"the honest session's p99 was {worst * 1e3:.0f} ms within ten seconds")
    if wrong := [problem for _, _, problem in requests if problem]:
        report.findings.append(f"{len(wrong)} answers to the honest session were wrong: {wrong[0]}")
    if not requests:
        report.findings.append("the honest session got no answer")
    warm, last = report.memory_mb[len(report.memory_mb) // 5], report.memory_mb[-1]
    if last > warm + max(MEMORY_MB, warm / 2):
        report.findings.append(f"memory grew from {warm:.0f} to {last:.0f} MB")


def judge_the_log(log: Path, report: FuzzReport) -> None:
    lines = log.read_text(errors="replace").splitlines()
    for place, line in enumerate(lines):
        if any(words in line for words in LOGGED_FAULTS):
            report.findings.append("the gateway's log: " + "\n".join(lines[place : place + 40]))
            return


async def run(
    requests: int, seed: int, only: int | None, folder: Path, db: Literal["sqlite", "postgresql"] = "sqlite"
) -> FuzzReport:
    report = FuzzReport()
    keys = [f"sk-fuzz-{number}" for number in range(8)]
    async with shared_gateway(folder, [HONEST_KEY, *keys], db) as (gateway, _):
        async with httpx.AsyncClient() as http:
            openapi = (await http.get(f"http://127.0.0.1:{gateway.port}/openapi.json")).json()
        admin_key = (folder / "home" / "api-key").read_text().strip()
        cases = CaseGenerator(seed, keys, admin_key, openapi)
        if only is not None:
            case = cases.make(only)
            print(case)
            if isinstance(case, FuzzCase):
                answer = await FuzzConnection(gateway.port).exchange(case)
                print("\n\n->", answer, answer and answer.text)
                problem = await judge(case, answer, 0.0, report)
            else:
                result = await run_websocket(gateway.port, case, ENGINE_CODES)
                print("\n\n->", result)
                problem = result.problem
            if problem:
                report.findings.append(f"--only {only}: {case.name}: {problem}")
            judge_the_log(gateway.log, report)
            return report
        with honest_session(gateway.port) as honest:
            while not honest.requests:  # noqa: ASYNC110 (a thread reads them)
                await asyncio.sleep(0.1)
            # Attackers have processors of their own: these clients must not take those of the gateway.
            os.setpriority(os.PRIO_PROCESS, 0, 10)
            started = time.monotonic()
            await fuzz(gateway, cases, requests, report)
            report.longest_stall = gateway.longest_stall(started).own
            judge_the_rest(honest, started, report)
            judge_the_log(gateway.log, report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--db", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="send this request alone and print its answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="polar-fuzz-"))
    os.chmod(folder, 0o700)
    try:
        report = asyncio.run(run(arguments.requests, arguments.seed, arguments.only, folder, arguments.db))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = report.to_json()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.only is None:
        routes = found.pop("routes")
        for name, value in found.items():
            if name != "findings":
                print(f"{name:20} {value}")
        for name, statuses in sorted(routes.items()):
            print(f"  {name:50} {statuses}")
    for finding in report.findings:
        print(f"FINDING (seed {arguments.seed}) {finding}")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
