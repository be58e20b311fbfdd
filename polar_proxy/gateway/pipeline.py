"""From an HTTP request to its turn: the session, the body, what it refers to, what it asks.

    body -> JSON -> dialect.parse -> session -> Turn.run

Side routes that only count tokens end here; they are no calls and are not recorded.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import parse_qs

import orjson

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects import Dialect, ParsedRequest, PreviousCall, TokenCount
from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.gateway import asgi
from polar_proxy.gateway.handler import CallObserver, GatewayContext, RequestHandler, send_error
from polar_proxy.gateway.in_flight import InFlightCalls
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.retries import RetryCache, retry_key
from polar_proxy.sessions import read_client_metadata
from polar_proxy.sessions.prompts import PromptBuilder
from polar_proxy.sessions.registry import SessionRegistry, SessionState, api_key_of
from polar_proxy.sessions.state import CachedRequest, ParseCache
from polar_proxy.store import Store
from polar_proxy.types import Json

T = TypeVar("T")
R = TypeVar("R")

_LARGE_BODY = 1 << 20


class TurnPipeline:
    """Serves the model routes of one gateway."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        sessions: SessionRegistry,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        in_flight: InFlightCalls | None = None,
    ) -> None:
        """`in_flight`: tells other gateways of the store what this one answers; None: there are none."""
        self.engine = engine
        self.store = store
        self.sessions = sessions
        self.settings = settings
        self.metrics = metrics
        self.observers: list[CallObserver] = []
        self._replays = RetryCache(settings)
        self._recent = ParseCache()
        continuer = PromptBuilder(engine, store, settings)
        self._services = GatewayContext(
            engine, store, settings, metrics, self.observers, continuer, self._recent, in_flight
        )

    async def serve(
        self,
        dialect: Dialect,
        route: str,
        path_key: str | None,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
    ) -> None:
        """Answer one model request. `route` is its path without the key that `/s/{key}` holds: keys are not
        recorded."""
        started = time.time()
        try:
            headers = _headers(scope)
            session = await self._session(headers, scope, path_key)
            raw = await asgi.read_body(receive, self.settings.max_body_mb << 20)
            recently = self._recent.get(session.session_id, dialect.name)
            parsed = await self._parse(dialect, raw, session, recently)
        except asgi.ClientDisconnected:
            return
        except RequestError as error:
            self.metrics.refused.labels(error.status).inc()
            await send_error(send, error, dialect)
            return
        hints = read_client_metadata(headers, parsed.params)
        key = retry_key(session.session_id, dialect.name, parsed)
        tape = self._replays.find(key, parsed, hints)
        if tape is not None and await tape.follow(receive, send):
            self.metrics.joined.inc()
            return
        tape = self._replays.open(key, parsed, hints)
        turn = RequestHandler(self._services)
        try:
            await turn.run(dialect, session, parsed, hints, route, started, receive, send, tape, recently)
        finally:
            self._replays.close(tape, failed=not turn.ok)

    def end_session(self, session_id: str) -> None:
        """Its key is revoked, so no retry can come: generations whose client is gone, or goes, end at once."""
        self._replays.end_session(session_id)

    async def count(
        self, counter: TokenCount, path_key: str | None, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
    ) -> None:
        """Answer how many tokens a prompt has."""
        try:
            await self._session(_headers(scope), scope, path_key)
            raw = await asgi.read_body(receive, self.settings.max_body_mb << 20)
            value = await _offloaded(len(raw), _load, raw)
            tokens = await self.engine.count_tokens(await _offloaded(len(raw), counter.parse, value))
        except asgi.ClientDisconnected:
            return
        except EngineError as error:
            await send_error(send, RequestError(str(error), status=error.status, code="engine_error"), counter)
        except RequestError as error:
            self.metrics.refused.labels(error.status).inc()
            await send_error(send, error, counter)
        else:
            await asgi.respond(send, 200, counter.respond(tokens))

    async def _session(self, headers: Mapping[str, str], scope: asgi.Scope, path_key: str | None) -> SessionState:
        query = scope["query_string"]
        query_key = parse_qs(query.decode("latin-1")).get("key", [None])[0] if query else None
        inside = asgi.INSIDE_SANDBOX in scope.get("state", {})
        return await self.sessions.find(api_key_of(headers, query_key), path_key, inside=inside)

    async def _parse(
        self, dialect: Dialect, raw: bytes, session: SessionState, recently: CachedRequest | None
    ) -> ParsedRequest:
        before = None if recently is None else recently.parsed

        def parse(body: Json) -> ParsedRequest:
            return dialect.parse(body, before)

        body = await _offloaded(len(raw), _load, raw)
        call_id = dialect.previous_call_id(body)
        if call_id is None:
            return await _offloaded(len(raw), parse, body)
        earlier = await self._earlier(dialect, call_id, session)

        def resume(body: Json) -> ParsedRequest:
            return dialect.parse(dialect.prepend_previous(body, earlier))

        # A few bytes may go on with a conversation of megabytes.
        return await _offloaded(len(raw) + sum(map(len, earlier.messages)), resume, body)

    async def _earlier(self, dialect: Dialect, call_id: str, session: SessionState) -> PreviousCall:
        """The call that a body continues. RequestError where there is no such answer, of this session and dialect and
        told to its end."""
        call = await self.store.calls.get(call_id)
        if call is None or call.session_id != session.session_id or call.dialect != dialect.name or not call.choices:
            raise RequestError(
                "The previous response was not found in this session.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if call.status in ("client_gone", "upstream_error"):
            raise RequestError(
                f"The previous response ended early ({call.error or call.status}): there is no answer to go on from.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return PreviousCall(call.messages, call.choices[0].message)


def _headers(scope: asgi.Scope) -> dict[str, str]:
    """By name in lower case, as ASGI has them; read many times for each call."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


async def _offloaded(size: int, work: Callable[[T], R], value: T) -> R:
    """`work(value)`; in a thread when the body is large, to keep the loop free."""
    return await asyncio.to_thread(work, value) if size > _LARGE_BODY else work(value)


def _load(raw: bytes) -> Json:
    try:
        value: object = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        value = _with_half_characters(raw, error)
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_type")
    return value


def _with_half_characters(body: bytes, error: orjson.JSONDecodeError) -> object:
    """JavaScript clients that cut a text in the middle of an emoji send one half of it, escaped. orjson refuses that;
    no model can read it: it becomes a question mark. Raises RequestError for what is not JSON at all."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
