"""One model request, from its HTTP body to the last byte of its answer.

    find session -> read -> parse -> (join a retry) -> place: find the relation to earlier calls -> build prompt
    -> sample and stream -> commit -> finish

Promises:

* Recorded before sent: the last byte of an answer leaves only after its calls are committed.
* However a request ends (answered, failed, client gone, gateway stopped), its calls are committed with what was
  sampled until then.
* If a commit fails, the agent still gets its answer, and the session counts a lost call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar
from urllib.parse import parse_qs

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects.base import Dialect, ParsedRequest, PreviousCall
from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.gateway import asgi
from polar_proxy.gateway.in_flight import InFlightCalls
from polar_proxy.gateway.limits import BodyBudget
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.recording import CallOutcome, CallRecorder, PendingCall, RequestContext, apply_policy
from polar_proxy.gateway.reply import Reply, send_error
from polar_proxy.gateway.retries import ResponseBuffer, RetryCache
from polar_proxy.sessions.continuation import PromptBuilder
from polar_proxy.sessions.identity import key_of_request, read_client_metadata
from polar_proxy.sessions.registry import SessionClosedError, SessionRegistry
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from polar_proxy.types import new_id

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LARGE_BODY = 1 << 20
"""Bytes above which a body is parsed in a thread, to keep the event loop free."""


class RequestHandler:
    def __init__(
        self,
        engine: Engine,
        store: Store,
        sessions: SessionRegistry,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        in_flight: InFlightCalls | None,
    ) -> None:
        """`in_flight` announces calls to the other gateways of the database; None if this is the only gateway."""
        self._engine = engine
        self._store = store
        self._sessions = sessions
        self._settings = settings
        self._metrics = metrics
        self._in_flight = in_flight
        self._bodies = BodyBudget(settings.limits.bodies_mb << 20)
        self._body_limits = (settings.max_body_mb << 20, settings.limits.body_pause_seconds)
        self._prompts = PromptBuilder(engine, store, settings)
        self.recorder = CallRecorder(engine, store, metrics, in_flight)
        self.retries = RetryCache(settings)

    async def handle(
        self,
        dialect: Dialect,
        path: str,
        path_key: str | None,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
    ) -> None:
        """Answer one model request. `path` is the route without the prefix `/s/{path_key}`."""
        try:
            request = await self._read(dialect, path, path_key, scope, receive)
        except asgi.ClientDisconnected:
            return
        except RequestError as error:
            self._metrics.refused.labels(error.status).inc()
            await send_error(send, error, dialect)
            return
        earlier = self.retries.find(request)
        if earlier is not None and await earlier.follow(receive, send):
            self._metrics.joined.inc()
            return
        buffer = self.retries.open(request)
        answered = False
        try:
            answered = await self._answer(request, buffer, receive, send)
        finally:
            self.retries.close(buffer, failed=not answered)

    async def _read(
        self, dialect: Dialect, path: str, path_key: str | None, scope: asgi.Scope, receive: asgi.Receive
    ) -> RequestContext:
        """Find the session of a request, then read and parse its body."""
        started_at = time.time()
        headers = asgi.read_headers(scope)
        session = await self._find_session(headers, path_key, scope)
        with self._bodies.reserve() as take:
            body = await asgi.read_body(receive, *self._body_limits, take)
            parsed = await self._parse(dialect, body, session)
        metadata = read_client_metadata(headers, parsed.params)
        return RequestContext(dialect, session, path, parsed, metadata, started_at)

    async def _answer(
        self, request: RequestContext, buffer: ResponseBuffer, receive: asgi.Receive, send: asgi.Send
    ) -> bool:
        """Place, sample, commit and answer a request. Return whether it was answered completely, without an error."""
        session = request.session
        calls = self._place(request, buffer.size)
        reply = Reply(buffer.wrap(send), request, calls[0].call_id, self._settings)
        session.begin(len(calls))
        self._metrics.in_flight.inc(len(calls))
        try:
            outcome = await self._sample(request, calls, reply, buffer, receive)
            await _run_to_end(self.recorder.commit(request, calls, outcome))
            if outcome.status == "ok":
                await reply.finish([call.answer for call in calls])
            elif outcome.reply is not None:
                await reply.fail(outcome.reply)
            return outcome.status == "ok"
        except SessionClosedError as error:  # another gateway closed the session before a call began
            self._metrics.refused.labels(error.status).inc()
            await reply.fail(error)
        except asyncio.CancelledError:
            await reply.fail(_gateway_stopped())
        except Exception as error:
            log.exception("call %s failed inside Polar", calls[0].call_id)
            await reply.fail(_internal_error(error))
        finally:
            reply.close()
            session.end(len(calls))
            self._metrics.in_flight.dec(len(calls))
        return False

    def _place(self, request: RequestContext, size: int) -> list[PendingCall]:
        """Decide the lineage of each call of a request. `size`: bytes of the request's messages."""
        session, parsed = request.session, request.parsed
        calls = []
        for engine_request, messages in zip(parsed.requests, parsed.messages, strict=True):
            call_id = new_id("call")
            lineage = session.place(call_id, engine_request, request.metadata, now=request.started_at)
            calls.append(PendingCall(call_id, apply_policy(engine_request, session.policy), lineage, messages))
        session.remember_request(request.dialect.name, parsed, calls[0].lineage.conversation, size)
        return calls

    async def _sample(
        self,
        request: RequestContext,
        calls: Sequence[PendingCall],
        reply: Reply,
        buffer: ResponseBuffer,
        receive: asgi.Receive,
    ) -> CallOutcome:
        """Sample the calls of a request, and return how they ended. Raises SessionClosedError before any begins."""
        try:
            if self._in_flight is not None:
                # Never cut short: otherwise the announcement might be written after the commit, which removes it.
                call_ids = [call.call_id for call in calls]
                await _run_to_end(self._in_flight.announce(request.session.session_id, call_ids))
            async with asgi.ClientWatch(receive, buffer.abandoned) as watch:
                await self._sample_calls(request, calls, reply)
            if watch.gone or not await buffer.has_listener():
                return CallOutcome("client_gone", 499, "the client closed the connection")
            return CallOutcome("ok", 200)
        except SessionClosedError:
            raise
        except asyncio.CancelledError:  # a server that stops cancels calls after its grace period
            return CallOutcome("client_gone", 499, "the gateway was stopped", _gateway_stopped())
        except (RequestError, EngineError) as error:
            return CallOutcome.failed(error)
        except Exception as error:
            log.exception("call %s failed inside Polar", calls[0].call_id)
            return CallOutcome.failed(_internal_error(error))

    async def _sample_calls(self, request: RequestContext, calls: Sequence[PendingCall], reply: Reply) -> None:
        if len(calls) == 1:
            await self._sample_call(request, 0, calls[0], reply)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index, call in enumerate(calls):
                    group.create_task(self._sample_call(request, index, call, reply))
        except* (RequestError, EngineError) as errors:
            raise errors.exceptions[0] from errors

    async def _sample_call(self, request: RequestContext, index: int, call: PendingCall, reply: Reply) -> None:
        call.plan = await self._prompts.build(call.request, call.lineage.base, request.session)
        call.version = await self._engine.weight_version()
        events = self._engine.sample(call.request, stream=request.parsed.stream, prompt=call.plan.prompt)
        async with contextlib.aclosing(events):
            with self._metrics.busy.call():
                async for event in events:
                    if call.first_token_at is None:
                        call.first_token_at = time.time()
                    call.answer.add(event)
                    await reply.write(index, event)
        if not call.answer.finished:
            raise EngineError("The engine's answer ended without a finish reason, so it may be incomplete.")

    async def count_tokens(
        self, dialect: Dialect, path_key: str | None, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
    ) -> None:
        """Answer a request for the number of tokens of a prompt. Such a request is not recorded."""
        try:
            await self._find_session(asgi.read_headers(scope), path_key, scope)
            with self._bodies.reserve() as take:
                body = await asgi.read_body(receive, *self._body_limits, take)
                value = await _offload(len(body), asgi.parse_json_object, body, self._settings.limits.body_values)
                request = await _offload(len(body), dialect.parse_count, value)
            tokens = await self._engine.count_tokens(request)
        except asgi.ClientDisconnected:
            return
        except (RequestError, EngineError) as error:
            if isinstance(error, RequestError):
                self._metrics.refused.labels(error.status).inc()
            await send_error(send, error, dialect)
        else:
            await asgi.send_json(send, 200, dialect.count_body(tokens))

    async def _find_session(self, headers: Mapping[str, str], path_key: str | None, scope: asgi.Scope) -> SessionState:
        query = scope["query_string"]
        query_key = parse_qs(query.decode("latin-1")).get("key", [None])[0] if query else None
        key = key_of_request(headers, query_key)
        inside_sandbox = asgi.INSIDE_SANDBOX in scope.get("state", {})
        return await self._sessions.find(key, path_key, inside_sandbox=inside_sandbox)

    async def _parse(self, dialect: Dialect, raw: bytes, session: SessionState) -> ParsedRequest:
        body = await _offload(len(raw), asgi.parse_json_object, raw, self._settings.limits.body_values)
        previous_call_id = dialect.previous_call_id(body)
        if previous_call_id is None:
            return await _offload(len(raw), dialect.parse, body, session.last_parsed(dialect.name))
        previous = await self._previous_call(dialect, previous_call_id, session)
        size = len(raw) + sum(map(len, previous.messages))  # a short body may continue a conversation of megabytes
        whole = await _offload(size, dialect.prepend_previous, body, previous)
        return await _offload(size, dialect.parse, whole)

    async def _previous_call(self, dialect: Dialect, call_id: str, session: SessionState) -> PreviousCall:
        """Return the recorded call that a body refers to.

        Raises RequestError if this session has no such call, or the call has no complete answer.
        """
        call = await self._store.calls.get(call_id)
        if call is None or call.session_id != session.session_id or call.dialect != dialect.name or not call.choices:
            raise RequestError(
                "The previous response was not found in this session.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if call.status in ("client_gone", "upstream_error"):
            raise RequestError(
                f"The previous response ended early ({call.error or call.status}), so it cannot be continued.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return PreviousCall(call.messages, call.choices[0].message)


async def _offload(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `work(...)`, computed in a thread if `size`, in bytes, is large."""
    return await asyncio.to_thread(work, *args, **kwargs) if size > _LARGE_BODY else work(*args, **kwargs)


async def _run_to_end(work: Awaitable[T]) -> T:
    """Await `work` to its end even if this task is cancelled, then let the cancellation continue."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _gateway_stopped() -> RequestError:
    """Return the error for an agent whose call was cut off because the gateway stops. The status allows a retry."""
    return RequestError("The gateway was stopped.", status=503)


def _internal_error(error: Exception) -> EngineError:
    return EngineError(f"Internal error in Polar: {type(error).__name__}: {error}", status=500)
