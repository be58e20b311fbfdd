"""One turn: the pipeline that every call of every dialect passes, streamed or not.

    place -> policy -> (announced) -> plan of the prompt -> engine.sample -> encoder -> commit -> last byte to the agent

Invariants: the last byte of an answer leaves only after the call is committed (recorded before told). Whatever ends a
call (finished, failed, client gone, gateway stopped) it is committed with what was sampled until then. If the commit
itself fails the agent still gets its answer, and the session is marked as having lost a call. Where the gateway is one
of several the call is announced to the others first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects import Dialect, Encoder, ParsedRequest, TokenCount
from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.gateway import asgi
from polar_proxy.gateway.in_flight import InFlightCalls
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.record import CallOutcome, PendingCall, RequestContext, make_record, version_of
from polar_proxy.gateway.retries import ResponseBuffer
from polar_proxy.sessions import ClientMetadata
from polar_proxy.sessions.prompts import PromptBuilder
from polar_proxy.sessions.registry import SessionState, apply_policy, session_closed_error
from polar_proxy.sessions.state import CachedRequest, ParseCache
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, CallStatus, new_id

log = logging.getLogger(__name__)

_COMMIT_PATIENCE = 60.0

CallObserver = Callable[[CallRecord], None]
"""Told of each call once it is committed; runs in the event loop, so it must be quick."""


async def send_error(
    send: asgi.Send, error: RequestError, shape: Dialect | TokenCount, headers: asgi.Headers = ()
) -> None:
    """An error as the whole answer, in the caller's own format."""
    # Clients such as Codex give up at once on a 429 that does not say when to come back.
    after = error.retry_after or ("1" if error.status in (429, 503) else None)
    retry = [] if after is None else [(b"retry-after", after.encode("latin-1", "replace"))]
    await asgi.respond(send, error.status, shape.error_body(error), [*headers, *retry])


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """What all turns of one gateway work with."""

    engine: Engine
    store: Store
    settings: GatewaySettings
    metrics: GatewayMetrics
    observers: list[CallObserver]
    continuer: PromptBuilder
    recent: ParseCache
    in_flight: InFlightCalls | None
    """To tell the other gateways of the database, if there are any."""


