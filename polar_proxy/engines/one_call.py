"""Limit of one tool call for each answer: sampling ends where a second tool call begins.

The limit holds for requests with `parallel_tool_calls = false`. It holds for every request if the chat template refuses
answers with two calls, because the next prompt would fail.

The agent gets one call, so a second call would have no result. If the second call were recorded, the next prompt would
either lack its tokens or have a call without a result. So the answer ends with its first call: tokens sampled after
this call are dropped, and no grammar is needed. An answer that makes one call keeps its own end of turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, SampleEvent


def wants_one_call(request: EngineRequest, info: EngineInfo) -> bool:
    if not isinstance(request, ChatRequest) or not request.tools:
        return False
    return request.parallel_tool_calls is False or "single_calls" in info.capabilities


@dataclass(slots=True)
class _ChoiceState:
    called: bool = False
    """True once the first tool call has begun."""
    ended: bool = False
    held: list[SampleEvent] = field(default_factory=list)
    """Events after the first tool call that carry tokens, but no text, reasoning or piece of a tool call. They are held
    back, because these tokens may begin a second tool call."""


class OneCallLimit:
    """The limit of one tool call for each answer to one request. `choices`: the number of answers."""

    def __init__(self, choices: int) -> None:
        self._left = choices
        self._cut = False
        self._states: dict[int, _ChoiceState] = {}
        self.hides_tokens = False
        """True if one event had both the end of the first call and the beginning of the second, so that tokens of the
        second call are recorded. Such an answer cannot be trained or continued."""

    async def apply(self, events: AsyncGenerator[SampleEvent, None]) -> AsyncGenerator[SampleEvent, None]:
        """Yield the events of each choice, without those after its first tool call. If a choice was cut off, close
        `events` as soon as all choices have ended."""
        async with aclosing(events):
            async for event in events:
                for shown in self._take(event):
                    yield shown
                if self._cut and not self._left:
                    return

    def _take(self, event: SampleEvent) -> list[SampleEvent]:
        state = self._states.setdefault(event.index, _ChoiceState())
        if state.ended:  # only a provider's count of the tokens may still come
            return [] if event.usage is None else [SampleEvent(event.index, usage=event.usage)]
        first = tuple(delta for delta in event.tool_calls if delta.index == 0)
        if len(first) < len(event.tool_calls):
            self._end(state)
            self._cut = True
            if not (first or event.text or event.reasoning):
                return [SampleEvent(event.index, finish_reason="tool_calls", weight_version=event.weight_version)]
            self.hides_tokens = True
            return [*state.held, replace(event, tool_calls=first, finish_reason="tool_calls")]
        state.called |= bool(first)
        if event.finish_reason is not None:
            self._end(state)
        elif state.called and not (first or event.text or event.reasoning):
            state.held.append(event)
            return []
        shown, state.held = [*state.held, event], []
        return shown

    def _end(self, state: _ChoiceState) -> None:
        state.ended = True
        self._left -= 1
