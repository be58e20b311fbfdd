"""One model request, from its HTTP body to the last byte of its answer.

    find session -> read -> choose engine -> parse -> (join a retry) -> reserve in the budget -> place: find the
    relation to earlier calls -> build prompt -> sample and stream -> commit -> finish

Promises:

* Recorded before sent: the last byte of an answer leaves only after its calls are committed.
* While the store cannot be written, calls that must be recorded are refused before they are sampled. All other
  calls are answered, and count as lost if they stay unrecorded (`gateway/recording.py`).
* However a request ends (answered, failed, client gone, gateway stopped), its calls are committed with what was
  sampled until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Collection, Sequence
from functools import partial
from typing import Literal, TypeVar

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects.base import Answer, Dialect, ParsedRequest
from polar_proxy.engines.one_call import OneCallLimit, wants_one_call
from polar_proxy.errors import EngineDroppedError, EngineError, RequestError, StoreError
from polar_proxy.gateway.answering import BackgroundReply, CallSampler, Reply, as_sampled
from polar_proxy.gateway.engine_timeouts import EngineWait
from polar_proxy.gateway.failed_requests import FailedRequests
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.hooks import Hooks
from polar_proxy.gateway.hosted.forwarding import RequestForwarder
from polar_proxy.gateway.hosted.passthrough import (
    PassthroughReply,
    answered_by_polar,
    check_passthrough,
    provider_request,
)
from polar_proxy.gateway.hosted.provider_history import ProviderHistories
from polar_proxy.gateway.hosted.provider_turns import ProviderTurns
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.http.limits import BodyBudget
from polar_proxy.gateway.in_flight import InFlightCalls
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.recording import CallOutcome, CallRecorder, PendingCall, RequestContext
from polar_proxy.gateway.request_reader import RequestReader
from polar_proxy.gateway.responses.background import BackgroundCalls
from polar_proxy.gateway.responses.conversations import NewItems, StoredConversations
from polar_proxy.gateway.responses.stored_calls import StoredCalls
from polar_proxy.gateway.retries import ResponseBuffer, RetryCache
from polar_proxy.gateway.routing import EngineRouter, SessionFinder
from polar_proxy.offload import OffloadThread
from polar_proxy.prices import PriceTable
from polar_proxy.sessions.budget import BudgetSpentError, BudgetUsage, Reservation
from polar_proxy.sessions.identity import read_betas, read_client_metadata
from polar_proxy.sessions.registry import SessionClosedError, SessionRegistry
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from polar_proxy.terminal import LogContext
from polar_proxy.types import new_id

log = logging.getLogger(__name__)

T = TypeVar("T")
AnswerResult = Literal["answered", "failed", "dropped"]
"""How an attempt to answer a request ended: `answered` completely and without an error, or `failed`.

