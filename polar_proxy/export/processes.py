"""The exports of a server, each in a separate process, which runs `worker.py`.

So the gateway never has a recorded session in memory, and reading, building and encoding sessions do not take its event
loop's time. A process that has finished its export serves the next one; at most one idle process is kept.

A process starts in about one second. It ends when its standard input is closed, so it never outlives the server.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any, Self

import orjson

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.export.exporter import ExportReport
from polar_proxy.types import Json

_PIECE = 1 << 20
"""Maximum size of a yielded piece in bytes. The event loop is blocked while a piece is written."""


class ExportProcesses:
    """`async with ExportProcesses(url) as exports:` runs exports of a database until the block ends."""

    def __init__(self, url: str, *, at_once: int = 8) -> None:
        """`at_once`: the maximum number of processes; further exports wait for their turn."""
        self._url = url
        self._idle: list[_ExportProcess] = []
        self._running: set[_ExportProcess] = set()
        self._slots = asyncio.Semaphore(at_once)
        self._session_lock = asyncio.Lock()
        """An export holds this lock while a whole session is in its memory, so only one session is loaded at a time."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for process in (*self._idle, *self._running):
            await process.kill()

    async def export(self, form: str, report: ExportReport, **options: Any) -> AsyncGenerator[bytes]:
        """Yield the rows of `export_lines` in pieces of bytes, and fill `report`.

        A piece need not end where a line ends. `options` are those of `export_lines`. Raises the errors of
        `export_lines`, and StoreError if the process ends too early.
        """
        async with self._slots:
            process = self._idle.pop() if self._idle else await _ExportProcess.start(self._url)
            self._running.add(process)
            finished = False
            try:
                async with aclosing(process.export({"form": form, **options}, report, self._session_lock)) as pieces:
                    async for piece in pieces:
                        yield piece
                finished = True
            except UsageError:
                finished = True
                raise
            finally:
                self._running.discard(process)
                if finished and not self._idle:
                    self._idle.append(process)
                else:
                    await process.kill()


class _ExportProcess:
    """One process, which serves one export at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._input, self._output = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, url: str) -> Self:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "polar_proxy.export.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_PIECE,
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which stops its processes
        )
        started = cls(process)
        started._send({"url": url})
        return started

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def export(self, options: Json, report: ExportReport, session_lock: asyncio.Lock) -> AsyncGenerator[bytes]:
        """Yield the pieces of one export. The process loads a session only while it holds `session_lock`, so that
        only one session is loaded at a time, whatever the number of exports."""
        self._send(options)
        async with AsyncExitStack() as held:
            while True:
                match await self._header():
                    case {"turn": "wanted"}:
                        await held.enter_async_context(session_lock)
                        self._send({"turn": "given"})
                    case {"turn": "over"}:
                        await held.aclose()
                    case {"rows": int(size)}:
                        while size:
                            piece = await self._output.read(min(size, _PIECE))
                            if not piece:
                                raise await self._ended()
                            yield piece
                            size -= len(piece)
                    case {"report": counts}:
                        for name, value in counts.items():
                            setattr(report, name, Counter(value) if name == "left_out" else value)
                        return
                    case {"refused": str(message)}:
                        raise UsageError(message)
                    case {"failed": str(message)}:
                        raise StoreError(message)

    async def _header(self) -> Json:
        line = await self._output.readline()
        if not line.endswith(b"\n"):
            raise await self._ended()
        header: Json = orjson.loads(line)
        return header

    async def _ended(self) -> StoreError:
        """Wait for the process, which has closed its output, and return the error to raise.

        The process is not killed, because that could lose its exit status: Python's `Popen` reaps a dead process before
        it sends a signal, and asyncio then reports 255 (gh-87744).
        """
        await self._process.wait()
        return StoreError(
            f"The process of the export ended with status {self._process.returncode} before the export was complete; "
            "the server's log has its error"
        )

    def _send(self, line: Json) -> None:
        if not self._input.is_closing():  # a process that has ended is noticed when its output is read
            self._input.write(orjson.dumps(line) + b"\n")
