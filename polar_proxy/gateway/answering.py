"""The answer of a request: its calls are sampled, and each event goes to the agent, in the dialect of its request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects.base import Answer
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.fast_fields import replace
from polar_proxy.gateway.engine_timeouts import EngineWait
from polar_proxy.gateway.hooks import HookedCall, Hooks, events_of, request_changes
from polar_proxy.gateway.hosted.provider_turns import ProviderTurns
from polar_proxy.gateway.http import asgi
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.recording import PendingCall, RequestContext
from polar_proxy.types import ChatRequest, EngineRequest, Json, SampleEvent, Sampling

_DEFAULTS: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values of parameters that are not set. Without them, an engine would use values of the model's generation_config,
and the record would not show the distribution from which the answer was sampled. Hosted providers do not get them."""

_REPLACED = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)


def as_sampled(request: RequestContext, engine_request: EngineRequest) -> EngineRequest:
    """Return the request as it is sampled: with the session's policy, and with the engine's model if the client named
    none. A request that is passed on to its provider stays as it came."""
    if request.raw is not None:
        return replace(engine_request, raw=request.raw, large=request.large)
    info = request.engine.served.engine.info
    hosted = "hosted" in info.capabilities
    sampled = replace(
        engine_request,
        sampling=apply_policy(engine_request.sampling, request.session.policy, hosted=hosted),
        model=engine_request.model or info.model,
        large=request.large,
    )
    if hosted and isinstance(sampled, ChatRequest):
        options = request.dialect.client_options(request.parsed.params)
        return replace(sampled, options=replace(options, betas=request.betas))
    return sampled


def apply_policy(sampling: Sampling, policy: Json, *, hosted: bool = False) -> Sampling:
    """Return the parameters as the session's sampling policy changes them. Unless the model is hosted, also set every
    missing parameter to its default.

    `policy` may hold the parameters in `_REPLACED`; each replaces the client's value. It may also hold max_tokens, an
    upper limit for the client's value. If the client gave no max_tokens, the limit becomes the value.
    """
    defaults = {} if hosted else _DEFAULTS
    changes: Json = {name: value for name, value in defaults.items() if getattr(sampling, name) is None}
    if policy:
        changes |= {name: policy[name] for name in _REPLACED if name in policy}
    if (limit := policy.get("max_tokens")) is not None:
        changes["max_tokens"] = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
    return replace(sampling, **changes) if changes else sampling


class CallSampler:
    """Sends each call of a request to its engine, and the engine's events to the agent."""

    def __init__(self, hooks: Hooks, provider_turns: ProviderTurns, metrics: GatewayMetrics) -> None:
        self._hooks = hooks
        self._provider_turns = provider_turns
        self._metrics = metrics

    async def sample(self, request: RequestContext, calls: Sequence[PendingCall], reply: Reply) -> None:
        """Sample the calls of a request, several at the same time, and write their events to the reply.

        Raises RequestError or EngineError if a call fails. If several calls fail, the first error is raised.
        """
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
        if call.final_answer is not None:
            event = SampleEvent(text=call.final_answer, finish_reason="stop")
            call.answer.add(event)
            await reply.write(index, event)
            return
        served = call.engine.served
        request.dialect.check_length(call.request, served.engine.info)
        async with EngineWait(served.timeouts) as wait:
            hooked = _hooked_call(request, call)
            changed_request = await self._hooks.change_request(call.request, hooked)
            call.request_changes = request_changes(call.request, changed_request)
            call.request = changed_request
            rewritten = "messages" in call.request_changes
            call.plan = await served.prompts.build(
                call.request, call.lineage.base, request.session, rewritten=rewritten
            )
            call.version = await served.engine.weight_version()
            call.request = await self._provider_turns.attach(request.session.session_id, call.request, served.engine)
            call.not_carried = served.engine.not_carried(call.request)
            # The limit needs to see where the first call ends.
            stream = request.parsed.stream or call.limit is not None
            events = served.engine.sample(call.request, stream=stream, prompt=call.plan.prompt)
            if call.limit is not None:
                events = call.limit.apply(events)
            async with contextlib.aclosing(events):
                with self._metrics.busy:
                    async for event in events:
                        wait.received()
                        if call.first_token_at is None:
                            call.first_token_at = time.time()
                            served.timeouts.sampled()
                        call.answer.add(event)
                        if not self._hooks.changes_answers:
                            await reply.write(index, event)
                        wait.resume()
        if not call.answer.finished:
            raise EngineError("The engine's answer ended without a finish reason, so it may be incomplete.")
        if self._hooks.changes_answers:
            changed = await self._hooks.change_answer(call.answer, hooked)
            call.shown = None if changed is call.answer else changed
            for event in events_of(changed):
                await reply.write(index, event)


