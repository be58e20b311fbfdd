"""The base of the fake engine servers: scripted answers, and a port while they run."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

Json = dict[str, Any]


@dataclass
class Fault:
    """An error response in the server's form. If `status` is None, `FakeVllm` cuts the connection at once."""

    status: int | None = 500
    message: str = "scripted fault"
    param: str | None = None
    body: bytes | None = None


@dataclass
class FakeServer:
    """A server at `url` while it is entered. Subclasses answer all requests in `serve`."""

    url: str = field(default="", init=False)
    scripted: deque[Any] = field(default_factory=deque, init=False)
    bodies: list[Json] = field(default_factory=list, init=False)
    """Bodies of the requests for a generation, in order of arrival. `FakeLlama` keeps only bodies that ask for a
    stream."""
    aborted: int = field(default=0, init=False)
    """Number of generations whose client disconnected."""

    def script(self, *answers: Any) -> None:
        """Give the next generations these answers or faults."""
        self.scripted.extend(answers)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one request to any route."""
        raise NotImplementedError


def sse(chunk: Json) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
