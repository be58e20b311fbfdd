"""Load generator: a closed loop of clients on plain asyncio protocols, with one connection each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import count
from typing import cast

from benchmarks._stacks.traffic import TRAFFIC, ClientTraffic, Kind

DRAIN_SECONDS = 60.0
MAX_REQUESTS = 20_000
"""Maximum number of requests in a measurement, so that a fast stack does not fill the disk."""


@dataclass
class LoadResult:
    """Result of a measurement. `latencies`: seconds of each request answered within the measured time. `answered` also
    counts requests answered after that time."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    answered: int = 0
    errors: int = 0
    first_error: str = ""
    cpu_seconds: float = 0.0
    """Processor time of the proxy for all answered requests."""

    @property
    def rps(self) -> float:
        return len(self.latencies) / self.seconds if self.seconds else 0.0

    def quantile_ms(self, q: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3 if ordered else float("nan")


class LoadClient(asyncio.Protocol):
    """Sends the next request when the answer to the last one is complete."""

    def __init__(self, traffic: ClientTraffic, until: float, result: LoadResult, done: asyncio.Event) -> None:
        self._traffic = traffic
        self._until = until
        self._result = result
        self._done = done
        self._tail = b""
        self._need = -1
        self._have = 0
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        self._send()

    def _send(self) -> None:
        if time.perf_counter() >= self._until or self._result.answered >= MAX_REQUESTS:
            self._transport.close()
            return
        self._tail, self._need, self._have, self._head = b"", -1, 0, b""
        self._started = time.perf_counter()
        self._transport.writelines(self._traffic.next())

    def data_received(self, data: bytes) -> None:
        if self._need == -1:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._head[:end].lower()
            data, self._have = self._head[end + 4 :], 0
            at = head.find(b"content-length:")
            self._need = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -2  # chunked
            self._status = head[9:12]
            self._body: list[bytes] = []
        self._have += len(data)
        self._body.append(data)
        if self._need == -2:
            self._tail = (self._tail + data)[-7:]
            if not self._tail.endswith(b"\r\n0\r\n\r\n"):
                return
        elif self._have < self._need:
            return
        self._complete()

    def _complete(self) -> None:
        now = time.perf_counter()
        result = self._result
        body = b"".join(self._body)
        complete = b"[DONE]" in body if self._need == -2 else b'"finish_reason"' in body
        if self._status == b"200" and complete:
            result.answered += 1
            if now <= self._until:
                result.latencies.append(now - self._started)
        else:
            self._fail(f"HTTP {self._status.decode()}: {body[:300]!r}")
        self._traffic.receive(body)
        self._send()

    def _fail(self, reason: str) -> None:
        self._result.errors += 1
        self._result.first_error = self._result.first_error or reason

    def connection_lost(self, error: Exception | None) -> None:
        if self._need != -1 or self._head or time.perf_counter() < self._until:
            complete = self._need >= 0 and self._have >= self._need
            if not complete and not self._tail.endswith(b"0\r\n\r\n") and self._result.answered < MAX_REQUESTS:
                self._fail(f"connection lost: {error}")
        self._done.set()


async def measure(
    port: int,
    path: str,
    name: str,
    clients: int,
    *,
    stream: bool,
    seconds: float,
    numbers: count[int],
    kind: Kind = "calls",
    tokens: int = 250,
) -> LoadResult:
    """Run `clients` connections to a stack for `seconds`. Each client has its own key, and so its own session.

    `path` may contain the key as `{key}`. Raises OSError if nothing listens.
    """
    loop = asyncio.get_running_loop()
    result = LoadResult()
    started = time.perf_counter()
    done = []
    for number in range(clients):
        key = f"sk-bench-{name}-{kind}-{number}"
        traffic = TRAFFIC[kind](port, path.format(key=key), key, numbers, stream=stream, tokens=tokens)
        finished = asyncio.Event()
        done.append(finished)

        def make(traffic: ClientTraffic = traffic, finished: asyncio.Event = finished) -> LoadClient:
            return LoadClient(traffic, started + seconds, result, finished)

        await loop.create_connection(make, "127.0.0.1", port)
    try:
        async with asyncio.timeout(seconds + DRAIN_SECONDS):
            await asyncio.gather(*(event.wait() for event in done))
    except TimeoutError:
        result.errors += sum(not event.is_set() for event in done)
        result.first_error = result.first_error or f"no answer within {DRAIN_SECONDS:.0f} s"
    # A run may end early because of MAX_REQUESTS.
    result.seconds = min(seconds, time.perf_counter() - started)
    return result
