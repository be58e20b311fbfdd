"""The running gateway: engine, store and HTTP server under one lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import uvicorn
from fastapi import APIRouter

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import UsageError
from polar_proxy.gateway import asgi
from polar_proxy.gateway.app import create_app
from polar_proxy.gateway.handler import CallObserver
from polar_proxy.gateway.in_flight import InFlightCalls
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.pipeline import TurnPipeline
from polar_proxy.sessions.registry import SessionRegistry

log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _UvicornServer(uvicorn.Server):
    """uvicorn without its own signal handling: who stops is decided by whoever owns the gateway."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Gateway:
    """`async with Gateway(engine, store, settings) as gateway:` serves until the block ends.

    The engine and the store must be open already, and outlive it. On leaving, calls in flight are given `grace`
    seconds, then cancelled; each is committed with what was sampled.
    """

    def __init__(self, engine: Engine, store: Any, settings: GatewaySettings, *, grace: float = 5.0) -> None:
        self.settings = settings
        self.metrics = GatewayMetrics()
        self.sessions = SessionRegistry(
            store,
            open_to_all=is_loopback(settings.host) and not settings.require_known_keys,
            normalisers_off=settings.normalisers_off,
            window=settings.retry_window_seconds,
            shared=settings.shared,
        )
        self._in_flight = InFlightCalls(store) if settings.shared else None
        self._pipeline = TurnPipeline(engine, store, self.sessions, settings, self.metrics, self._in_flight)
        self.app = create_app(engine, self._pipeline, self.metrics)
        self._grace = grace
        self._extra: dict[socket.socket, asyncio.Server] = {}

    def include(self, router: APIRouter) -> None:
        """Serve these routes too, from now on; not on the sockets inside sandboxes."""
        self.app.include(router)

    def observe(self, observer: CallObserver) -> None:
        """Call `observer` with every call once it is committed."""
        self._pipeline.observers.append(observer)

    def end_session(self, session_id: str) -> None:
        """To be told when a session's key was revoked: generations there whose client is gone, or goes, are given up at
        once, and not after the time in which a retry might have come."""
        self._pipeline.end_session(session_id)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where programs on this machine reach it, without /v1."""
        host = self.settings.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def __aenter__(self) -> Self:
        self._socket = _bind(self.settings.host, self.settings.port)
        self._config = uvicorn.Config(
            self.app,
            http="httptools",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, int(self._grace)),
            server_header=False,
            proxy_headers=False,
        )
        self._server = _UvicornServer(self._config)
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise UsageError(f"The gateway could not start on {self.settings.host}:{self.settings.port}.")
            await asyncio.sleep(0.005)
        # What start-up made lives as long as the process: the collector need not walk through it at every call, nor
        # collect so often. Measured: about a fifth of the gateway's processor time per call.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        if self._in_flight is not None:
            await self._in_flight.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in list(self._extra):
            await self.stop_serving_on(listener)
        self._server.should_exit = True
        await self._task
        if self._in_flight is not None:
            await self._in_flight.__aexit__(kind, error, trace)

    async def idle(self, session_id: str, patience: float) -> None:
        """Wait until no gateway is answering a call of this session, for so many seconds on each side: here, and on the
        others of the database. TimeoutError where one still is."""
        await self.sessions.idle(session_id, patience)
        if self._in_flight is not None and await self._in_flight.wait(session_id, patience):
            raise TimeoutError

    async def ended(self, session_id: str, patience: float, *, elsewhere: float | None = None) -> str | None:
        """Wait, `patience` seconds, for what is in flight of a session that has been closed, here and on the other
        gateways (there, `elsewhere` seconds where given), and forget it. Returns what was lost of it, if anything."""
        lost: list[str | None] = []
        try:
            await self.sessions.idle(session_id, patience)
        except TimeoutError:
            lost.append("a call was still being answered when its rollout ended")
        else:
            count = self.sessions.lost(session_id)
            self.sessions.forget(session_id)
            lost.append(f"{count} call(s) were answered but not recorded" if count else None)
        if self._in_flight is not None:
            elsewhere = patience if elsewhere is None else elsewhere
            lost.append(await self._in_flight.ended(session_id, elsewhere, own=bool(lost[0])))
        return "; ".join(filter(None, lost)) or None

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve agents on one more listening socket, such as one inside a sandbox's network: the model routes, and
        nothing by which the gateway or other sessions could be looked at."""
        protocol_class: Callable[..., asyncio.Protocol] = self._config.http_protocol_class
        state, config = self._server.server_state, self._config

        def protocol() -> asyncio.Protocol:
            return protocol_class(config=config, server_state=state, app_state={asgi.INSIDE_SANDBOX: True})

        loop = asyncio.get_running_loop()
        self._extra[listener] = await loop.create_server(protocol, sock=listener, backlog=config.backlog)

    async def stop_serving_on(self, listener: socket.socket) -> None:
        server = self._extra.pop(listener, None)
        if server is not None:
            server.close()  # closes the socket too; connections that are open end with their clients
            listener.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another port with --port (0 takes any free one)."
        ) from error
    listener.set_inheritable(False)
    return listener
