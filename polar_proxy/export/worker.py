"""The process that makes exports for a server: `python -m polar_proxy.export.worker`. `processes.py` starts it.

It reads lines of JSON: first `{"url": ...}`, the URL of the database; then, for each export, the options of
`export_lines`; and during an export `{"turn": "given"}`. It answers with lines of JSON:

* `{"rows": N}`: N bytes of rows follow.
* `{"turn": "wanted"}`: the process waits for `{"turn": "given"}` before it reads a session into memory.
* `{"turn": "over"}`: the session is no longer in memory.
* `{"report": ...}`: the export is complete (`ExportReport`).
* `{"refused": text}`: the options are invalid.
* `{"failed": text}`: the export failed, for instance because the database cannot be read.

The process ends when its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import orjson

from polar_proxy.errors import PolarError, UsageError
from polar_proxy.export.exporter import ExportReport, export_lines
from polar_proxy.memory import release_free_memory
from polar_proxy.store.store import Store, open_store
from polar_proxy.types import Json

_NICENESS = 10
"""Added to the process's nice value, so that exports yield the processors to the gateway and the agents."""


def main() -> None:
    os.nice(_NICENESS)
    try:
        asyncio.run(_serve(_receive()["url"]))
    except EOFError:
        return
    except BrokenPipeError:  # the server has died; without this, Python would fail again when it flushes the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _serve(url: str) -> None:
    while True:
        options = _receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                store = await stack.enter_async_context(open_store(url, create=False))
                await _export(store, options)
            except UsageError as error:
                _send({"refused": str(error)})
            except PolarError as error:
                _send({"failed": str(error)})
        release_free_memory()


async def _export(store: Store, options: Json) -> None:
    report = ExportReport()
    async for line in export_lines(store, report=report, session_lock=_SessionLock(), **options):
        _send({"rows": len(line)}, line, flush=False)
    _send({"report": report.to_json()})


class _SessionLock:
    """Context manager that holds the server's session lock. Only the holder may have a session in memory."""

    async def __aenter__(self) -> None:
        _send({"turn": "wanted"})
        _receive()

    async def __aexit__(self, *error: object) -> None:
        _send({"turn": "over"})


def _receive() -> Json:
    """Return the next line of the input. Raises EOFError at its end."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    message: Json = orjson.loads(line)
    return message


def _send(header: Json, rows: bytes = b"", *, flush: bool = True) -> None:
    sys.stdout.buffer.write(orjson.dumps(header) + b"\n" + rows)
    if flush:
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
