"""The clients of `benchmarks/soak.py`: agents that sometimes break off, repeat a call or send nonsense.

Each counts the calls that must be in the store afterwards, independently of Polar.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks._stacks.traffic import MARK, MODEL

SECONDS = 60.0
"""Time limit of an answer."""
HABITS = ("abort", "cut_body", "malformed", "repeat", "new_connection")
_PROSE = "The function reads a file, checks each line and returns the ones that match. "
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Shape:
    """The lengths of a session: one conversation of `turns` calls."""

    first: int
    """Tokens of the first call's prompt."""
    added: int
    """Tokens of each later user message."""
    tokens: int
    """Tokens of each answer."""
    turns: int

    @property
    def last_prompt(self) -> int:
        return self.first + (self.turns - 1) * (self.added + self.tokens)


@dataclass
class SoakCounts:
    """Counts and latencies as the clients observed them."""

    sent: int = 0
    """Number of complete requests with valid JSON."""
    answered: list[str] = field(default_factory=list)
    """Call ids of the complete answers. The id of a repeated call is in the list once."""
    finished: list[tuple[float, float]] = field(default_factory=list)
    """(time, latency) of each complete answer, in seconds."""
    habits: Counter[str] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    """Number of error answers to complete requests, by status."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of wrong behaviour: a repeated request that got the answer of another call, a malformed request that
    was not refused, a request without an answer."""
    open: int = 0
    most_open: int = 0


class BrokenAnswerError(Exception):
    """The answer broke off, or did not come."""


class SoakClient:
    """One session of one agent. It keeps its connection until this breaks."""

    def __init__(
        self, port: int, number: int, shape: Shape, faults: float, chance: random.Random, counts: SoakCounts
    ) -> None:
        self._port, self._number, self._shape, self._faults, self._chance = port, number, shape, faults, chance
        self._counts = counts
        key = f"sk-soak-{number:08d}"
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\n"
        ).encode()
        self._stream = number % 2 == 1
        frame = json.dumps({"model": MODEL, "max_tokens": shape.tokens, "temperature": 1.0, "stream": self._stream})
        system = json.dumps({"role": "system", "content": _prose(shape.first - 50)})
        self._body = f'{frame[:-1]}, "messages": [{system}'.encode()
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self) -> None:
        counts = self._counts
        counts.open += 1
        counts.most_open = max(counts.most_open, counts.open)
        try:
            for turn in range(self._shape.turns):
                text = b"%b%010d%03d. %b" % (MARK, self._number, turn, _prose(self._shape.added - 12).encode())
                self._body += b', {"role": "user", "content": "%b"}' % text
                habit = self._chance.choice(HABITS) if self._chance.random() < self._faults else None
                if habit is not None:
                    counts.habits[habit] += 1
                await self._turn(self._body + b"]}", habit)
                self._body += b', {"role": "assistant", "content": "%b"}' % (b" return value" * self._shape.tokens)
        finally:
            self._disconnect()
            counts.open -= 1

    async def _turn(self, body: bytes, habit: str | None) -> None:
        """Make one call until it is answered, with a bad habit before or after it."""
        if habit == "abort":
            self._counts.sent += 1
            with suppress(OSError):  # the server had closed the connection
                await self._send(body, len(body))
                await asyncio.sleep(self._chance.uniform(0, 0.05))
            self._disconnect()
        elif habit == "cut_body":
            with suppress(OSError):
                await self._send(body[: len(body) // 2], len(body))
            self._disconnect()
        elif habit == "malformed":
            status, _ = await self._answer_of(b'{"messages": [' + body[-20:], 0)
            if status != 400:
                self._counts.wrong.append(f"a malformed body was answered with {status}")
        elif habit == "new_connection":
            self._disconnect()
        call_id = await self._until_answered(body, retry=habit == "abort")
        if habit == "repeat" and call_id is not None:
            status, again = await self._answer_of(body, 1)
            if (status, again) != (200, call_id):
                self._counts.wrong.append(f"{call_id} was repeated and answered with {status}, {again}")

    async def _until_answered(self, body: bytes, *, retry: bool) -> str | None:
        for attempt in range(int(retry), 8):
            self._counts.sent += 1
            began = time.monotonic()
            try:
                status, call_id = await self._exchange(body, attempt)
            except BrokenAnswerError:
                self._counts.failed[0] += 1
                continue
            if status == 200:
                self._counts.answered.append(call_id)
                self._counts.finished.append((time.monotonic(), time.monotonic() - began))
                return call_id
            self._counts.failed[status] += 1
        self._counts.wrong.append(f"session {self._number}: no answer in 8 attempts")
        return None

    async def _answer_of(self, body: bytes, attempt: int) -> tuple[int, str]:
        """Return status and call id of an answer; 0 and nothing if it broke off."""
        try:
            return await self._exchange(body, attempt)
        except BrokenAnswerError:
            return 0, ""

    async def _exchange(self, body: bytes, attempt: int) -> tuple[int, str]:
        """Return status and call id of a complete answer. Raises BrokenAnswerError."""
        try:
            async with asyncio.timeout(SECONDS):
                reader = await self._send(body, len(body), attempt)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = _header(head, b"content-length")
                whole = await reader.readexactly(int(length)) if length else await _read_chunks(reader)
        except TimeoutError:
            self._disconnect()
            self._counts.wrong.append(f"session {self._number}: no answer within {SECONDS:g} s")
            raise BrokenAnswerError from None
        except (OSError, asyncio.IncompleteReadError) as error:
            self._disconnect()
            raise BrokenAnswerError from error
        status = int(head[9:12])
        if _header(head, b"connection") == b"close":
            self._disconnect()
        complete = b"[DONE]" in whole if self._stream else b'"finish_reason"' in whole
        if status == 200 and not complete:  # the error of a stream that had begun
            raise BrokenAnswerError
        return status, _header(head, b"x-polar-call-id").decode()

    async def _send(self, body: bytes, length: int, attempt: int = 0) -> asyncio.StreamReader:
        if self._link is None:
            self._link = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._link
        writer.write(self._head + b"x-stainless-retry-count: %d\r\ncontent-length: %d\r\n\r\n" % (attempt, length))
        writer.write(body)
        await writer.drain()
        return reader

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link[1].transport.abort()
            self._link = None


async def run_clients(
    port: int, sessions: int, concurrency: int, shape: Shape, faults: float, seed: int, counts: SoakCounts
) -> None:
    """Run all sessions, `concurrency` at a time."""
    waiting: Iterator[int] = iter(range(sessions))

    async def agents() -> None:
        for number in waiting:
            await SoakClient(port, number, shape, faults, random.Random(seed + number), counts).run()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(agents())


def _prose(tokens: int) -> str:
    characters = max(0, tokens) * _CHARACTERS_PER_TOKEN
    return (_PROSE * (characters // len(_PROSE) + 1))[:characters]


def _header(head: bytes, name: bytes) -> bytes:
    at = head.find(b"\r\n" + name + b": ")
    return head[at + len(name) + 4 :].split(b"\r\n", 1)[0] if at >= 0 else b""


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)
