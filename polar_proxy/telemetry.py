"""OpenTelemetry traces over OTLP/HTTP, by the semantic conventions for generative AI.

    rollout roll_...                       one trace per rollout
      preparing | ready | running | scoring    a span for each stage of each attempt (`invoke_agent` for `running`)
        chat MODEL                             a span for each call, inside of `running`

A session without a rollout is a trace of its calls. Trace and span ids are hashes of Polar's ids, so that the processes
of gateways and workers add to the same trace independently. The span of a call is sent when the call is recorded, the
spans of a rollout when it has ended.

Promises: without `telemetry.endpoint` nothing is imported and nothing runs. Spans are made and sent in a thread. The
queue is bounded: when it is full, spans are dropped and counted. Messages are sent only with `telemetry.content`.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from polar_proxy import __version__
from polar_proxy.config import TelemetrySettings
from polar_proxy.errors import RequestError, StoreError, UsageError
from polar_proxy.message_text import content_text
from polar_proxy.store import RewardRow, RolloutRow, Store
from polar_proxy.store.repositories.rollouts import StageRow
from polar_proxy.types import FAILED, CallRecord, Json, Message

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

log = logging.getLogger(__name__)

_BATCH = 256
_PAUSE_SECONDS = 1.0
"""Seconds that a span waits for further spans, so that all are sent in one batch."""
_END_SECONDS = 10.0
_NEWEST_MESSAGES, _LONGEST_TEXT = 50, 4000
"""Limits on the content that a span holds: the newest messages of a call, and the first characters of each text."""
_REQUEST_ATTRIBUTES = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """A rollout that has ended, with the data for its spans."""

    row: RolloutRow
    stages: Sequence[StageRow]
    rewards: Sequence[RewardRow]
    session_ids: Sequence[str]
    """The sessions of its attempts, oldest first."""


@contextlib.asynccontextmanager
async def traced(
    settings: TelemetrySettings,
    store: Store,
    observe: Callable[[Callable[[CallRecord], None]], None],
    rollout_of: Callable[[str], str | None],
) -> AsyncIterator[Callable[[str], None]]:
    """Send traces until the block ends. Yield a function. Call this function with a rollout's id after each attempt.

    `observe` registers a function that is called with each recorded call. `rollout_of` returns the rollout of a
    session. Raises UsageError if the packages are not installed.
    """
    if settings.endpoint is None:
        yield lambda rollout_id: None
        return
    sender = SpanSender(settings)
    reading: set[asyncio.Task[None]] = set()

    def send_call(record: CallRecord) -> None:
        sender.put((record, rollout_of(record.session_id)))

    def send_rollout(rollout_id: str) -> None:
        task = asyncio.create_task(_read_rollout(store, rollout_id, sender))
        reading.add(task)
        task.add_done_callback(reading.discard)

    observe(send_call)
    sender.start()
    try:
        yield send_rollout
    finally:
        if reading:
            await asyncio.wait(reading, timeout=_END_SECONDS)
        await asyncio.to_thread(sender.stop)


async def _read_rollout(store: Store, rollout_id: str, sender: SpanSender) -> None:
    """Read a rollout and queue its spans, if the rollout has ended. (It has not ended if it will be tried again.)"""
    try:
        row = await store.rollouts.get(rollout_id)
        if row is None or not row.final:
            return
        stages = await store.rollouts.stages(rollout_id)
        rewards = await store.rewards.of_rollout(rollout_id)
        sessions = await store.sessions.ids_of_rollout(rollout_id)
    except StoreError as error:
        log.warning("rollout %s has no trace: %s", rollout_id, error)
        return
    sender.put(EndedRollout(row, stages, rewards, sessions))


class SpanSender:
    """Makes the spans of calls and rollouts, and sends them, in a thread of its own."""

    def __init__(self, settings: TelemetrySettings) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ModuleNotFoundError as error:
            raise UsageError("telemetry.endpoint needs OpenTelemetry: pip install 'polar-proxy[otel]'.") from error
        self._exporter = OTLPSpanExporter(endpoint=settings.endpoint, headers=settings.headers, timeout=_END_SECONDS)
        self._spans = SpanFactory(
            Resource.create({"service.name": settings.service_name, "service.version": __version__}), settings.content
        )
        self._queue: queue.Queue[Any] = queue.Queue(settings.queue)
        self._thread = threading.Thread(target=self._run, name="polar-telemetry", daemon=True)
        self._ending = threading.Event()
        self.dropped = 0
        """Number of calls and rollouts that were not sent because the queue was full."""

    def start(self) -> None:
        self._thread.start()

    def put(self, item: tuple[CallRecord, str | None] | EndedRollout) -> None:
        """Queue a call or a rollout. Never waits."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if self.dropped == 0:
                log.warning("spans are dropped: the OTLP endpoint is slower than the calls (telemetry.queue)")
            self.dropped += 1

    def stop(self) -> None:
        """Send what is queued, for at most ten seconds."""
        self._ending.set()
        self._thread.join(_END_SECONDS)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not (self._ending.is_set() and self._queue.empty()):
            self._ending.wait(_PAUSE_SECONDS)
            while batch := self._batch():
                self._exporter.export(batch)

    def _batch(self) -> list[ReadableSpan]:
        spans: list[ReadableSpan] = []
        while len(spans) < _BATCH:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            try:
                spans += (
                    self._spans.of_rollout(item) if isinstance(item, EndedRollout) else [self._spans.of_call(*item)]
                )
            except Exception:
                log.exception("a span cannot be made")
        return spans


