"""The output of a command in docker is complete, however slowly the engine delivers it. The engine is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxes.docker_engine import DRAIN_SECONDS, CommandStream

pytestmark = pytest.mark.slow


@dataclass
class Message:
    data: bytes
    stream: int = 1


@dataclass
class Execution:
    """A command that ends at once and leaves a process that keeps its output open.

    `pauses`: seconds before each piece of its output.
    """

    pauses: list[float]
    stalls: bool = False
    closed: bool = False
    """The engine has closed the connection, and everything was written to it."""
    asked: int = 0
    never: asyncio.Event = field(default_factory=asyncio.Event)
    cut: int = 0
    """How often its connection was aborted."""

    def __post_init__(self) -> None:
        # As in an aiodocker stream, these are methods of the transport.
        self._resp = SimpleNamespace(connection=SimpleNamespace(transport=self))

    def abort(self) -> None:
        assert not self.closed, "asyncio's transports cannot be aborted then"
        self.cut += 1

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    @contextlib.asynccontextmanager
    async def start(self, *, detach: bool) -> AsyncIterator[Any]:
        yield self

    async def read_out(self) -> Message | None:
        if not self.pauses:
            await self.never.wait()
        await asyncio.sleep(self.pauses.pop(0))
        return Message(b"x")

    async def inspect(self) -> dict[str, Any]:
        self.asked += 1
        if self.stalls and self.asked == 1:
            asyncio.get_running_loop().call_later(DRAIN_SECONDS / 4, time.sleep, 2 * DRAIN_SECONDS)
        return {"Running": False, "ExitCode": 0}


async def test_reads_output_that_arrives_slowly_after_the_end() -> None:
    run = CommandStream(b"", None, 100)
    execution = Execution([0.0, 0.3, *[DRAIN_SECONDS / 5] * 8])
    assert await run.follow(execution) == 0
    assert run.out.value() == b"x" * 10
    assert execution.cut == 1


async def test_reads_output_that_arrived_while_suspended() -> None:
    run = CommandStream(b"", None, 100)
    assert await run.follow(Execution([0.25 + DRAIN_SECONDS / 3, *[0.0] * 5], stalls=True)) == 0
    assert run.out.value() == b"x" * 6


async def test_does_not_wait_for_background_processes() -> None:
    run = CommandStream(b"", None, 100)
    assert await asyncio.wait_for(run.follow(Execution([0.0])), 60) == 0
    assert run.out.value() == b"x"


async def test_a_connection_that_is_closed_already_is_not_aborted() -> None:
    run = CommandStream(b"", None, 100)
    execution = Execution([0.0], closed=True)
    assert await asyncio.wait_for(run.follow(execution), 60) == 0
    assert execution.cut == 0