def _hooked_call(request: RequestContext, call: PendingCall) -> HookedCall:
    session = request.session
    return HookedCall(call.call_id, session.session_id, session.label, request.dialect.name, call.request.model)


class Reply:
    """The response to one request: a JSON body that is sent after the sampling, or a stream that is sent during it.

    A stream's headers are sent with its first bytes, at the latest after `headers_after_seconds`. An error before the
    headers keeps its own HTTP status. While no events arrive, heartbeats are sent.
    """

    def __init__(self, send: asgi.Send, request: RequestContext, call: PendingCall, settings: GatewaySettings) -> None:
        """`call`: the first call of the request."""
        self._send = send
        self._dialect = request.dialect
        self._call_id = call_id = call.call_id
        self._encoder = request.parsed.encoder(call_id, int(request.started_at), sampled=call.request)
        session_id = request.session.session_id
        self._polar_headers = [(b"x-polar-call-id", call_id.encode()), (b"x-polar-session-id", session_id.encode())]
        self._headers = [*self._polar_headers, *asgi.request_id_headers(call_id)]
        self._stream = request.parsed.stream
        self._started = False
        self._closed = False
        self._lock = asyncio.Lock()
        self._last_sent = time.monotonic()
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._heartbeats: asyncio.Task[None] | None = None
        if self._stream:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(settings.headers_after_seconds, self._start_heartbeats)

    @property
    def started(self) -> bool:
        """True once a part of the response was sent."""
        return self._started

    async def write(self, request_index: int, event: SampleEvent) -> None:
        """Send an event of the engine request number `request_index`, if the response is a stream."""
        if not self._stream:
            return
        data = self._encoder.feed(request_index, event)
        if data:
            async with self._lock:
                if not self._started:
                    await self._send_headers()
                await self._send_body(data)

    async def finish(self, answers: list[Answer]) -> None:
        """Send the rest of the answer, up to its last byte."""
        if self._stream:
            await self._finish_stream(self._encoder.end(answers))
        else:
            await asgi.send_json(self._send, 200, self._encoder.respond(answers), self._headers)

    async def fail(self, error: RequestError | EngineError) -> None:
        """Send an error, as the whole response or at the end of a stream that has begun."""
        self.close()
        if self._started:
            await self._finish_stream(self._encoder.fail(str(error), error.status))
        else:
            await asgi.send_error(self._send, error, self._dialect, self._polar_headers, call_id=self._call_id)

    def close(self) -> None:
        """Stop the heartbeats. Safe to call more than once."""
        self._closed = True
        if self._stream:
            self._timer.cancel()
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None  # a cancelled task refers to its frames, and so to this object

    async def _finish_stream(self, data: bytes) -> None:
        async with self._lock:
            if not self._started:
                await self._send_headers()
            self._closed = True
            await self._send_body(data, more=False)

    def _start_heartbeats(self) -> None:
        self._heartbeats = asyncio.create_task(self._send_heartbeats())

    async def _send_heartbeats(self) -> None:
        heartbeat = self._dialect.heartbeat
        while True:
            async with self._lock:
                if self._closed:
                    return
                if not self._started:
                    await self._send_headers()
                    await self._send_body(b"")  # the server sends the headers together with the first body message
                elif heartbeat and time.monotonic() - self._last_sent >= self._heartbeat_seconds:
                    await self._send_body(heartbeat)
                if not heartbeat:
                    return
            await asyncio.sleep(max(0.0, self._last_sent + self._heartbeat_seconds - time.monotonic()))

    async def _send_headers(self) -> None:
        self._started = True
        headers = [
            (b"content-type", self._dialect.stream_media_type.encode() + b"; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_body(self, data: bytes, more: bool = True) -> None:
        self._last_sent = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class BackgroundReply(Reply):
    """The response to a request for an answer in the background: the unfinished response object, sent at once."""

    async def begin(self) -> None:
        await asgi.send_json(self._send, 200, self._encoder.unfinished("queued"), self._headers)

    def unfinished(self) -> bytes:
        """Return the response object as it is before the answer is complete."""
        return self._encoder.unfinished("in_progress")

    async def finish(self, answers: list[Answer]) -> None:
        """Do nothing: the client retrieves the answer later."""

    async def fail(self, error: RequestError | EngineError) -> None:
        """Do nothing: the record says how the call ended."""
