"""A real gateway under attack, and an honest session beside the attacker, for `attacks.py` and `fuzz.py`.

The gateway has 256 file descriptors, known keys only, and a scripted engine. The honest session is a process of its
own, so that a busy attacker does not look like a slow gateway.

    python -m benchmarks._stacks.shared_gateway PORT KEY PAUSE      # the honest session
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Literal

from benchmarks._stacks.kill_targets import EngineProcess, Postgres, ServerProcess
from benchmarks._stacks.loop_stalls import NO_STALL, Stall, read_stalls
from benchmarks._stacks.stacks import ROOT, free_port
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import open_store

DESCRIPTORS = 256
HONEST_KEY = "sk-honest"
_PROGRAM = (
    f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}));"
    "from benchmarks._stacks.loop_stalls import watch_new_loops; watch_new_loops(sys.argv.pop(1));"
    "from polar_proxy.cli import main; sys.exit(main())"
)


class GatewayProcess(ServerProcess):
    """`polar serve` with few file descriptors."""

    name = "gateway"

    def __init__(self, folder: Path, engine: EngineProcess, db: str) -> None:
        self.port = free_port()
        self.db = db
        self._stalls = folder / "loop-stalls.jsonl"
        command = [sys.executable, "-c", _PROGRAM, str(self._stalls)]
        command += ["serve", "--port", str(self.port), "--db", self.db]
        command += ["--engine", "vllm", "--engine-url", engine.url, "--model", engine.model, "--require-known-keys"]
        url = f"http://127.0.0.1:{self.port}/healthz"
        super().__init__(command, folder, url, POLAR_HOME=str(folder / "home"))

    @property
    def _proc(self) -> Path:
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}")

    def rss_mb(self) -> float:
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise ProcessLookupError("the gateway has ended")

    def descriptors(self) -> int:
        return sum(1 for _ in (self._proc / "fd").iterdir())

    def longest_stall(self, since: float) -> Stall:
        """Return the longest stall of the event loop since this time (of `time.monotonic`). The time in which the loop
        waited for a processor does not count (`Stall.own`)."""
        return max(read_stalls(self._stalls, since), key=lambda stall: stall.own, default=NO_STALL)


class BareServer(ServerProcess):
    """The control of a gateway under attack; see `bare_server.py`."""

    name = "bare-server"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "benchmarks._stacks.bare_server", str(self.port)]
        super().__init__(command, folder, f"http://127.0.0.1:{self.port}/ready")


@dataclass
class HonestSession:
    """The requests that the honest process has reported so far, each as (end, seconds, fault or None); the end is a
    value of `time.monotonic`."""

    process: subprocess.Popen[str]
    requests: list[tuple[float, float, str | None]] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            ended, seconds, fault = json.loads(line)
            self.requests.append((ended, seconds, fault))

    def since(self, start: float) -> list[tuple[float, float, str | None]]:
        """Return the requests that ended after `start` (of `time.monotonic`)."""
        return [request for request in self.requests if request[0] >= start]

    async def begun_since(self, start: float) -> list[tuple[float, float, str | None]]:
        """Wait until all requests that began between `start` and now have ended, and return them."""
        now = time.monotonic()
        while not (self.requests and self.requests[-1][0] - self.requests[-1][1] > now):  # noqa: ASYNC110 (a thread reads them)
            await asyncio.sleep(0.02)
        return [request for request in self.requests if start <= request[0] - request[1] <= now]


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("inf")


@contextmanager
def honest_session(port: int, key: str = HONEST_KEY, pause: float = 0.02) -> Iterator[HonestSession]:
    command = [sys.executable, "-m", "benchmarks._stacks.shared_gateway", str(port), key, str(pause)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        session = HonestSession(process)
        reader = threading.Thread(target=session.read, daemon=True)
        reader.start()
        try:
            yield session
        finally:
            process.kill()
            reader.join(10)


@asynccontextmanager
async def shared_gateway(
    folder: Path, keys: list[str], db: Literal["sqlite", "postgresql"] = "sqlite"
) -> AsyncIterator[tuple[GatewayProcess, list[str]]]:
    """Run a gateway that knows sessions with these keys. Yield its process and the ids of the sessions."""
    with ExitStack() as stack:
        address = str(folder / "polar.db")
        if db == "postgresql":
            postgres = await asyncio.to_thread(Postgres)
            stack.callback(postgres.stop)
            address = postgres.url
        engine = EngineProcess(folder, "echo", delay=0.0)
        stack.callback(engine.stop)
        await asyncio.to_thread(engine.start)
        gateway = GatewayProcess(folder, engine, address)
        stack.callback(gateway.stop)
        await asyncio.to_thread(gateway.start)
        async with open_store(gateway.db) as store:
            rows = [await store.sessions.create(key_hash=hash_key(key), label=None, origin="key") for key in keys]
        yield gateway, [row.session_id for row in rows]


def behave(port: int, key: str, pause: float) -> None:
    """Send one chat after the other, each with its own word, and print the end, the seconds and the fault of each.

    A lost connection is opened again once, as clients do; the seconds include the time for that.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    for number in count():
        word = f"nonce-{0:012x}-{number}"
        body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": f"Say {word}"}]})
        started, fault = time.monotonic(), None
        for last in (False, True):
            try:
                connection.request("POST", "/v1/chat/completions", body, headers)
                answer = connection.getresponse()
                text = answer.read().decode()
                if answer.status != 200 or word not in text:
                    fault = f"{answer.status}: {text[:200]}"
                break
            except (OSError, HTTPException) as error:
                connection.close()
                fault = f"{type(error).__name__}: {error}" if last else None
        ended = time.monotonic()
        print(json.dumps([ended, ended - started, fault]), flush=True)
        time.sleep(pause)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        behave(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
