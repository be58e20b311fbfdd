"""One turn: the pipeline that every call of every dialect passes, streamed or not.

    parse -> session -> policy -> place -> engine.sample -> encoder -> commit -> last byte to the agent

Invariants: the last byte of an answer leaves only after the call is committed (recorded before told). Whatever ends a
call (finished, failed, client gone, gateway stopped) it is committed with what was sampled until then. If the commit
itself fails the agent still gets its answer, and the session is marked as having lost a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Protocol
from urllib.parse import parse_qs

import numpy as np
import orjson
from starlette.datastructures import Headers

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects import Answer, Dialect, Encoder, ParsedRequest, assistant_message
from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.gateway import wire
from polar_proxy.gateway.metrics import Metrics
from polar_proxy.gateway.sessions import Session, Sessions, apply_policy, key_of
from polar_proxy.history import Place
from polar_proxy.types import CallRecord, CallStatus, ChatRequest, Choice, EngineRequest, Message, Sampling, new_id

log = logging.getLogger(__name__)

_LARGE_BODY = 1 << 20
_COMMIT_PATIENCE = 60.0


_SAMPLING = tuple(item.name for item in fields(Sampling))

Observer = Callable[[CallRecord], None]
"""Told of each call once it is committed; runs in the event loop, so it must be quick."""


class CallSink(Protocol):
    async def commit_call(self, record: CallRecord) -> None:
        """Returns when the call is durable."""
        ...


@dataclass(slots=True)
class _Part:
    """One engine request of an HTTP request, and what came of it."""

    call_id: str
    request: EngineRequest
    place: Place
    messages: tuple[bytes, ...]
    answer: Answer = field(default_factory=Answer)
    first_at: float | None = None


class TurnPipeline:
    """Serves the model routes of one gateway."""

    def __init__(
        self, engine: Engine, store: CallSink, sessions: Sessions, settings: GatewaySettings, metrics: Metrics
    ) -> None:
        self._engine = engine
        self._store = store
        self._sessions = sessions
        self._settings = settings
        self._metrics = metrics
        self.observers: list[Observer] = []

    async def serve(
        self,
        dialect: Dialect,
        route: str,
        path_key: str | None,
        scope: wire.Scope,
        receive: wire.Receive,
        send: wire.Send,
    ) -> None:
        """Answer one HTTP request. `route` is its path without the key that `/s/{key}` holds: keys are not recorded."""
        started = time.time()
        try:
            headers = Headers(scope=scope)
            query = scope["query_string"]
            query_key = parse_qs(query.decode("latin-1")).get("key", [None])[0] if query else None
            session = await self._sessions.find(key_of(headers, query_key), path_key)
            body = await wire.read_body(receive, self._settings.max_body_mb << 20)
            parsed = await self._parse(dialect, body)
        except wire.Disconnected:
            return
        except RequestError as error:
            self._metrics.refused.labels(error.status).inc()
            await wire.respond(send, error.status, dialect.error(error))
            return
        turn = _Turn(self, dialect, session, parsed, route, started)
        await turn.run(receive, send)

    async def _parse(self, dialect: Dialect, body: bytes) -> ParsedRequest:
        if len(body) > _LARGE_BODY:  # keep the loop free
            return await asyncio.to_thread(_parse_body, dialect, body)
        return _parse_body(dialect, body)


def _parse_body(dialect: Dialect, body: bytes) -> ParsedRequest:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _with_half_characters(body, error)
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_type")
    return dialect.parse(value)


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


class _Turn:
    def __init__(
        self,
        pipeline: TurnPipeline,
        dialect: Dialect,
        session: Session,
        parsed: ParsedRequest,
        path: str,
        started: float,
    ) -> None:
        self._engine = pipeline._engine
        self._store = pipeline._store
        self._observers = pipeline.observers
        self._settings = pipeline._settings
        self._metrics = pipeline._metrics
        self._dialect = dialect
        self._session = session
        self._parsed = parsed
        self._path = path
        self._started = started
        self._settled: asyncio.Task[None] | None = None
        self._parts = [
            _Part(
                new_id("call"),
                apply_policy(request, session.policy),
                session.history.place(_said(request, raw)),
                raw,
            )
            for request, raw in zip(parsed.requests, parsed.messages, strict=True)
        ]
        self._headers = [
            (b"x-polar-call-id", self._parts[0].call_id.encode()),
            (b"x-polar-session-id", session.session_id.encode()),
        ]

    async def run(self, receive: wire.Receive, send: wire.Send) -> None:
        encoder = self._dialect.encoder(self._parsed, self._parts[0].call_id, int(self._started))
        writer = None
        if self._parsed.stream:
            writer = wire.StreamWriter(
                send,
                self._dialect.stream_media_type,
                self._headers,
                heartbeat=self._dialect.heartbeat,
                every=self._settings.heartbeat_seconds,
                patience=self._settings.headers_after_seconds,
            )
        self._session.begin(len(self._parts))
        self._metrics.in_flight.inc(len(self._parts))
        try:
            async with wire.ClientWatch(receive) as watch:
                await self._generate(encoder, writer)
            if watch.gone and not self._complete:
                await self._settle("client_gone", 499, "the client closed the connection")
                return
            await self._settle("ok", 200, None)
            answers = [part.answer for part in self._parts]
            if writer is not None:
                await writer.finish(encoder.end(answers))
            else:
                await wire.respond(send, 200, encoder.respond(answers), self._headers)
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
            self._metrics.in_flight.dec(len(self._parts))

    async def _generate(self, encoder: Encoder, writer: wire.StreamWriter | None) -> None:
        if len(self._parts) == 1:
            await self._pump(0, encoder, writer)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._parts)):
                    group.create_task(self._pump(index, encoder, writer))
        except* (RequestError, EngineError) as errors:
            raise errors.exceptions[0] from errors

    async def _pump(self, index: int, encoder: Encoder, writer: wire.StreamWriter | None) -> None:
        part = self._parts[index]
        async with contextlib.aclosing(self._engine.sample(part.request, stream=self._parsed.stream)) as events:
            async for event in events:
                if part.first_at is None:
                    part.first_at = time.time()
                part.answer.add(event)
                if writer is not None:
                    await writer.write(encoder.feed(index, event))
        if not part.answer.finished:
            raise EngineError("The engine's answer ended before it was finished.")

    @property
    def _complete(self) -> bool:
        return all(part.answer.finished for part in self._parts)

    async def _settle(self, status: CallStatus, http_status: int, error: str | None) -> None:
        """Commit, once; a cancellation in the meantime does not cut it short."""
        if self._settled is None:
            self._settled = asyncio.create_task(self._commit(status, http_status, error))
        await asyncio.shield(self._settled)

    async def _fail(
        self,
        error: RequestError | EngineError,
        encoder: Encoder,
        writer: wire.StreamWriter | None,
        send: wire.Send,
    ) -> None:
        await self._settle("upstream_error", error.status, str(error))
        await self._tell(error, encoder, writer, send)

    async def _tell(
        self, error: RequestError | EngineError, encoder: Encoder, writer: wire.StreamWriter | None, send: wire.Send
    ) -> None:
        message = str(error)
        if writer is not None:
            writer.close()
            if writer.started:
                await writer.finish(encoder.fail(message, error.status))
                return
        if isinstance(error, EngineError):
            error = RequestError(message, status=error.status, code="engine_error")
        # Clients such as Codex give up at once on a 429 that does not say when to come back.
        retry = [(b"retry-after", b"1")] if error.status in (429, 503) else []
        await wire.respond(send, error.status, self._dialect.error(error), [*self._headers, *retry])

    async def _commit(self, status: CallStatus, http_status: int, error: str | None) -> None:
        ended = time.time()
        version = await self._engine.weight_version()
        for part in self._parts:
            record = self._record(part, status, http_status, error, ended, version)
            self._count(record)
            waited = time.perf_counter()
            try:
                await asyncio.wait_for(self._store.commit_call(record), _COMMIT_PATIENCE)
            except Exception:
                self._session.lost += 1
                self._metrics.lost.inc()
                log.exception("call %s was answered but could not be recorded", part.call_id)
            else:
                for observer in self._observers:
                    observer(record)
            self._metrics.commit.observe(time.perf_counter() - waited)
            if status == "ok":
                for state in part.answer.choices.values():
                    self._session.history.answered(part.place, assistant_message(state), part.call_id)

    def _count(self, record: CallRecord) -> None:
        metrics = self._metrics
        metrics.calls.labels(record.dialect, record.status).inc()
        metrics.prompt_tokens.inc(0 if record.prompt_ids is None else len(record.prompt_ids))
        metrics.cached_tokens.inc(record.cached_tokens or 0)
        metrics.completion_tokens.inc(sum(len(choice.token_ids) for choice in record.choices))
        if record.first_token_at is not None:
            metrics.first_token.observe(record.first_token_at - record.started_at)
        metrics.duration.observe(record.ended_at - record.started_at)

    def _record(
        self,
        part: _Part,
        status: CallStatus,
        http_status: int,
        error: str | None,
        ended: float,
        version: str | None,
    ) -> CallRecord:
        info = self._engine.info
        answer = part.answer
        choices = tuple(
            Choice(
                index=index,
                message=assistant_message(state),
                finish_reason=state.finish_reason,
                token_ids=np.asarray(state.token_ids, dtype=np.int32),
                logprobs=np.asarray(state.logprobs, dtype=np.float32),
            )
            for index, state in sorted(answer.choices.items())
        )
        if status == "ok" and (
            answer.prompt_ids is None
            or any(
                len(c.token_ids) == 0 or len(c.token_ids) != len(c.logprobs) or c.token_ids.min() < 0 for c in choices
            )
        ):
            status = "no_tokens"
        sampling = part.request.sampling
        return CallRecord(
            call_id=part.call_id,
            session_id=self._session.session_id,
            dialect=self._dialect.name,
            path=self._path,
            stream=self._parsed.stream,
            model=part.request.model,
            engine=info,
            weight_version=version,
            # Temperature 0 has no distribution to take a log-probability of: engines report the raw one.
            logprob_mode="raw" if sampling.temperature == 0 else info.logprob_mode,
            status=status,
            http_status=http_status,
            error=error,
            edge=part.place.edge,
            parent_call_id=part.place.parent_call_id,
            messages=part.messages,
            tools=self._parsed.tools,
            params=self._parsed.params,
            sampling={name: value for name in _SAMPLING if (value := getattr(sampling, name)) not in (None, ())},
            prompt_ids=None if answer.prompt_ids is None else np.asarray(answer.prompt_ids, dtype=np.int32),
            choices=choices,
            started_at=self._started,
            first_token_at=part.first_at,
            ended_at=ended,
            cached_tokens=answer.cached_tokens,
        )


def _said(request: EngineRequest, raw: tuple[bytes, ...]) -> tuple[Message, ...]:
    """What history compares: the messages, or the raw prompt as one."""
    if isinstance(request, ChatRequest):
        return request.messages
    return (Message("prompt", raw[0].decode()),)


__all__ = ["CallSink", "TurnPipeline"]