class SpanFactory:
    """Turns calls and rollouts into spans."""

    def __init__(self, resource: Any, content: bool) -> None:
        self._resource = resource
        self._content = content

    def of_call(self, record: CallRecord, rollout_id: str | None) -> ReadableSpan:
        """Return the span of a call: a child of its session's `running` stage, or a root if the session has no
        rollout."""
        trace = rollout_id or record.session_id
        parent = None if rollout_id is None else _context(trace, record.session_id)
        return self._span(
            f"chat {record.model}",
            _context(trace, record.call_id),
            parent,
            (record.started_at, record.ended_at),
            self._call_attributes(record, rollout_id),
            error=record.status if record.status in FAILED else None,
            client=True,
        )

    def of_rollout(self, ended: EndedRollout) -> list[ReadableSpan]:
        """Return the spans of a rollout's stages, and then its own span."""
        attempts = sorted({stage.attempt for stage in ended.stages})
        session_of = dict(zip(attempts, ended.session_ids, strict=False))
        spans = [self._stage_span(ended.row, stage, session_of.get(stage.attempt)) for stage in ended.stages]
        return [*spans, self._rollout_span(ended)]

    def _stage_span(self, row: RolloutRow, stage: StageRow, session_id: str | None) -> ReadableSpan:
        name, identity = stage.stage, f"{stage.attempt} {stage.stage}"
        attributes: Json = {**_rollout_ids(row), "polar.stage": stage.stage, "polar.attempt": stage.attempt}
        if stage.stage == "running" and session_id is not None:
            name, identity = f"invoke_agent {_agent_name(row)}", session_id  # the parent of the session's calls
            attributes |= {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": _agent_name(row)}
            attributes |= {"gen_ai.conversation.id": session_id, "gen_ai.provider.name": "polar"}
        return self._span(
            name,
            _context(row.rollout_id, identity),
            _context(row.rollout_id, row.rollout_id),
            (stage.started_at, stage.ended_at or row.ended_at or stage.started_at),
            attributes,
            error=None if stage.outcome in (None, "ok") else stage.cause or stage.outcome,
        )

    def _rollout_span(self, ended: EndedRollout) -> ReadableSpan:
        row = ended.row
        attributes: Json = {
            **_rollout_ids(row),
            "polar.status": row.status,
            "polar.harness": row.harness,
            "polar.sandbox": row.sandbox,
            "gen_ai.agent.name": _agent_name(row),
            "gen_ai.request.model": row.model,
            "gen_ai.usage.input_tokens": row.prompt_tokens,
            "gen_ai.usage.output_tokens": row.completion_tokens,
            "polar.calls": row.calls,
            **({} if row.job_id is None else {"polar.job.id": row.job_id}),
            **({} if row.reward is None else {"polar.reward": row.reward}),
        }
        return self._span(
            f"rollout {_agent_name(row)}",
            _context(row.rollout_id, row.rollout_id),
            None,
            (row.created_at, row.ended_at or time.time()),
            attributes,
            error=None if row.status == "done" else row.cause or row.status,
            events=_evaluations(ended),
        )

    def _call_attributes(self, record: CallRecord, rollout_id: str | None) -> Json:
        found: Json = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "polar" if record.engine is None else record.engine.engine,
            "gen_ai.request.model": record.model,
            "gen_ai.response.id": record.call_id,
            "gen_ai.conversation.id": record.session_id,
            "gen_ai.usage.output_tokens": sum(choice.token_ids.size for choice in record.choices),
            "gen_ai.response.finish_reasons": [choice.finish_reason or "none" for choice in record.choices],
            "http.response.status_code": record.http_status,
            "polar.dialect": record.dialect,
            "polar.edge": record.edge,
            "polar.stream": record.stream,
        }
        optional: Json = {
            "gen_ai.response.model": None if record.engine is None else record.engine.model,
            "gen_ai.usage.input_tokens": None if record.prompt_ids is None else record.prompt_ids.size,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.request.choice.count": len(record.choices) if len(record.choices) > 1 else None,
            "polar.first_token_seconds": record.first_token_at and record.first_token_at - record.started_at,
            "polar.weight_version": record.weight_version,
            "polar.rollout.id": rollout_id,
            **{name: record.sampling.get(key) for key, name in _REQUEST_ATTRIBUTES.items()},
        }
        found |= {name: value for name, value in optional.items() if value is not None}
        return found | _content(record) if self._content else found

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Json,
        error: str | None = None,
        *,
        client: bool = False,
        events: Sequence[Any] = (),
    ) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.status import Status, StatusCode

        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes if error is None else {**attributes, "error.type": error},
            events=events,
            kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            start_time=_nanoseconds(times[0]),
            end_time=_nanoseconds(max(times)),
            instrumentation_scope=InstrumentationScope("polar_proxy", __version__),
        )


