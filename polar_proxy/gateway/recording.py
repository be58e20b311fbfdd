"""Recording: the calls of a request become call records and are committed, however they ended."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from polar_proxy.dialects.base import Answer, AnswerChoice, Dialect, ParsedRequest
from polar_proxy.engines.base import is_constrained
from polar_proxy.engines.one_call import OneCallLimit
from polar_proxy.errors import EngineError, RequestError, StoreError
from polar_proxy.fast_fields import reader_of
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.in_flight import InFlightCalls
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.routing import EngineChoice
from polar_proxy.prices import PriceTable
from polar_proxy.provider_calls import ProviderRequest
from polar_proxy.sessions.budget import Reservation
from polar_proxy.sessions.continuation import PromptPlan
from polar_proxy.sessions.identity import ClientMetadata
from polar_proxy.sessions.lineage import Lineage
from polar_proxy.sessions.registry import SessionRegistry
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from polar_proxy.store.database import StoreUncertainError
from polar_proxy.types import (
    ANSWERED,
    SAMPLING_FIELDS,
    CallRecord,
    CallStatus,
    Choice,
    ConversationTurn,
    EngineInfo,
    EngineRequest,
    Json,
    TokenIds,
)

log = logging.getLogger(__name__)

_VERSION_SECONDS = 10.0
"""How long to wait for the policy version after an answer."""
_LOGGED_ENDINGS: Mapping[CallStatus, tuple[int, str]] = {
    "ok": (logging.DEBUG, "was answered"),
    "no_tokens": (logging.DEBUG, "was answered without token ids"),
    "budget": (logging.INFO, "was answered by Polar, because the session's budget is spent,"),
    "client_gone": (logging.INFO, "was broken off"),
    "upstream_error": (logging.WARNING, "failed"),
}
_read_sampling = reader_of(SAMPLING_FIELDS)
CallObserver = Callable[[CallRecord], None]
"""A function that receives each call after its commit. It runs in the event loop, so it must be quick."""


class ContinuedConversation(NamedTuple):
    """The stored conversation that a request continues, and the number of its items. The items come first in the
    request's input."""

    conversation_id: str
    items: int


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A parsed HTTP request. A request with several prompts becomes several calls, which share this object."""

    dialect: Dialect
    session: SessionState
    path: str
    """The path without the key of `/s/{key}`, because keys are not recorded."""
    parsed: ParsedRequest
    metadata: ClientMetadata
    betas: tuple[str, ...]
    """See `ClientOptions.betas`."""
    engine: EngineChoice
    started_at: float
    """Seconds since the epoch."""
    large: bool = False
    """True if the request is large (see `ChatRequest.large`)."""
    conversation: ContinuedConversation | None = None
    raw: ProviderRequest | None = None
    """The unparsed request, if it is passed on to its provider."""
    refers: bool = False
    """True if the request refers to items of earlier answers by id. The answer to this request is then kept in memory,
    because the session's next request may refer to items of this answer."""


