"""One call as it is committed: what was asked, what was sampled, and how it ended. Pure data."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from polar_proxy.dialects import Answer, ParsedRequest
from polar_proxy.engines.base import is_constrained
from polar_proxy.sessions import Lineage
from polar_proxy.sessions.prompts import PromptPlan
from polar_proxy.types import CallRecord, CallStatus, Choice, EngineInfo, EngineRequest, Json, Sampling, TokenIds

_SAMPLING = tuple(item.name for item in fields(Sampling))


@dataclass(slots=True)
class PendingCall:
    """One engine request of an HTTP request, and what came of it."""

    call_id: str
    request: EngineRequest
    place: Lineage
    messages: tuple[bytes, ...]
    plan: PromptPlan = field(default_factory=PromptPlan)
    version: str | None = None
    """Of the policy, when it was asked."""
    answer: Answer = field(default_factory=Answer)
    first_at: float | None = None


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What all calls of one HTTP request have in common."""

    session_id: str
    dialect: str
    path: str
    parsed: ParsedRequest
    started_at: float


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """How an HTTP request ended."""

    status: CallStatus
    http_status: int
    error: str | None
    ended_at: float


def make_record(
    asked: RequestContext,
    part: PendingCall,
    ending: CallOutcome,
    info: EngineInfo,
    weight_version: str | None,
    fingerprint: Json,
) -> CallRecord:
    """The call for the store. An answer without ids and log-probabilities for all it says is `no_tokens`."""
    answer = part.answer
    choices = tuple(
        Choice(
            index=index,
            message=state.message.to_openai(),
            finish_reason=state.finish_reason,
            token_ids=to_ids(state.token_ids),
            logprobs=np.array(state.logprobs, dtype=np.float32),
            versions=() if [run[1] for run in state.versions] in ([], [weight_version]) else tuple(state.versions),
        )
        for index, state in answer.in_order
    )
    status = ending.status
    if status == "ok" and (answer.prompt_ids is None or not all(map(_has_evidence, choices))):
        status = "no_tokens"
    sampling = part.request.sampling
    base = part.place.base
    return CallRecord(
        call_id=part.call_id,
        session_id=asked.session_id,
        dialect=asked.dialect,
        path=asked.path,
        stream=asked.parsed.stream,
        model=part.request.model,
        engine=info,
        weight_version=weight_version,
        # Temperature 0 has no distribution to take a log-probability of: engines report the raw one.
        logprob_mode="raw" if sampling.temperature == 0 else info.logprob_mode,
        status=status,
        http_status=ending.http_status,
        error=ending.error,
        edge=part.place.edge,
        parent_call_id=part.place.parent_call_id,
        messages=part.messages,
        tools=asked.parsed.tools,
        params=asked.parsed.params,
        sampling=sampling_sent(part.request, part.plan),
        prompt_ids=None if answer.prompt_ids is None else to_ids(answer.prompt_ids),
        choices=choices,
        started_at=asked.started_at,
        first_token_at=part.first_at,
        ended_at=ending.ended_at,
        cached_tokens=answer.cached_tokens,
        rule=part.place.rule,
        ambiguous=part.place.ambiguous,
        thread=part.place.thread,
        fingerprint=fingerprint,
        prompt_mode=part.plan.mode,
        prompt_reason=part.plan.reason,
        base_call_id=None if base is None else base.call_id,
        base_choice=None if base is None else base.choice,
    )


def version_of(answer: Answer, before: str | None, after: str | None) -> str | None:
    """The policy version of an answer: what the engine told with its tokens, else what it was before and after.

    "A..B": the weights changed while it was sampled, and nobody knows at which token."""
    told = [state.versions[-1][1] for _, state in sorted(answer.choices.items()) if state.versions]
    if told:
        return told[0]
    return after if before == after else f"{before}..{after}"


def sampling_sent(request: EngineRequest, plan: PromptPlan = PromptPlan()) -> Json:
    """What was said to the engine, without what was left to it; `constrained` where a form of answer was asked for,
    `past_reasoning` where it decided about the prompt."""
    said = {name: value for name in _SAMPLING if (value := getattr(request.sampling, name)) not in (None, ())}
    constrained = is_constrained(request)
    if constrained is not None:
        said["constrained"] = constrained
    if plan.past_reasoning is not None:
        said["past_reasoning"] = plan.past_reasoning
    return said


def to_ids(ids: Sequence[int]) -> TokenIds:
    """Token ids as int32 [n], read-only. Raises ValueError for an id beyond 32 bits."""
    try:  # a third of the time that np.asarray takes
        return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), dtype=np.int32)
    except struct.error as error:
        raise ValueError(f"the engine sent a token id that is none: {error}") from error


def _has_evidence(choice: Choice) -> bool:
    ids = choice.token_ids
    return 0 < ids.size == choice.logprobs.size and int(ids.min()) >= 0
