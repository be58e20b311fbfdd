"""The sampling of a request's calls: parameters, hooks, prompt, engine, and each event on its way to the agent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from polar_proxy.errors import EngineError, RequestError
from polar_proxy.fast_replace import replace
from polar_proxy.gateway.engine_timeouts import EngineWait
from polar_proxy.gateway.hooks import HookedCall, Hooks, events_of, request_changes
from polar_proxy.gateway.hosted.provider_turns import ProviderTurns
from polar_proxy.gateway.metrics import GatewayMetrics
from polar_proxy.gateway.recording import PendingCall, RequestContext
from polar_proxy.gateway.reply import Reply
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