@dataclass(slots=True)
class PendingCall:
    """A call that is being answered: one engine request of an HTTP request, and the answer so far."""

    call_id: str
    request: EngineRequest
    lineage: Lineage
    messages: tuple[bytes, ...]
    engine: EngineChoice
    plan: PromptPlan = field(default_factory=PromptPlan)
    version: str | None = None
    """The policy version when sampling began."""
    answer: Answer = field(default_factory=Answer)
    limit: OneCallLimit | None = None
    """The filter that ends the answer after its first tool call; None if the request allows several tool calls."""
    first_token_at: float | None = None
    not_carried: tuple[str, ...] = ()
    """Fields of the request that the engine's provider does not support (`Engine.not_carried`)."""
    request_changes: Json = field(default_factory=dict)
    """The parts of the request that hooks changed (`hooks.request_changes`)."""
    shown: Answer | None = None
    """The answer as the agent gets it, if a hook changed it."""
    final_answer: str | None = None
    """Answer by Polar instead of the engine, if the session's budget is spent."""

    @property
    def agents_answer(self) -> Answer:
        """The answer as the agent gets it."""
        return self.answer if self.shown is None else self.shown

    @property
    def hook_changes(self) -> Json | None:
        """Changes by hooks, as the call's record stores them; None without changes."""
        changes: Json = {"request": self.request_changes} if self.request_changes else {}
        if self.shown is not None:
            changes["answer"] = [choice.message.to_openai() for _, choice in self.answer.in_order]
        return changes or None


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How the calls of a request ended."""

    status: CallStatus
    http_status: int
    error: str | None = None
    """The text of the error, for the record."""
    error_to_send: RequestError | EngineError | None = None
    """The error for the agent; None if the agent gets the answer, or has disconnected."""

    @property
    def engine_failed(self) -> bool:
        return self.status == "upstream_error" and self.http_status >= 500

    @classmethod
    def failed(cls, error: RequestError | EngineError) -> CallOutcome:
        # Without the traceback: its frames often refer to the error, a cycle that would keep the whole request.
        return cls("upstream_error", error.status, str(error), error.with_traceback(None))


class CallRecorder:
    def __init__(
        self,
        store: Store,
        monitor: StoreMonitor,
        sessions: SessionRegistry,
        metrics: GatewayMetrics,
        in_flight: InFlightCalls | None,
        prices: PriceTable,
    ) -> None:
        self._store = store
        self._monitor = monitor
        self._sessions = sessions
        self._metrics = metrics
        self._in_flight = in_flight
        self._prices = prices
        self.observers: list[CallObserver] = []

    async def commit(
        self,
        request: RequestContext,
        calls: Sequence[PendingCall],
        outcome: CallOutcome,
        reservation: Reservation,
        *,
        reply_started: bool,
    ) -> StoreError | None:
        """Commit the calls with their answers so far. Return why a call could not be recorded; None if all were.

        `reservation`: the reservation of these calls in the session's budget. Each call is counted there, even if it
        cannot be recorded.

        A call that cannot be recorded counts as lost, so that its session is not trained on. It does not count as lost
        if the request can be refused as if nothing had been sampled. This requires that the request has only one call,
        the session requires records, the agent has no part of the answer yet (`reply_started` is False), and the commit
        failed for certain.
        """
        failure: StoreError | None = None
        ended_at = time.time()
        session, version = request.session, await self._weight_version(calls[0])
        # A request with several calls is refused as a whole, although some of them are recorded.
        refusable = session.record_required and not reply_started and len(calls) == 1
        for call in calls:
            answers = [choice.message for _, choice in call.agents_answer.in_order]
            fingerprint = session.record_answer(call.lineage, answers, outcome.status, now=ended_at)
            version_range = _weight_version_of(call.answer, call.version, version or call.version)
            call.answer.ended_at = call.agents_answer.ended_at = ended_at
            price = self._prices.price(call.answer.usage)
            record = _make_record(request, call, outcome, ended_at, version_range, fingerprint, price)
            session.remember_tokens(record, call.plan.config, call.lineage.base)
            self._metrics.count(record)
            _log_call(record)
            started = time.perf_counter()
            try:
                await self._monitor.run(partial(self._store_call, session, record, large=request.large))
            except StoreError as error:
                failure = error
                session.forget(record)
                lost = not refusable or isinstance(error, StoreUncertainError)
                self._count_unrecorded(session, record, error, lost=lost)
            else:
                session.recorded += 1
                session.refusal = None
                if request.refers:
                    session.remember_referable(record)
                for observer in self.observers:
                    observer(record)
            reservation.count(call.answer.prompt_tokens, call.answer.completion_tokens, ended_at, record.price_usd)
            self._metrics.commit.observe(time.perf_counter() - started)
            if self._in_flight is not None:
                self._in_flight.finished([call.call_id])
        return failure

    def _store_call(self, session: SessionState, record: CallRecord, *, large: bool) -> Awaitable[None]:
        if session.unstored_key is None:
            return self._store.calls.commit(record, large=large)
        return self._store_with_session(session, record, large=large)

    async def _store_with_session(self, session: SessionState, record: CallRecord, *, large: bool) -> None:
        """Store a call of a session that was opened while the store failed."""
        await self._sessions.store_late(session)
        await self._store.calls.commit(record, large=large)

    def _count_unrecorded(self, session: SessionState, record: CallRecord, error: StoreError, *, lost: bool) -> None:
        if session.record_required:
            session.refusal = str(error)
        if lost:
            session.lost += 1
            self._metrics.lost.inc()
            self._sessions.mark_incomplete(session)
            self._monitor.watch()
        if self._monitor.problem is None:  # otherwise the log has one line about the outage
            log.error("call %s could not be recorded: %s", record.call_id, error)

    async def _weight_version(self, call: PendingCall) -> str | None:
        """Return the policy version. If the engine does not report it, return None, so that the call can still be
        recorded."""
        try:
            async with asyncio.timeout(_VERSION_SECONDS):
                return await call.engine.served.engine.weight_version()
        except (RequestError, EngineError, TimeoutError) as error:
            log.warning("the policy version of call %s is unknown: %s", call.call_id, str(error) or "no answer")
            return None


def _log_call(record: CallRecord) -> None:
    """Log how a call ended. The error is left out, because it may quote messages."""
    level, ending = _LOGGED_ENDINGS[record.status]
    if not log.isEnabledFor(level):
        return
    seconds = record.ended_at - record.started_at
    line = f"call {record.call_id} of session {record.session_id} {ending} after {seconds:.1f} s"
    if level == logging.WARNING:
        line += f" with HTTP status {record.http_status}; `polar show {record.call_id}` shows the error"
    details = {
        "call_id": record.call_id,
        "session_id": record.session_id,
        "dialect": record.dialect,
        "status": record.status,
        "http_status": record.http_status,
        "seconds": round(seconds, 3),
    }
    log.log(level, line, extra={"fields": details})


def _make_record(
    request: RequestContext,
    call: PendingCall,
    outcome: CallOutcome,
    ended_at: float,
    weight_version: str | None,
    fingerprint: Json,
    price_usd: float | None,
) -> CallRecord:
    """Return the record of a call.

    Status `ok` becomes `budget` if Polar gave the answer itself. It becomes `no_tokens` if the engine's answer lacks
    token ids or log-probabilities.
    """
    answer, lineage, plan = call.answer, call.lineage, call.plan
    engine = call.engine.served.engine.info
    choices = _choices_of(call, weight_version)
    status = outcome.status
    if status == "ok" and (answer.prompt_ids is None or not all(map(_has_tokens, choices))):
        status = "no_tokens" if call.final_answer is None else "budget"
    return CallRecord(
        call_id=call.call_id,
        session_id=request.session.session_id,
        dialect=request.dialect.name,
        path=request.path,
        stream=request.parsed.stream,
        model=call.request.model,
        engine=engine if call.final_answer is None else None,
        weight_version=weight_version if call.final_answer is None else None,
        # At temperature 0 there is no distribution to sample from, so engines report the raw log-probability.
        logprob_mode="raw" if call.request.sampling.temperature == 0 else engine.logprob_mode,
        status=status,
        http_status=outcome.http_status,
        error=outcome.error,
        edge=lineage.edge,
        parent_call_id=lineage.parent_call_id,
        messages=call.messages,
        tools=request.parsed.tools,
        params=request.parsed.params,
        sampling=recorded_sampling(call.request, engine) | _sampling_marks(request, call, engine),
        prompt_ids=None if answer.prompt_ids is None else _to_token_ids(answer.prompt_ids),
        choices=choices,
        started_at=request.started_at,
        first_token_at=call.first_token_at,
        ended_at=ended_at,
        cached_tokens=answer.cached_tokens,
        usage=answer.usage,
        price_usd=price_usd,
        response_id=answer.response_id,
        response_items=answer.response_items,
        provider_conversation=request.parsed.provider_conversation if call.final_answer is None else None,
        rule=lineage.rule,
        ambiguous=lineage.ambiguous,
        thread=lineage.thread,
        fingerprint=fingerprint,
        prompt_mode=plan.mode,
        prompt_reason=plan.reason,
        base_call_id=None if lineage.base is None else lineage.base.call_id,
        base_choice=None if lineage.base is None else lineage.base.choice,
        engine_name=call.engine.served.name,
        route=call.engine.route,
        hooks=call.hook_changes,
        conversation=_conversation_turn(request, call) if status in ANSWERED else None,
    )


def _choices_of(call: PendingCall, weight_version: str | None) -> tuple[Choice, ...]:
    return tuple(
        Choice(
            index=index,
            message=call.agents_answer.choices[index].message,
            finish_reason=choice.finish_reason,
            token_ids=_to_token_ids(choice.token_ids),
            logprobs=np.array(choice.logprobs, dtype=np.float32),
            versions=_version_runs(choice, weight_version),
            reasoning_tokens=choice.reasoning_tokens,
            provider_turn=choice.provider_turn,
        )
        for index, choice in call.answer.in_order
    )


def _sampling_marks(request: RequestContext, call: PendingCall, engine: EngineInfo) -> Json:
    """Return facts about the call that are recorded among the sampling parameters, such as `not_carried`."""
    marks: Json = {}
    if call.plan.past_reasoning is not None:  # the setting had an effect on the prompt
        marks["past_reasoning"] = call.plan.past_reasoning
    if call.plan.constrained:
        marks["constrained"] = True
    if call.limit is not None and call.limit.hides_tokens:
        marks["hidden_call"] = True
    if names := request.parsed.provider_tools:
        action = "allowed" if "provider_tools" in engine.capabilities else "removed"
        marks["provider_tools"] = {"action": action, "names": list(names)}
    if request.parsed.missing_history:
        marks["missing_history"] = True
    if call.not_carried:
        marks["not_carried"] = list(call.not_carried)
    return marks


def _conversation_turn(request: RequestContext, call: PendingCall) -> ConversationTurn | None:
    """Return what an answered call adds to the conversation that its request continues."""
    if request.conversation is None:
        return None
    conversation_id, known = request.conversation
    items = request.dialect.turn_items(request.parsed, known, call.call_id, call.agents_answer)
    return ConversationTurn(conversation_id, items)


def _weight_version_of(answer: Answer, before: str | None, after: str | None) -> str | None:
    """Return the policy version of an answer: the last version of the first choice that has versions of its tokens.

    If no choice has them, compare the versions `before` and `after` sampling. If both are equal, return this version.
    If they differ, return "A..B": the weights changed at an unknown token of the answer. Return None if the version
    before sampling is unknown, for example because the call failed before it was sampled.
    """
    reported = [choice.versions[-1][1] for _, choice in answer.in_order if choice.versions]
    if reported:
        return reported[0]
    return before if before is None or before == after else f"{before}..{after}"


def _version_runs(choice: AnswerChoice, weight_version: str | None) -> tuple[tuple[int, str], ...]:
    """Return the stretches of tokens that one policy version sampled, each as (first position, policy version).

    The result is empty if the engine reported no version with the tokens, or if `weight_version` sampled all of them.
    """
    versions = [version for _, version in choice.versions]
    return () if versions in ([], [weight_version]) else tuple(choice.versions)


def _to_token_ids(ids: Sequence[int]) -> TokenIds:
    """Return token ids as a read-only int32 array [n]. Raises ValueError for an id beyond 32 bits."""
    try:  # three times as fast as np.asarray
        return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), dtype=np.int32)
    except struct.error as error:
        raise ValueError(f"the engine sent an invalid token id: {error}") from error


def _has_tokens(choice: Choice) -> bool:
    ids = choice.token_ids
    return 0 < ids.size == choice.logprobs.size and int(ids.min()) >= 0


def recorded_sampling(request: EngineRequest, engine: EngineInfo) -> Json:
    """Return the parameters that were sent to the engine, for the record.

    `constrained` is added if the request demanded a tool call or a certain format of the answer. It is True if the
    engine enforced this by a grammar, else False.
    """
    sent = {name: value for name, value in _read_sampling(request.sampling).items() if value not in (None, ())}
    constrained = is_constrained(request, engine)
    if constrained is not None:
        sent["constrained"] = constrained
    return sent
