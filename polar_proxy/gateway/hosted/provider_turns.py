"""Earlier answers of hosted models, in the form in which their provider requires them in later requests.

Anthropic and Google sign their reasoning. They refuse a tool result if the answer that called the tool comes back
without its signatures. Most agents cannot send signatures back: the API that they use has no field for signatures, or
the agents drop this field. So the signed answer is recorded with its call, and given to the engine with each later
request of the session that repeats the answer. It is found by the id of its first tool call; answers without tool calls
need no signatures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import orjson
from cachetools import LRUCache

from polar_proxy.engines.base import Engine
from polar_proxy.errors import StoreError
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.recording import PendingCall
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, EngineRequest, Message, ProviderTurn, ToolCall

log = logging.getLogger(__name__)

_TurnKey = tuple[str, str]
"""Key of a signed answer: (session id, id of the answer's first tool call)."""


class ProviderTurns:
    def __init__(self, store: Store, monitor: StoreMonitor, size: int) -> None:
        """`size`: bytes of memory for signed answers. Answers that do not fit are read from the store."""
        self._store = store
        self._monitor = monitor
        self._turns: LRUCache[_TurnKey, ProviderTurn] = LRUCache(size, lambda turn: len(orjson.dumps(turn)))

    def remember(self, session_id: str, calls: Iterable[PendingCall]) -> None:
        for call in calls:
            if call.shown is not None:
                continue  # a hook changed what the provider signed
            for _, choice in call.answer.in_order:
                self._add(session_id, choice.tool_calls, choice.provider_turn)

    async def attach(self, session_id: str, request: EngineRequest, engine: Engine) -> EngineRequest:
        """Return the request with the signed answers added to the earlier assistant messages that call tools.

        A message gets no signed answer if the engine needs no signatures, or if none was recorded for the message.
        """
        if "signed_answers" not in engine.info.capabilities or not isinstance(request, ChatRequest):
            return request
        answers = [message for message in request.messages if message.role == "assistant" and message.tool_calls]
        if any(self._find(session_id, message) is None for message in answers):
            await self._load(session_id)
        messages = [replace(message, provider_turn=self._find(session_id, message)) for message in request.messages]
        return replace(request, messages=tuple(messages)) if answers else request

    async def _load(self, session_id: str) -> None:
        """Read the session's signed answers from the store.

        Signed answers are not in memory if another gateway or an earlier process recorded them, or if the cache dropped
        them.
        """
        try:
            calls = await self._monitor.run(partial(self._store.calls.with_provider_turns, session_id))
        except StoreError as error:  # the provider may refuse the request, and its error then reaches the agent
            log.warning("the signed answers of session %s cannot be read: %s", session_id, error)
            return
        for call in calls:
            if "answer" in (call.hooks or {}):
                continue
            for choice in call.choices:
                self._add(session_id, choice.message.tool_calls, choice.provider_turn)

    def _add(self, session_id: str, tool_calls: Sequence[ToolCall], turn: ProviderTurn | None) -> None:
        if turn is not None and tool_calls:
            with suppress(ValueError):  # larger than the whole cache: read from the store when it is needed
                self._turns[session_id, tool_calls[0].id] = turn

    def _find(self, session_id: str, message: Message) -> ProviderTurn | None:
        return self._turns.get((session_id, message.tool_calls[0].id)) if message.tool_calls else None
