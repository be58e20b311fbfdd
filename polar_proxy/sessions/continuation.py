"""Continuation: sample a call from exactly the tokens of the call that it extends (its base), followed by those of the
new messages.

    base's prompt + base's answer (+ end of turn, if the answer was cut) + suffix

The suffix is not written by code for each model. The engine renders a short probe request: a user message, an assistant
turn that calls the same tools as the base's last turn, and the new messages. The suffix consists of the tokens after
the end-of-turn token of that assistant turn.

Promises:

* `build` never fails a call. If something prevents continuation, the engine renders the request, and the reason is
  recorded with the call.
* The end of a turn is found by counting end-of-turn tokens. They are special tokens: text on one side of them does not
  change the tokens on the other. If the chat template writes none, the engine renders the request.
* A suffix is used only after one of its shape (roles of the new messages, number of tool calls in the turn before,
  template options) was found at the end of the engine's rendering of a whole request.
* The base's tokens are never rendered again, so whatever a harness did to its history (other JSON, dropped reasoning,
  other white space) cannot change them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import orjson
from cachetools import LRUCache

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects import recorded_request
from polar_proxy.engines.base import CannotContinueError, Engine, ExactPrompt, is_constrained
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.sessions.lineage import Base
from polar_proxy.sessions.state import AnsweredCall, PromptConfig, SessionState, reasoning_prefix
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, EngineRequest, Json, Message, PromptMode, Sampling, ToolCall

log = logging.getLogger(__name__)

PromptReason = Literal[
    "no_base",  # the request begins a conversation, or extends a conversation that was not recorded
    "raw_prompt",  # Completions: the client gives the whole prompt
    "tools_changed",  # the prompt's beginning changes with the tools
    "template_options_changed",  # the prompt's beginning changes with the template's options
    "images",  # the token ids of a prompt with images do not contain the images
    "constrained",  # the request asks for a certain tool call or form of the answer (`is_constrained`)
    "base_without_tokens",  # the base was recorded without token ids (engine `openai`)
    "stop_sequence",  # the base's answer ended at a stop sequence
    "aborted",  # the base's answer ended neither with its own end of turn nor at the token limit
    "no_end_of_turn",  # no end-of-turn token appears in the engine's rendering of an assistant turn
    "template_refuses",  # the template cannot render the probe or the request
    "suffix_unproven",  # the engine's rendering of the whole request does not end in the suffix
    "reasoning_by_template",  # `past_reasoning = strip`, and the template drops the reasoning of an earlier turn
    "context_full",  # with all sampled tokens, the prompt leaves no room for an answer
    "engine_cannot",  # the engine does not sample chats from token ids (`polar doctor --engine-url` says why)
    "engine_failed",  # the engine did not answer when asked to render
    "off",  # the setting `prompt_mode` is `render`
]
"""Why a prompt was not continued from its base's tokens."""

PastReasoning = Literal["keep", "strip"]

