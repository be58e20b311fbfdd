"""A server of pages only, on loopback, over any database: `polar view`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from polar_proxy.api import ApiContext
from polar_proxy.config import Settings, local_url
from polar_proxy.errors import UsageError
from polar_proxy.gateway.app import foreign_host
from polar_proxy.gateway.http.routes import add_router
from polar_proxy.store import Store
from polar_proxy.view.router import create_view_router

HOST = "127.0.0.1"


class _PageServer(uvicorn.Server):
    """uvicorn without signal handling: the command that runs the server handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class OwnHostOnly:
    """ASGI application that refuses requests whose Host or Origin header names neither this machine nor an allowed
    host."""

    def __init__(self, app: FastAPI, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        foreign = foreign_host(scope["headers"], self._hosts)
        if foreign is None:
            await self._app(scope, receive, send)
        else:
            text = f"This server takes requests from its own machine only, and this request has the header '{foreign}'."
            await PlainTextResponse(text, 403)(scope, receive, send)


def create_pages(store: Store, settings: Settings) -> OwnHostOnly:
    """Return an application with the pages only."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_router(app, create_view_router(ApiContext(store, settings), open_on_loopback=True, writable=False))
    return OwnHostOnly(app, settings.gateway.allowed_hosts)


@asynccontextmanager
async def serve_pages(store: Store, settings: Settings, port: int) -> AsyncIterator[str]:
    """Serve the pages while the block runs, and yield their URL. Port 0: any free port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # so that a browser which is faster than this server waits for it
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Cannot listen on {HOST}:{port}: {error.strerror}. Choose another port with --port (0 takes any free one)."
        ) from error
    config = uvicorn.Config(
        create_pages(store, settings),
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    server = _PageServer(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield local_url(HOST, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await task