class RequestHandler:
    """One HTTP request for model answers, from its parsed body to the last byte. Used once."""

    def __init__(self, services: GatewayContext) -> None:
        self._engine = services.engine
        self._services = services
        self._settled: asyncio.Task[None] | None = None
        self._announced: asyncio.Task[bool] | None = None
        self.ok = False
        """The answer is complete, committed, and somebody gets it."""

    async def run(
        self,
        dialect: Dialect,
        session: SessionState,
        parsed: ParsedRequest,
        hints: ClientMetadata,
        path: str,
        started: float,
        receive: asgi.Receive,
        send: asgi.Send,
        tape: ResponseBuffer,
        recently: CachedRequest | None = None,
    ) -> None:
        """Answer. `path` is recorded with the call, `started` (seconds since the epoch) is when the request came,
        `recently` what `parsed` was read after."""
        send = tape.into(send)
        self._dialect = dialect
        self._session = session
        self._asked = RequestContext(session.session_id, dialect.name, path, parsed, started)
        read = None if recently is None else recently.read
        self._parts = [
            PendingCall(
                call_id := new_id("call"),
                apply_policy(request, session.policy),
                session.history.place(call_id, request, hints, now=started, read=read),
                raw,
            )
            for request, raw in zip(parsed.requests, parsed.messages, strict=True)
        ]
        self._services.recent.put(session.session_id, dialect.name, parsed, self._parts[0].place.read, tape.size)
        self._headers = [
            (b"x-polar-call-id", self._parts[0].call_id.encode()),
            (b"x-polar-session-id", session.session_id.encode()),
        ]
        encoder = dialect.encoder(parsed, self._parts[0].call_id, int(started))
        writer = None
        if parsed.stream:
            writer = asgi.StreamWriter(
                send,
                dialect.stream_media_type,
                self._headers,
                heartbeat=dialect.heartbeat,
                every=self._services.settings.heartbeat_seconds,
                patience=self._services.settings.headers_after_seconds,
            )
        self._session.begin(len(self._parts))
        self._services.metrics.in_flight.inc(len(self._parts))
        try:
            if not await self._announce():
                self._services.metrics.refused.labels(401).inc()
                await self._tell(session_closed_error(), encoder, writer, send)
                return
            async with asgi.ClientWatch(receive, tape.abandoned) as watch:
                await self._generate(encoder, writer)
            if watch.gone or not await tape.heard():
                await self._settle("client_gone", 499, "the client closed the connection")
                return
            await self._settle("ok", 200, None)
            self.ok = True
            answers = [part.answer for part in self._parts]
            if writer is not None:
                await writer.finish(encoder.end(answers))
            else:
                await asgi.respond(send, 200, encoder.respond(answers), self._headers)
        except asyncio.CancelledError:
            # The server cancels what outlasts its grace when it stops. The agent gets an error that it may retry.
            await self._settle("client_gone", 499, "the gateway was stopped")
            await self._tell(RequestError("The gateway was stopped.", status=503), encoder, writer, send)
        except (RequestError, EngineError) as error:
            await self._fail(error, encoder, writer, send)
        except Exception as error:
            log.exception("call %s failed inside Polar", self._parts[0].call_id)
            fault = EngineError(f"Internal error in Polar: {type(error).__name__}: {error}", status=500)
            await self._fail(fault, encoder, writer, send)
        finally:
            if writer is not None:
                writer.close()
            self._session.end(len(self._parts))
            self._services.metrics.in_flight.dec(len(self._parts))

    async def _announce(self) -> bool:
        """Let the other gateways know, if there are any. False: one of them has closed the session meanwhile."""
        in_flight = self._services.in_flight
        if in_flight is None:
            return True
        ids = [part.call_id for part in self._parts]
        self._announced = asyncio.create_task(in_flight.announce(self._session.session_id, ids))
        return await asyncio.shield(self._announced)

    async def _generate(self, encoder: Encoder, writer: asgi.StreamWriter | None) -> None:
        if len(self._parts) == 1:
            await self._pump(0, encoder, writer)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._parts)):
                    group.create_task(self._pump(index, encoder, writer))
        except* (RequestError, EngineError) as errors:
            raise errors.exceptions[0] from errors

    async def _pump(self, index: int, encoder: Encoder, writer: asgi.StreamWriter | None) -> None:
        part = self._parts[index]
        part.plan = await self._services.continuer.plan(part.request, part.place, self._session.policy)
        part.version = await self._engine.weight_version()
        stream = self._asked.parsed.stream
        sampled = self._engine.sample(part.request, stream=stream, prompt=part.plan.prompt)
        async with contextlib.aclosing(sampled) as events:
            with self._services.metrics.busy.call():
                async for event in events:
                    if part.first_at is None:
                        part.first_at = time.time()
                    part.answer.add(event)
                    if writer is not None:
                        await writer.write(encoder.feed(index, event))
        if not part.answer.finished:
            raise EngineError("The engine's answer ended before it was finished.")

    async def _version_now(self) -> str | None:
        """The policy version; None where the engine cannot be asked, which must not lose the call."""
        try:
            return await self._engine.weight_version()
        except (RequestError, EngineError) as error:
            log.warning("the policy version of call %s is not known: %s", self._parts[0].call_id, error)
            return None

    async def _settle(self, status: CallStatus, http_status: int, error: str | None) -> None:
        """Commit, once; a cancellation in the meantime does not cut it short."""
        if self._settled is None:
            self._settled = asyncio.create_task(self._commit(status, http_status, error))
        await asyncio.shield(self._settled)

    async def _fail(
        self,
        error: RequestError | EngineError,
        encoder: Encoder,
        writer: asgi.StreamWriter | None,
        send: asgi.Send,
    ) -> None:
        await self._settle("upstream_error", error.status, str(error))
        await self._tell(error, encoder, writer, send)

    async def _tell(
        self, error: RequestError | EngineError, encoder: Encoder, writer: asgi.StreamWriter | None, send: asgi.Send
    ) -> None:
        message = str(error)
        if writer is not None:
            writer.close()
            if writer.started:
                await writer.finish(encoder.fail(message, error.status))
                return
        if isinstance(error, EngineError):
            after = error.retry_after
            error = RequestError(message, status=error.status, code="engine_error")
            error.retry_after = after
        await send_error(send, error, self._dialect, self._headers)

    async def _commit(self, status: CallStatus, http_status: int, error: str | None) -> None:
        ending = CallOutcome(status, http_status, error, time.time())
        if self._announced is not None:
            await asyncio.wait([self._announced])  # its row must not come after the commit that removes it
        version = await self._version_now()
        for part in self._parts:
            said = [choice.message.to_openai() for _, choice in part.answer.in_order]
            fingerprint = self._session.history.ended(part.place, said, status, now=ending.ended_at)
            weights = version_of(part.answer, part.version, version or part.version)
            record = make_record(self._asked, part, ending, self._engine.info, weights, fingerprint)
            self._services.continuer.remember(record, part.plan, part.place.base)
            self._services.metrics.count(record)
            waited = time.perf_counter()
            try:
                async with asyncio.timeout(_COMMIT_PATIENCE):
                    await self._services.store.calls.commit(record)
            except Exception:
                self._session.lost += 1
                self._services.metrics.lost.inc()
                log.exception("call %s was answered but could not be recorded", part.call_id)
            else:
                for observer in self._services.observers:
                    observer(record)
            self._services.metrics.commit.observe(time.perf_counter() - waited)
            if self._services.in_flight is not None:
                self._services.in_flight.over([part.call_id])