def _agent_name(row: RolloutRow) -> str:
    return row.harness.partition("@")[0]


def _rollout_ids(row: RolloutRow) -> Json:
    return {"polar.rollout.id": row.rollout_id, "polar.task.id": row.task_id, "polar.group.id": row.group_id}


def _evaluations(ended: EndedRollout) -> list[Any]:
    """Return an event `gen_ai.evaluation.result` for each reward that has a value."""
    from opentelemetry.sdk.trace import Event

    return [
        Event(
            "gen_ai.evaluation.result",
            {"gen_ai.evaluation.name": reward.source, "gen_ai.evaluation.score.value": reward.value},
            _nanoseconds(reward.created_at),
        )
        for reward in ended.rewards
        if reward.value is not None
    ]


def _content(record: CallRecord) -> Json:
    """Return the messages of a call in the form of the semantic conventions."""
    from polar_proxy.dialects import parse_recorded

    try:
        (request,) = parse_recorded(record).requests
    except RequestError:
        return {}
    found: Json = {"gen_ai.output.messages": _messages_json([choice.message for choice in record.choices])}
    if messages := getattr(request, "messages", None):
        found["gen_ai.input.messages"] = _messages_json(messages)
    return found


def _messages_json(messages: Sequence[Message]) -> str:
    shown = [{"role": message.role, "parts": _parts(message)} for message in messages[-_NEWEST_MESSAGES:]]
    return json.dumps(shown, ensure_ascii=False)


def _parts(message: Message) -> list[Json]:
    content = (
        message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content or ""}]
    )
    texts = [content_text([part])[:_LONGEST_TEXT] for part in content]
    if message.tool_call_id is not None:
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": "\n".join(texts)}]
    parts: list[Json] = [{"type": "text", "content": text} for text in texts if text]
    if message.reasoning:
        parts.insert(0, {"type": "reasoning", "content": message.reasoning[:_LONGEST_TEXT]})
    return parts + [
        {"type": "tool_call", "id": one.id, "name": one.name, "arguments": one.arguments[:_LONGEST_TEXT]}
        for one in message.tool_calls
    ]


def _context(trace: str, span: str) -> SpanContext:
    """Return the context of a span. Its two ids are a hash of the name `trace`, and a hash of both names."""
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        trace_id=int.from_bytes(blake2b(trace.encode(), digest_size=16).digest()),
        span_id=int.from_bytes(blake2b(f"{trace} {span}".encode(), digest_size=8).digest()),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