_SHAPES = 4096
"""Number of turn endings and proved suffix shapes that are remembered."""
_PROBE_OPENING = Message("user", "Go on.")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt of a call, or the reason why the engine renders it."""

    prompt: ExactPrompt | None = None
    """The prompt that the engine samples from. None: it renders the request."""
    reason: PromptReason | None = None
    """Why the prompt is not continued."""
    past_reasoning: PastReasoning | None = None
    """The setting with which the prompt was made, if it could have an effect."""
    config: PromptConfig | None = None
    """None for a raw prompt."""

    @property
    def mode(self) -> PromptMode:
        return "render" if self.prompt is None else "continue"


class TurnEnding(NamedTuple):
    """`turns` counts the end-of-turn tokens in a rendering that ends in an assistant turn; `after` has the ids after
    the last one."""

    turns: int
    after: tuple[int, ...]


class Suffix(NamedTuple):
    """`ids` follow the end-of-turn token `end` of an assistant turn, and include the opening of the next one."""

    end: int
    ids: tuple[int, ...]


class _NotContinued(Exception):
    """Raised if a prompt cannot be continued. `reason` is recorded with the call."""

    def __init__(self, reason: PromptReason, past_reasoning: PastReasoning | None = None) -> None:
        super().__init__(reason)
        self.reason: PromptReason = reason
        self.past_reasoning = past_reasoning


class PromptBuilder:
    def __init__(self, engine: Engine, store: Store, settings: GatewaySettings) -> None:
        self._engine = engine
        self._store = store
        self._settings = settings
        self._turn_endings: LRUCache[Hashable, TurnEnding] = LRUCache(_SHAPES)
        self._proved: LRUCache[Hashable, bool] = LRUCache(_SHAPES)
        """Whether the rendering of a whole request ended with a suffix of this shape."""

    async def build(self, request: EngineRequest, base: Base | None, session: SessionState) -> PromptPlan:
        """Return the prompt of a call that extends `base`."""
        if not isinstance(request, ChatRequest):
            return PromptPlan(reason="raw_prompt")
        config = prompt_config(request)
        try:
            plan = await self._continue(request, config, base, session)
        except _NotContinued as obstacle:
            plan = PromptPlan(reason=obstacle.reason, past_reasoning=obstacle.past_reasoning)
        except RequestError:
            plan = PromptPlan(reason="template_refuses")
        except EngineError as error:
            log.warning("the engine could not render for a continuation: %s", error)
            plan = PromptPlan(reason="engine_failed")
        return replace(plan, config=config)

    async def _continue(
        self, request: ChatRequest, config: PromptConfig, base: Base | None, session: SessionState
    ) -> PromptPlan:
        if base is None:
            raise _NotContinued("no_base")
        if has_images(request.messages):
            raise _NotContinued("images")
        if is_constrained(request):
            raise _NotContinued("constrained")
        answered = session.answered_call(base) or await self._load(session, base)
        if answered is None:
            raise _NotContinued("base_without_tokens")
        if config.tools != answered.config.tools:
            raise _NotContinued("tools_changed")
        if config.options != answered.config.options:
            raise _NotContinued("template_options_changed")
        ends_turn = int(answered.ids[-1]) in self._engine.info.eos_token_ids
        if not ends_turn and answered.finish_reason != "length":
            raise _NotContinued("stop_sequence" if answered.finish_reason == "stop" else "aborted")
        if session.policy.get("prompt_mode", self._settings.prompt_mode) != "continue":
            raise _NotContinued("off")
        if "continue" not in self._engine.info.capabilities:
            raise _NotContinued("engine_cannot")

        suffix = await self._prove_suffix(request, base)
        past_reasoning: PastReasoning = session.policy.get("past_reasoning", self._settings.past_reasoning)
        if past_reasoning == "strip" and answered.reasoning and await self._template_drops_reasoning(request, answered):
            raise _NotContinued("reasoning_by_template", past_reasoning)
        end_of_turn = () if ends_turn else (suffix.end,)
        prompt = np.concatenate([answered.ids, np.array([*end_of_turn, *suffix.ids], dtype=np.int32)])
        if prompt.size >= self._engine.info.context_length:
            raise _NotContinued("context_full")
        try:
            accepted = await self._engine.accept_prompt(request, prompt)
        except CannotContinueError as error:
            log.info("a call is not continued: %s", error)
            raise _NotContinued("engine_cannot") from error
        return PromptPlan(accepted, past_reasoning=past_reasoning)

    async def _load(self, session: SessionState, base: Base) -> AnsweredCall | None:
        """Read the base (the call that is extended) from the store; None if it has no tokens there.

        Needed if this gateway does not remember it: another gateway answered it, or this one was restarted.
        """
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
        reasoning = tuple(text for message in request.messages for text in reasoning_prefix(message))
        return session.remember_answer(call.call_id, call.prompt_ids, choice, prompt_config(request), reasoning)

    async def _prove_suffix(self, request: ChatRequest, base: Base) -> Suffix:
        """Return the suffix for the messages after `base`.

        The first suffix of each shape is compared with the engine's rendering of the whole request. Raises
        _NotContinued if this rendering did not end in it.
        """
        end_of_turn = self._engine.info.eos_token_ids
        head, probe = probe_requests(request, base.messages)
        ending = await self._turn_ending(head)
        if not ending.turns:
            raise _NotContinued("no_end_of_turn")
        shape = suffix_shape(request, base.messages)
        proved = self._proved.get(shape)
        if proved is False:
            raise _NotContinued("suffix_unproven")
        suffix = find_suffix(await self._engine.render(probe), ending, end_of_turn)
        if proved is None:
            rendering = await self._engine.render(request)
            proved = self._proved[shape] = suffix is not None and ends_in_suffix(rendering, suffix)
        if suffix is None or not proved:
            raise _NotContinued("suffix_unproven")
        return suffix

    async def _turn_ending(self, head: ChatRequest) -> TurnEnding:
        shape = len(head.messages[-1].tool_calls), _canonical_json(dict(head.template_kwargs))
        ending = self._turn_endings.get(shape)
        if ending is None:
            ids = await self._engine.render(head, generation=False)
            ending = self._turn_endings[shape] = find_turn_ending(ids, self._engine.info.eos_token_ids)
        return ending

    async def _template_drops_reasoning(self, request: ChatRequest, answered: AnsweredCall) -> bool:
        """Return whether the engine's own rendering lacks reasoning that earlier answers were sampled with."""
        text = await self._engine.decode(await self._engine.render(request))
        return not all(reasoning in text for reasoning in answered.reasoning)


