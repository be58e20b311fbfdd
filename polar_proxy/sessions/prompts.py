"""Continuation, the half that asks: the exact prompt of a call, from its base's tokens and the engine's own rendering.

    base's prompt + base's answer (+ end of turn where it was cut) + suffix

`history/continuation.py` says what a suffix is and when it is believed. Here the base is found (in memory, else in the
store: after a restart, or when another gateway answered it) and the engine is asked to render.

Promise: `plan` never fails a call. Whatever stands against continuing, the engine renders the request as in `observe`
mode, and the reason is recorded with the call.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polar_proxy.bounded import Bounded
from polar_proxy.config import GatewaySettings
from polar_proxy.dialects import recorded_request
from polar_proxy.engines.base import CannotContinueError, Engine, ExactPrompt, is_constrained
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.sessions import Base, Lineage
from polar_proxy.sessions import continuation as rules
from polar_proxy.sessions.continuation import PastReasoning, PromptConfig, PromptReason, Suffix, TurnEnding
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, ChatRequest, Choice, EngineRequest, Json, PromptMode, TokenIds

log = logging.getLogger(__name__)

_KEPT_BYTES = 256 << 20
"""Of answered calls that are kept in memory to be continued; others are read from the store."""
_SHAPES = 4096
"""Of heads, and of suffixes: what is known of them is asked again when it was forgotten."""
_REASONING = 80
"""Characters of an answer's reasoning by which it is looked for in a rendering."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """How a call's prompt is made. The engine samples from `prompt` as it is; None: the engine renders."""

    prompt: ExactPrompt | None = None
    reason: PromptReason | None = None
    past_reasoning: PastReasoning | None = None
    """Which policy the prompt was made under; None where it plays no part."""
    frame: PromptConfig | None = None
    """What shaped the prompt beside its messages; None of a raw one."""

    @property
    def mode(self) -> PromptMode:
        return "render" if self.prompt is None else "continue"


@dataclass(frozen=True, slots=True)
class AnsweredTokens:
    """What is needed of a call to continue it."""

    ids: TokenIds
    """Prompt and answer, int32 [n]."""
    finish: str | None
    closed: bool
    """It ends in an end-of-turn token."""
    frame: PromptConfig
    thoughts: tuple[str, ...]
    """How the reasoning of this and of earlier answers begins."""


class PromptBuilder:
    """Plans the prompts of one gateway."""

    def __init__(self, engine: Engine, store: Store, settings: GatewaySettings) -> None:
        self._engine = engine
        self._store = store
        self._settings = settings
        self._answered = Bounded[tuple[str, int], AnsweredTokens](_KEPT_BYTES)
        self._heads = Bounded[Hashable, TurnEnding](_SHAPES)
        self._proved = Bounded[Hashable, bool](_SHAPES)
        """Whether a suffix of this shape was seen to be how the rendering of a whole request ends."""

    async def plan(self, request: EngineRequest, place: Lineage, policy: Json) -> PromptPlan:
        """The prompt of a call that was placed. `policy` is its session's."""
        if not isinstance(request, ChatRequest):
            return PromptPlan(reason="raw_prompt")
        frame = rules.prompt_config(request)
        return replace(await self._planned(request, frame, place, policy), frame=frame)

    def remember(self, record: CallRecord, plan: PromptPlan, base: Base | None) -> None:
        """Keep a call's tokens for the next one. Called before its client has the answer's last byte."""
        if record.status != "ok" or record.prompt_ids is None or plan.frame is None:
            return
        before = self._answered.get((base.call_id, base.choice)) if base is not None else None
        for choice in record.choices:
            self._keep(record.call_id, record.prompt_ids, choice, plan.frame, before.thoughts if before else ())

    async def _planned(self, request: ChatRequest, frame: PromptConfig, place: Lineage, policy: Json) -> PromptPlan:
        if place.base is None:
            return PromptPlan(reason="no_base")
        found = await self._base(request, frame, place.base)
        if not isinstance(found, AnsweredTokens):
            return PromptPlan(reason=found)
        if (mode := policy.get("prompt_mode", self._settings.prompt_mode)) == "render":
            return PromptPlan(reason="off")
        assert mode == "continue", mode
        if "continue" not in self._engine.info.capabilities:
            return PromptPlan(reason="engine_cannot")
        try:
            return await self._continued(request, place.base, found, policy)
        except RequestError:
            return PromptPlan(reason="template_refuses")
        except EngineError as error:
            log.warning("the engine could not render for a continuation: %s", error)
            return PromptPlan(reason="engine_failed")

    async def _base(self, request: ChatRequest, frame: PromptConfig, base: Base) -> AnsweredTokens | PromptReason:
        """What the base said, or why it cannot be continued."""
        if rules.has_images(request.messages):
            return "images"
        if is_constrained(request):
            return "constrained"
        found = self._answered.get((base.call_id, base.choice)) or await self._load(base)
        if found is None:
            return "base_without_tokens"
        if frame.tools != found.frame.tools:
            return "tools_changed"
        if frame.options != found.frame.options:
            return "template_options_changed"
        if not found.closed and found.finish != "length":
            return "stop_sequence" if found.finish == "stop" else "aborted"
        return found

    async def _load(self, base: Base) -> AnsweredTokens | None:
        """A base that is not in memory, from the store, with the reasoning of the answers before it."""
        call = await self._store.calls.get(base.call_id)
        choice = next((choice for choice in call.choices if choice.index == base.choice), None) if call else None
        if call is None or choice is None or call.prompt_ids is None or not choice.token_ids.size:
            return None
        try:
            request = recorded_request(call)
        except RequestError:
            return None
        if not isinstance(request, ChatRequest):
            return None
        said = tuple(thought for message in request.messages for thought in _thought(message.reasoning))
        return self._keep(call.call_id, call.prompt_ids, choice, rules.prompt_config(request), said)

    def _keep(
        self, call_id: str, prompt: TokenIds, choice: Choice, frame: PromptConfig, thoughts: tuple[str, ...]
    ) -> AnsweredTokens:
        """`thoughts` of the answers before it."""
        answered = AnsweredTokens(
            ids=np.concatenate([prompt, choice.token_ids]),
            finish=choice.finish_reason,
            closed=int(choice.token_ids[-1]) in self._end_of_turn,
            frame=frame,
            thoughts=(*thoughts, *_thoughts(choice.message)),
        )
        self._answered.put((call_id, choice.index), answered, answered.ids.nbytes)
        return answered

    async def _continued(self, request: ChatRequest, base: Base, found: AnsweredTokens, policy: Json) -> PromptPlan:
        suffix = await self._suffix(request, base)
        if not isinstance(suffix, Suffix):
            return PromptPlan(reason=suffix)
        older = policy.get("past_reasoning", self._settings.past_reasoning)
        if older == "strip" and found.thoughts and await self._dropped(request, found):
            return PromptPlan(reason="reasoning_by_template", past_reasoning=older)
        ends = () if found.closed else (suffix.end,)
        prompt = np.concatenate([found.ids, np.array([*ends, *suffix.ids], dtype=np.int32)])
        if prompt.size >= self._engine.info.context_length:
            return PromptPlan(reason="context_full")
        try:
            accepted = await self._engine.accept_prompt(request, prompt)
        except CannotContinueError as error:
            log.info("a call is not continued: %s", error)
            return PromptPlan(reason="engine_cannot")
        return PromptPlan(accepted, past_reasoning=older)

    @property
    def _end_of_turn(self) -> tuple[int, ...]:
        return self._engine.info.eos_token_ids

    async def _suffix(self, request: ChatRequest, base: Base) -> Suffix | PromptReason:
        head, whole = rules.probe_request(request, base.messages)
        ending = await self._ended(head)
        if not ending.turns:
            return "no_end_of_turn"
        shape = rules.shape_of(request, base.messages)
        proved = self._proved.get(shape)
        if proved is False:
            return "suffix_unproven"
        suffix = rules.suffix_of(await self._engine.render(whole), ending, self._end_of_turn)
        if proved is None:
            full = await self._engine.render(request)
            proved = suffix is not None and rules.is_end_of(full, suffix)
            self._proved.put(shape, proved)
        return suffix if suffix is not None and proved else "suffix_unproven"

    async def _ended(self, head: ChatRequest) -> TurnEnding:
        shape = rules.head_shape(head)
        ending = self._heads.get(shape)
        if ending is None:
            ending = rules.turn_ending(await self._engine.render(head, generation=False), self._end_of_turn)
            self._heads.put(shape, ending)
        return ending

    async def _dropped(self, request: ChatRequest, found: AnsweredTokens) -> bool:
        """Whether the engine's own rendering lacks reasoning that older answers were sampled with."""
        text = await self._engine.decode(await self._engine.render(request))
        return not all(thought in text for thought in found.thoughts)


def _thoughts(message: Json) -> tuple[str, ...]:
    reasoning: Any = message.get("reasoning_content")
    return _thought(reasoning if isinstance(reasoning, str) else None)


def _thought(reasoning: str | None) -> tuple[str, ...]:
    said = (reasoning or "").strip()
    return (said[:_REASONING],) if said else ()