`dropped`: the engine dropped the connection before the agent got any of the response. The request can then be answered
by a second call. The first call is recorded, too, because the engine may have sampled tokens.
"""


class RequestHandler:
    def __init__(
        self,
        router: EngineRouter,
        thread: OffloadThread,
        store: Store,
        sessions: SessionRegistry,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        in_flight: InFlightCalls | None,
        monitor: StoreMonitor,
    ) -> None:
        """`thread` parses and hashes large requests.

        `in_flight` announces calls to the other gateways of the database; None if this is the only gateway.
        """
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._in_flight = in_flight
        self._monitor = monitor
        self.bodies = BodyBudget(settings.limits.bodies_mb << 20)
        self._thread = thread
        self.router = router
        self.forwarder = RequestForwarder(router, self.bodies, store, monitor)
        if any(choice.passthrough for choice in router.choices):
            check_passthrough(settings)
        self.recorder = CallRecorder(store, monitor, sessions, metrics, in_flight, PriceTable(settings.prices))
        self._provider_turns = ProviderTurns(store, monitor, settings.cache_mb << 20)
        self._sampler = CallSampler(Hooks(settings.hooks, settings.hook_seconds), self._provider_turns, metrics)
        self.retries = RetryCache(settings)
        self.failed_requests = FailedRequests()
        self.background = BackgroundCalls()
        self.stored_calls = StoredCalls(store, monitor, settings.max_body_mb << 20)
        self.conversations = StoredConversations(store, monitor, settings.max_body_mb << 20, settings.limits.messages)
        self._reader = RequestReader(
            settings.limits,
            router,
            self._thread,
            self.stored_calls,
            self.conversations,
            ProviderHistories(store, monitor, self.stored_calls),
            monitor,
        )
        self.session_finder = SessionFinder(sessions, monitor, settings)

    async def handle(
        self,
        dialect: Dialect,
        path: str,
        path_key: str | None,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        *,
        resumable: Collection[str] = (),
    ) -> None:
        """Answer one model request. `path` is the route without the prefix `/s/{path_key}`.

        `resumable`: ids of calls that the request may refer to even if they were made with `store: false`.
        """
        started_at = time.time()
        try:
            headers = asgi.read_headers(scope)
            session = await self.session_finder.find(headers, path_key, scope)
            with (
                LogContext(session_id=session.session_id, rollout_id=session.rollout_id),
                session.in_request(),
                self.bodies.reserve(session.session_id) as reservation,
            ):
                read = await self._reader.read(dialect, receive, session, reservation, resumable)
                parsed = read.parsed
                self._check_provider_tools(parsed)
                raw = None if read.raw is None else provider_request(scope, dialect, read.raw, parsed.tools)
                request = RequestContext(
                    dialect=dialect,
                    session=session,
                    path=path,
                    parsed=parsed,
                    metadata=read_client_metadata(headers, parsed.params),
                    betas=read_betas(headers),
                    engine=read.engine,
                    started_at=started_at,
                    large=read.large,
                    conversation=read.conversation,
                    raw=raw,
                    refers=read.refers,
                )
                if parsed.generate:
                    await self._join_or_answer(request, receive, send)
                else:
                    await self._warm_up(request, send)
        except asgi.ClientDisconnected:
            return
        except RequestError as error:
            self._metrics.refused.labels(error.status).inc()
            fields = {"dialect": dialect.name, "http_status": error.status, "code": error.code}
            log.debug("a request was refused with status %d (%s)", error.status, error.code, extra={"fields": fields})
            await asgi.send_error(send, error, dialect)

    def _check_provider_tools(self, parsed: ParsedRequest) -> None:
        """Raise RequestError if the request asks for tools that its provider would run and the settings refuse them."""
        if parsed.provider_tools and self._settings.provider_tools == "refuse":
            names = ", ".join(name[:80] for name in parsed.provider_tools[:20])
            raise RequestError(
                f"The request asks for tools that its provider would run ({names}). This server refuses such requests "
                "(setting gateway.provider_tools). Send the request without these tools.",
                param="tools",
                code="unsupported_value",
            )

    async def _warm_up(self, request: RequestContext, send: asgi.Send) -> None:
        """Answer a warm-up, that is, a request with `generate: false`. Nothing is sampled, and nothing is recorded.

        The messages are kept, because a later request may continue from them.
        """
        call_id = new_id("call")
        self.stored_calls.keep_warm_up(request.session, call_id, request.parsed.messages[0])
        sampled = as_sampled(request, request.parsed.requests[0])
        encoder = request.parsed.encoder(call_id, int(request.started_at), sampled=sampled)
        stream = encoder.warmed_up(Answer(prompt_ids=(), ended_at=time.time()))
        await asgi.send_stream(send, stream, request.dialect)

    async def _join_or_answer(self, request: RequestContext, receive: asgi.Receive, send: asgi.Send) -> None:
        earlier = self.retries.find(request)
        if earlier is not None and await earlier.follow(receive, send):
            self._metrics.joined.inc()
            return
        if self._monitor.problem is not None and request.session.record_required:
            request.session.refusal = self._monitor.problem
            raise self._monitor.refusal()
        with self.background.count(request.session) if request.parsed.background else contextlib.nullcontext():
            await self._answer_new(request, receive, send)

    async def _answer_new(self, request: RequestContext, receive: asgi.Receive, send: asgi.Send) -> None:
        """Answer a request that repeats no earlier one. If the engine drops the connection of the call, make a second
        call."""
        buffer = self.retries.open(request)
        result: AnswerResult = "failed"
        try:
            result = await self._answer(request, buffer, receive, send, repeatable=not request.parsed.background)
            if result == "dropped":
                result = await self._answer(request, buffer, receive, send, repeatable=False)
        finally:
            self.retries.close(buffer, failed=result != "answered")

    async def _answer(
        self,
        request: RequestContext,
        buffer: ResponseBuffer,
        receive: asgi.Receive,
        send: asgi.Send,
        *,
        repeatable: bool,
    ) -> AnswerResult:
        """Place, sample, commit and answer a request. `repeatable`: the result may be `dropped`."""
        session = request.session
        with session.budget.reserve(len(request.parsed.requests), request.started_at) as reservation:
            await self.store_spent(session.session_id, session.budget)
            if reservation.refusal is not None:
                raise reservation.refusal
            if reservation.final_answer is not None and request.raw is not None:
                request = answered_by_polar(request)
            calls = await self._place(request, buffer.size, reservation.final_answer)
            # The id of its first call is also the request's id in the headers of the answer.
            with LogContext(call_id=calls[0].call_id, request_id=calls[0].call_id):
                return await self._answer_reserved(
                    request, calls, reservation, buffer, receive, send, repeatable=repeatable
                )

    async def store_spent(self, session_id: str, budget: BudgetUsage) -> None:
        """If a session's budget is spent, write this to the store. If the store fails, the session's next call writes
        it."""
        if budget.spent is None or budget.stored:
            return
        with contextlib.suppress(StoreError):  # the monitor logs it
            await self._monitor.run(partial(self._store.sessions.mark_spent, session_id, budget.spent))
            budget.stored = True

    async def _answer_reserved(
        self,
        request: RequestContext,
        calls: Sequence[PendingCall],
        reservation: Reservation,
        buffer: ResponseBuffer,
        receive: asgi.Receive,
        send: asgi.Send,
        *,
        repeatable: bool,
    ) -> AnswerResult:
        """Answer a request whose calls are reserved in the session's budget. `repeatable`: as in `_answer`."""
        session = request.session
        kind = PassthroughReply if request.raw else BackgroundReply if request.parsed.background else Reply
        reply = kind(buffer.wrap(send), request, calls[0], self._settings)
        session.begin(len(calls))
        self._metrics.in_flight.inc(len(calls))
        try:
            if isinstance(reply, BackgroundReply):
                receive = await self.background.begin(calls[0].call_id, session, reply, buffer)
            outcome = await self._sample(request, calls, reply, buffer, receive)
            self._provider_turns.remember(session.session_id, calls)
            if outcome.engine_failed and session.record_required and not session.ended:
                self.failed_requests.keep(session, calls)
            commit = self.recorder.commit(request, calls, outcome, reservation, reply_started=reply.started)
            unrecorded = await _run_to_end(commit)
            # Without its record, the call would be missing in the conversation that it continues.
            if unrecorded is not None and (session.record_required or request.conversation is not None):
                self._metrics.refused.labels(503).inc()
                await reply.fail(self._monitor.refusal())
                return "failed"
            if outcome.status == "ok":
                await reply.finish([call.agents_answer for call in calls])
                return "answered"
            if repeatable and isinstance(outcome.error_to_send, EngineDroppedError) and not reply.started:
                return "dropped"
            if outcome.error_to_send is not None:
                await reply.fail(outcome.error_to_send)
        except (SessionClosedError, BudgetSpentError) as error:  # by other gateways, before a call began
            for call in calls:
                session.withdraw(call.call_id)
            self._metrics.refused.labels(error.status).inc()
            await reply.fail(error)
        except asyncio.CancelledError:
            await reply.fail(_gateway_stopped())
        except Exception as error:
            log.exception("call %s failed inside Polar", calls[0].call_id)
            await reply.fail(_internal_error(error))
        finally:
            reply.close()
            self.background.end(calls[0].call_id)
            session.end(len(calls))
            self._metrics.in_flight.dec(len(calls))
        return "failed"

    async def _place(self, request: RequestContext, size: int, final_answer: str | None) -> list[PendingCall]:
        """Decide how each call of a request relates to earlier calls.

        `size`: bytes of the request's messages. `final_answer`: Polar's own answer, given in place of the engine's.
        """
        session, parsed = request.session, request.parsed
        calls = []
        for engine_request, messages in zip(parsed.requests, parsed.messages, strict=True):
            call_id = new_id("call")
            hashed = await self._thread.run(request.large, session.hash, engine_request, session.last_conversation)
            lineage = session.place(call_id, engine_request, request.metadata, hashed, now=request.started_at)
            engine_request = as_sampled(request, engine_request)
            limited = request.raw is None and wants_one_call(engine_request, request.engine.served.engine.info)
            calls.append(
                PendingCall(
                    call_id,
                    engine_request,
                    lineage,
                    messages,
                    request.engine,
                    limit=OneCallLimit(engine_request.sampling.n) if limited else None,
                    final_answer=final_answer,
                )
            )
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
        """Sample the answer to each call of a request, with all its choices, and return how the calls ended.

        Raises SessionClosedError and BudgetSpentError only before sampling begins (see `_announce`).
        """
        try:
            if self._in_flight is not None:
                # Never cut short: otherwise the announcement might be written after the commit, which removes it.
                await _run_to_end(self._announce(self._in_flight, request, calls))
            async with asgi.ClientWatch(receive, buffer.abandoned) as watch:
                await self._sampler.sample(request, calls, reply)
            if watch.gone or not await buffer.wait_for_listener():
                return CallOutcome("client_gone", 499, "the client closed the connection")
            if request.session.ended or await self._ended_elsewhere(request.session, calls):
                text = "The rollout ended before this call was answered."
                late = RequestError(text, status=409, code="rollout_ended")
                return CallOutcome("client_gone", late.status, str(late), late)
            return CallOutcome("ok", 200)
        except (SessionClosedError, BudgetSpentError):
            raise
        except asyncio.CancelledError:  # a server that stops cancels calls after its grace period
            return CallOutcome("client_gone", 499, "the gateway was stopped", _gateway_stopped())
        except (RequestError, EngineError) as error:
            return CallOutcome.failed(error)
        except Exception as error:
            log.exception("call %s failed inside Polar", calls[0].call_id)
            return CallOutcome.failed(_internal_error(error))

    async def _announce(self, in_flight: InFlightCalls, request: RequestContext, calls: Sequence[PendingCall]) -> None:
        """Announce calls to the other gateways of the database.

        If the session has already used up its `max_calls` through other gateways, Polar's final answer replaces the
        engine's answer. Raises BudgetSpentError if there can be no final answer: `at_budget` excludes it, or the
        request is passed on to its provider.

        Raises SessionClosedError if another gateway closed the session. If the store fails, raises RequestError when
        the calls must be recorded; otherwise the calls go on unannounced.
        """
        session = request.session
        call_ids, max_calls = [call.call_id for call in calls], session.budget.limits.max_calls
        try:
            announced = await self._monitor.run(partial(in_flight.announce, session.session_id, call_ids, max_calls))
        except StoreError as error:
            if session.record_required:
                raise self._monitor.refusal() from error
            return
        if announced:
            return
        reservation = session.budget.reached_elsewhere()
        await self.store_spent(session.session_id, session.budget)
        if reservation.refusal is not None or request.raw is not None:
            raise BudgetSpentError(session.budget.description)
        for call in calls:
            call.final_answer = reservation.final_answer

    async def _ended_elsewhere(self, session: SessionState, calls: Sequence[PendingCall]) -> bool:
        """Return whether another gateway ended the session without waiting for these calls.

        If the store fails, return False.
        """
        if self._in_flight is None:
            return False
        call_ids = [call.call_id for call in calls]
        try:
            return await self._monitor.run(partial(self._store.open_calls.are_abandoned, session.session_id, call_ids))
        except StoreError:  # the commit will report it
            return False

    async def count_tokens(
        self, dialect: Dialect, path_key: str | None, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
    ) -> None:
        """Answer a request for the number of tokens of a prompt. Such a request is not recorded."""
        try:
            session = await self.session_finder.find(asgi.read_headers(scope), path_key, scope)
            with self.bodies.reserve(session.session_id) as reservation:
                engine, request = await self._reader.read_count(dialect, receive, session, reservation)
                if isinstance(request, bytes):
                    assert engine.passthrough is not None
                    await self.forwarder.forward(engine.passthrough, dialect, scope, request, receive, send)
                    return
                async with EngineWait(engine.served.timeouts):
                    tokens = await engine.served.engine.count_tokens(request)
        except asgi.ClientDisconnected:
            return
        except (RequestError, EngineError) as error:
            if isinstance(error, RequestError):
                self._metrics.refused.labels(error.status).inc()
            await asgi.send_error(send, error, dialect)
        else:
            await asgi.send_json(send, 200, dialect.count_body(tokens))

    async def read_items(self, session: SessionState, receive: asgi.Receive) -> NewItems:
        """Read and check the body of a request that may add items to a conversation."""
        with self.bodies.reserve(session.session_id) as reservation:
            return await self._reader.read_items(receive, session, reservation)


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
    return RequestError("The gateway was stopped before it had answered this request. Try again.", status=503)


def _internal_error(error: Exception) -> RequestError:
    text = f"Internal error in Polar: {type(error).__name__}: {error}"
    return RequestError(text, status=500, code="internal_error")  # not the code of the engine's errors
