"""A minimal proxy: Starlette, uvicorn and an aiohttp client that forward bytes and store nothing.

python -m benchmarks._stacks.passthrough PORT UPSTREAM_URL
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


def app(upstream: str) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 18) as session:
            app.state.session = session
            yield

    async def forward(request: Request) -> Response:
        body = await request.body()
        headers = {"content-type": "application/json", "authorization": request.headers.get("authorization", "")}
        answer = await request.app.state.session.post(upstream + request.url.path, data=body, headers=headers)
        kind = answer.headers.get("content-type", "application/json")
        if not kind.startswith("text/event-stream"):
            return Response(await answer.read(), status_code=answer.status, media_type=kind)

        async def relay() -> AsyncIterator[bytes]:
            async for chunk in answer.content.iter_any():
                yield chunk

        return StreamingResponse(relay(), status_code=answer.status, media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(app(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