def prompt_config(request: ChatRequest) -> PromptConfig:
    """Return digests of the tools and template options. Cache marks and the order of tools and keys are ignored."""
    tools = [] if request.tool_choice == "none" else request.tools
    unmarked = ({key: value for key, value in tool.items() if key != "cache_control"} for tool in tools)
    listed = b"\n".join(sorted(map(_canonical_json, unmarked)))
    return PromptConfig(_digest(listed), _digest(_canonical_json(dict(request.template_kwargs))))


def probe_requests(request: ChatRequest, base_messages: int) -> tuple[ChatRequest, ChatRequest]:
    """Return the probe up to its assistant turn, and the whole probe with the new messages.

    The assistant turn has the tool calls of the base's last turn, so that each new tool result belongs to one.
    """
    calls = tuple(
        ToolCall(call.id, call.name, "{}")
        for message in _last_turn(request.messages[:base_messages])
        for call in message.tool_calls
    )
    turn = Message("assistant", None if calls else "Yes.", tool_calls=calls)
    head = replace(
        request,
        messages=(_PROBE_OPENING, turn),
        tools=(),
        tool_choice=None,
        response_format=None,
        sampling=Sampling(),
    )
    return head, replace(head, messages=(*head.messages, *request.messages[base_messages:]))


def suffix_shape(request: ChatRequest, base_messages: int) -> Hashable:
    """Return everything that determines the form of a suffix. The texts of the new messages are not part of it."""
    calls = sum(len(message.tool_calls) for message in _last_turn(request.messages[:base_messages]))
    new = tuple(
        (message.role, bool(message.reasoning), len(message.tool_calls), isinstance(message.content, str))
        for message in request.messages[base_messages:]
    )
    return calls, new, bool(request.tools), _canonical_json(dict(request.template_kwargs))


def find_turn_ending(head_ids: Sequence[int], end_of_turn: Collection[int]) -> TurnEnding:
    """Return the ending of a rendering that ends in an assistant turn. `end_of_turn`: all tokens that end a turn."""
    positions = [position for position, token in enumerate(head_ids) if token in end_of_turn]
    return TurnEnding(len(positions), tuple(head_ids[positions[-1] + 1 :]) if positions else ())


def find_suffix(probe_ids: Sequence[int], head: TurnEnding, end_of_turn: Collection[int]) -> Suffix | None:
    """Return the ids after the assistant turn in the rendering of a whole probe; None if they cannot be separated."""
    turns_left = head.turns
    for position, token in enumerate(probe_ids):
        if token in end_of_turn:
            turns_left -= 1
            if turns_left == 0:
                ids = tuple(probe_ids[position + 1 :])
                separable = len(ids) > len(head.after) and ids[: len(head.after)] == head.after
                return Suffix(token, ids) if separable else None
    return None


def ends_in_suffix(rendering: Sequence[int], suffix: Suffix) -> bool:
    size = len(suffix.ids) + 1
    return len(rendering) > size and tuple(rendering[-size:]) == (suffix.end, *suffix.ids)


def has_images(messages: Sequence[Message]) -> bool:
    """Return whether a message's content has a part that is neither text nor reasoning, such as an image."""
    return any(
        part.get("type") not in _TEXT_PARTS
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


def _last_turn(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the assistant messages at the end."""
    start = len(messages)
    while start and messages[start - 1].role == "assistant":
        start -= 1
    return messages[start:]


def _canonical_json(value: Json) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
