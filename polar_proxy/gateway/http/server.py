"""The running gateway: application, HTTP server and listening sockets under one lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, Self

import uvicorn
from fastapi import APIRouter

from polar_proxy.config import GatewaySettings, RouteSettings, is_loopback, local_url
from polar_proxy.engines.base import Engine
from polar_proxy.errors import PolarError, UsageError
from polar_proxy.gateway.app import ServerParts, create_app, error_format
from polar_proxy.gateway.garbage import GarbageCollection
from polar_proxy.gateway.handler import RequestHandler
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.connections import Connections
from polar_proxy.gateway.http.limits import LimitedHttpProtocol, raise_descriptor_limit
from polar_proxy.gateway.in_flight import InFlightCalls
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.recording import CallObserver
from polar_proxy.gateway.routing import EngineRouter, ServedEngine
from polar_proxy.intercept.hosts import host_names
from polar_proxy.offload import OffloadThread
from polar_proxy.sessions.budget import BudgetUsage
from polar_proxy.sessions.registry import SessionRegistry
from polar_proxy.store import Store
from polar_proxy.types import CallRecord

log = logging.getLogger(__name__)

_RECORD_SECONDS = 10.0
"""When a gateway stops, it waits up to this many seconds until the calls that it has cancelled are recorded."""
_SWITCH_SECONDS = 0.001
"""The interpreter's switch interval in seconds: how long a thread that works on a large request may keep the GIL while
the event loop waits for it."""


class _UvicornServer(uvicorn.Server):
    """uvicorn without its own signal handling: the owner of the gateway decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Gateway:
    """`async with Gateway(engine, store, settings) as gateway:` serves until the block ends.

    The engine and the store must be open already, and stay open longer than the gateway. At the end of the block, calls
    in flight are given `grace` seconds, then cancelled; each is committed with what was sampled.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        settings: GatewaySettings,
        *,
        engines: Mapping[str, Engine] = MappingProxyType({}),
        routes: Sequence[RouteSettings] = (),
        grace: float = 5.0,
    ) -> None:
        """`engines`: further engines by name, to which the rules in `routes` send calls."""
        self.settings = settings
        self._store = store
        self.metrics = GatewayMetrics()
        store.calls.set_cache(settings.cache_mb << 20)
        open_to_all = is_loopback(settings.host) and not settings.require_known_keys
        self.sessions = SessionRegistry(store, settings, open_to_all=open_to_all)
        self._in_flight = InFlightCalls(store) if settings.shared else None
        self._monitor = StoreMonitor(store, self.sessions.write_pending)
        self._thread = OffloadThread("polar-large-requests")
        serve = partial(ServedEngine.of, settings=settings, read_call=self._read_call, thread=self._thread)
        named = {name: serve(name, one) for name, one in engines.items()}
        self._router = EngineRouter(serve(None, engine), named, routes)
        self._handler = RequestHandler(
            self._router, self._thread, store, self.sessions, settings, self.metrics, self._in_flight, self._monitor
        )
        hosts = settings.allowed_hosts | {settings.host} if is_loopback(settings.host) else None
        sandbox_hosts = frozenset(host_names(settings.model_hosts))
        parts = ServerParts(self._router, self.metrics, self._monitor.check, started_at=int(time.time()))
        self.app = create_app(self._handler, parts, hosts, sandbox_hosts)
        self._grace = grace
        self._sandbox_servers: dict[socket.socket, asyncio.Server] = {}
        descriptors = raise_descriptor_limit()
        self._connections = Connections(min(settings.limits.connections, max(16, descriptors // 2)))
        self._garbage = GarbageCollection(self._connections.are_idle)

    async def _read_call(self, call_id: str) -> CallRecord | None:
        return await self._monitor.run(partial(self._store.calls.get, call_id))

    def include(self, router: APIRouter, **state: object) -> None:
        """Serve the routes of `router` from now on, except on sockets inside sandboxes. `state`: see `add_router`."""
        self.app.include(router, **state)

    def observe(self, observer: CallObserver) -> None:
        """Call `observer` with every call once it is committed."""
        self._handler.recorder.observers.append(observer)

    def end_session(self, session_id: str) -> None:
        """Call this when a session's key is revoked.

        A call of the session is then cancelled as soon as its client disconnects, without the grace period for retries;
        a call in the background is cancelled at once.
        """
        self._handler.retries.end_session(session_id)
        self._handler.background.end_session(session_id)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The base URL for programs on this machine, without /v1."""
        return local_url(self.settings.host, self.port)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.sessions.reserve_marks)
        self._socket = _bind(self.settings.host, self.settings.port)
        self._config = uvicorn.Config(
            self.app,
            http=self._protocol(self._connections),  # type: ignore[arg-type]  # any factory serves
            ws="none",  # `LimitedHttpProtocol` brings its own
            ws_max_size=sys.maxsize,  # limited there, too
            ws_per_message_deflate=False,
            ws_ping_timeout=None,  # some clients read only while they wait for an answer
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",  # a warning for each malformed request would let anyone fill the log
            timeout_keep_alive=self.settings.limits.keep_alive_seconds,  # type: ignore[arg-type]  # any number serves
            timeout_graceful_shutdown=math.ceil(self._grace),
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
        sys.setswitchinterval(_SWITCH_SECONDS)
        await self._garbage.__aenter__()
        if self._in_flight is not None:
            await self._in_flight.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for listener in list(self._sandbox_servers):
            await self.stop_serving_on(listener)
        self._server.should_exit = True
        await self._task
        # The server cancels the requests that are still answered, and does not wait until their calls are recorded.
        if requests := set(self._server.server_state.tasks):
            await asyncio.wait(requests, timeout=_RECORD_SECONDS)
        self._thread.close()
        await self._garbage.__aexit__(*error)
        if self._in_flight is not None:
            await self._in_flight.__aexit__(*error)
        await self._router.close()
        await self._monitor.close()
        self.sessions.close()

    async def ended(self) -> NoReturn:
        """Wait until the HTTP server ends by itself, which happens only because of an error. Raises PolarError then."""
        await asyncio.wait([self._task])
        raise PolarError(f"The gateway's HTTP server ended: {self._task.exception()!r}")

    async def idle(self, session_id: str, timeout: float) -> None:
        """Wait until no gateway of the database is answering a call of this session.

        Waits at most `timeout` seconds for this gateway, and then at most `timeout` seconds for the others. Raises
        TimeoutError if calls are then still open, because they still run or because their gateway is dead.
        """
        await self.sessions.idle(session_id, timeout)
        if self._in_flight is not None and await self._in_flight.wait(session_id, timeout):
            raise TimeoutError

    async def forget_session(
        self, session_id: str, timeout: float, *, timeout_elsewhere: float | None = None
    ) -> str | None:
        """Wait for the calls in flight of a closed session, then drop the session from memory. Return one line about
        calls that were lost or still run, or None. If a call still runs here, its client gets a 409 in place of the
        answer.

        `timeout`: seconds to wait for calls of this gateway. `timeout_elsewhere`: seconds to wait for calls of other
        gateways; default: `timeout`.
        """
        lost_here, lost_elsewhere = None, None
        try:
            await self.sessions.idle(session_id, timeout)
        except TimeoutError:
            self.sessions.mark_ended(session_id)
            lost_here = "a call was still being answered when its rollout ended"
        else:
            if count := self.sessions.lost(session_id):
                lost_here = f"{count} call(s) were answered but not recorded"
            self.sessions.forget(session_id)
        self._handler.failed_requests.forget(session_id)
        if self._in_flight is not None:
            timeout = timeout if timeout_elsewhere is None else timeout_elsewhere
            own = lost_here is not None
            lost_elsewhere = await self._in_flight.wait_and_take(session_id, timeout, own=own)
        return "; ".join(filter(None, (lost_here, lost_elsewhere))) or None

    async def budget_spent(self, session_id: str, *, idle_since: float) -> str | None:
        """Return the limit of a session's budget that was reached, or None.

        The budget is also spent if the session has been idle for longer than `max_idle_seconds`. Idle time begins at
        the end of the session's last call, but not before `idle_since` (seconds since the epoch).
        """
        budget = self.sessions.budget(session_id)
        if budget is None or self._in_flight is not None:
            session = await self._store.sessions.get(session_id)
            row = await self._store.sessions.summary(session_id)
            if session is None or row is None:
                return None
            budget = budget or BudgetUsage(session.policy or {})
            budget.load(row)
        # Another gateway may be answering a call of it.
        if self._in_flight is None or not await self._store.open_calls.of_session(session_id):
            budget.spend_if_idle(time.time(), since=idle_since)
        await self._handler.store_spent(session_id, budget)
        return budget.spent

    def refusal(self, session_id: str) -> str | None:
        """Return why a session's last call was refused or broken off because it could not be recorded. Return None if
        the call was recorded or needs no record (`record_required`), or if the session is not in memory."""
        return self.sessions.refusal(session_id)

    async def request_fault(self, session_id: str) -> str | None:
        """Return the error of the session's last failed request if the request is at fault; None if the engine is.

        The request is sent to the engine again to find this out (see `FailedRequests`). Only for sessions whose calls
        must be recorded.
        """
        return await self._handler.failed_requests.request_fault(session_id)

    async def serve_on(
        self, listener: socket.socket, *, tls: ssl.SSLContext | None = None, key: str | None = None
    ) -> None:
        """Serve agents on one more listening socket, such as one inside a sandbox's network.

        The socket serves the routes that agents need, and nothing that shows the gateway or other sessions. With `tls`
        and the `key` of a session, the socket instead takes the place of the model hosts: in the sandbox, their names
        resolve to its address.
        """
        connections = Connections(self.settings.limits.sandbox_connections, self._connections)
        protocol_class = self._protocol(connections)
        state, config = self._server.server_state, self._config

        def protocol() -> asyncio.Protocol:
            app_state = {asgi.INSIDE_SANDBOX: True} | ({} if key is None else {asgi.SANDBOX_KEY: key})
            return protocol_class(config=config, server_state=state, app_state=app_state)

        _send_at_once(listener)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, sock=listener, backlog=config.backlog, ssl=tls)
        self._sandbox_servers[listener] = server

    def _protocol(self, connections: Connections) -> Callable[..., asyncio.Protocol]:
        return partial(
            LimitedHttpProtocol,
            limits=self.settings.limits,
            max_body_bytes=self.settings.max_body_mb << 20,
            connections=connections,
            error_format=error_format,
        )

    async def stop_serving_on(self, listener: socket.socket) -> None:
        server = self._sandbox_servers.pop(listener, None)
        if server is not None:
            server.close()  # closes the socket too; open connections end with their clients
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
    _send_at_once(listener)
    return listener


def _send_at_once(listener: socket.socket) -> None:
    """Send small parts of an answer without waiting for the client's acknowledgement, which takes 40 ms.

    This sets TCP_NODELAY on the listener, and connections inherit it. asyncio sets it only on sockets whose `proto` is
    TCP, and `proto` is often 0.
    """
    if listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
