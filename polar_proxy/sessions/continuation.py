"""Continuation: sample a call from exactly the tokens of the call that it extends (its base), followed by the tokens of
the new messages.

    base's prompt + base's answer (+ end of turn, if the answer was cut) + suffix

The suffix is not written by code for each model. The engine's template renders the whole conversation with marks around
the texts of its messages (`marked_rendering.py`); the suffix is what the rendering holds after the stop token of the
base's answer.

Promises:

* `build` never fails a call. If something prevents continuation, the engine renders the request, and the reason is
  recorded with the call.
* Every continuation is checked: the rendering with the new messages must begin with the rendering from which the base's
  answer was sampled. The comparison leaves out the answers, the text that the template wrote to open the base's answer,
  and the differences in `IGNORED_DIFFERENCES`. By induction, apart from these, the prompt equals what the engine would
  render.
* The marks do not influence the template: without them, the marked rendering is exactly the plain one.
* The text of every new message is in the suffix.
* The base's tokens are never rendered again, so whatever a harness did to its history (other JSON, dropped reasoning,
  other white space) cannot change them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import orjson

from polar_proxy.config import GatewaySettings
from polar_proxy.dialects import recorded_request
from polar_proxy.engines.base import CannotContinueError, Engine, ExactPrompt, is_constrained
from polar_proxy.errors import EngineError, RequestError, StoreError
from polar_proxy.offload import OffloadThread
from polar_proxy.sessions.hashing import turn_start
from polar_proxy.sessions.lineage import Base
from polar_proxy.sessions.marked_rendering import (
    MARKINGS,
    WRITTEN_STOPS,
    AfterAnswer,
    Marker,
    RenderingError,
    compare_renderings,
)
from polar_proxy.sessions.state import (
    AnsweredCall,
    MarkedText,
    PromptConfig,
    SessionState,
    reasoning_prefix,
    tokens_match_texts,
)
from polar_proxy.types import CallRecord, ChatRequest, EngineRequest, Json, PromptMode

log = logging.getLogger(__name__)

PromptReason = Literal[
    "images",  # the conversation has images, which its token ids do not contain. Such calls are not trained
    "no_base",  # the request begins a conversation, or extends a conversation that was not recorded
    "raw_prompt",  # Completions: the client gives the whole prompt
    "tools_changed",  # the prompt's beginning changes with the tools
    "template_options_changed",  # the prompt's beginning changes with the template's options
    "constrained",  # the request asks for a certain tool call or form of the answer (`is_constrained`), or the engine
    # adds a grammar of its own, which it does not offer for exact prompts
    "hook",  # a hook changed the messages
    "other_engine",  # another engine of the settings [engines] sampled the base's answer
    "base_without_tokens",  # the base's stored tokens cannot be used: there are none (engine `openai`), they include a
    # tool call that the agent was not shown, or a hook changed the messages or the answer
    "stop_sequence",  # the base's answer ended at a stop sequence
    "aborted",  # the base's answer ended neither by itself nor at a stop sequence or the token limit
    "no_end_of_turn",  # the template writes nothing that shows where the base's answer ends
    "other_end_of_turn",  # the base's answer ended with another token than the template writes after it
    "template_refuses",  # the template cannot render the request
    "suffix_unproven",  # the engine's rendering of the whole request does not end in the suffix
    "answer_not_found",  # the base's answer cannot be found in the engine's rendering
    "message_lost",  # the engine's rendering has a new message elsewhere than after the base's answer, or not at all
    "history_changed",  # the engine now renders the messages before the base's answer differently
    "reasoning_by_template",  # `past_reasoning = strip`, and the template drops the reasoning of an earlier turn
    "context_full",  # with all sampled tokens, the prompt leaves no room for an answer
    "engine_cannot",  # the engine does not sample chats from token ids (`polar doctor --engine-url` says why)
    "engine_failed",  # the engine did not answer when asked to render
    "off",  # the setting `prompt_mode` is `render`
]
"""Why the engine renders a prompt, instead of continuing the exact tokens of an earlier call (the base)."""

PastReasoning = Literal["keep", "strip"]

_CACHED_BYTES = 1 << 16
"""Maximum size, in bytes of JSON, of a list of tools whose digest is cached."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt of a call, or the reason why the engine renders it."""

    prompt: ExactPrompt | None = None
    """The prompt that the engine samples from; None if the engine renders the request itself."""
    reason: PromptReason | None = None
    """Why the prompt does not continue the tokens of an earlier call; None if it does."""
    past_reasoning: PastReasoning | None = None
    """The setting `past_reasoning`, if the prompt continues a call or this setting prevented that; otherwise None."""
    config: PromptConfig | None = None
    """Digests of the request's tools and template options; None for a raw prompt."""
    under_grammar: bool = False
    """True if the engine renders the request, and constrains the answer by a grammar of its own."""

    @property
    def constrained(self) -> bool:
        """Whether the engine constrains the answer by a grammar of its own, for which the request did not ask. Known
        once sampling has begun."""
        return self.under_grammar if self.prompt is None else self.prompt.constrained

    @property
    def mode(self) -> PromptMode:
        return "render" if self.prompt is None else "continue"


class _NotContinued(Exception):
    """The prompt cannot continue the tokens of an earlier call. `reason` is recorded with the call."""

    def __init__(self, reason: PromptReason, past_reasoning: PastReasoning | None = None) -> None:
        super().__init__(reason)
        self.reason: PromptReason = reason
        self.past_reasoning = past_reasoning


class PromptBuilder:
    def __init__(
        self,
        engine: Engine,
        read_call: Callable[[str], Awaitable[CallRecord | None]],
        settings: GatewaySettings,
        thread: OffloadThread,
        *,
        engine_name: str | None = None,
    ) -> None:
        """`read_call` returns a stored call by its id; `thread` does the work on large requests."""
        self._engine = engine
        self._engine_name = engine_name
        self._read_call = read_call
        self._settings = settings
        self._thread = thread
        self._marker = Marker()
        self._marking = MARKINGS[0]
        """The marking that worked for the last request. It is tried first for the next request."""
        self._stop_texts: dict[int, str] = {}

    async def build(
        self, request: EngineRequest, base: Base | None, session: SessionState, *, rewritten: bool = False
    ) -> PromptPlan:
        """Return the prompt of a call that extends `base`. `rewritten`: a hook changed the messages of the request."""
        if not isinstance(request, ChatRequest):
            return PromptPlan(reason="raw_prompt")
        config = await self._thread.run(request.large, prompt_config, request)
        reason: PromptReason
        past_reasoning: PastReasoning | None = None
        try:
            if rewritten:
                raise _NotContinued("hook")
            return await self._continue(request, config, base, session)
        except _NotContinued as obstacle:
            reason, past_reasoning = obstacle.reason, obstacle.past_reasoning
        except RequestError:
            reason = "template_refuses"
        except EngineError as error:
            log.warning("the engine could not render a request, so its prompt is not continued: %s", error)
            reason = "engine_failed"
        under_grammar = await self._engine.constrains(request)
        return PromptPlan(None, reason, past_reasoning, config, under_grammar)

    async def _continue(
        self, request: ChatRequest, config: PromptConfig, base: Base | None, session: SessionState
    ) -> PromptPlan:
        if any(message.has_images for message in request.messages):
            raise _NotContinued("images")
        if base is None:
            raise _NotContinued("no_base")
        if "continue" not in self._engine.info.capabilities:
            raise _NotContinued("engine_cannot")
        if is_constrained(request, self._engine.info):
            raise _NotContinued("constrained")
        answered = session.answered_call(base) or await self._load(session, base)
        if answered is None:
            raise _NotContinued("base_without_tokens")
        if answered.engine_name != self._engine_name:
            raise _NotContinued("other_engine")
        if config.tools != answered.config.tools:
            raise _NotContinued("tools_changed")
        if config.options != answered.config.options:
            raise _NotContinued("template_options_changed")
        if session.policy.get("prompt_mode", self._settings.prompt_mode) != "continue":
            raise _NotContinued("off")
        ends_turn = int(answered.ids[-1]) in self._engine.info.eos_token_ids
        if not ends_turn and answered.finish_reason != "length":
            raise _NotContinued(await self._other_end(answered))

        rendered, ids = await self._suffix(request, base, int(answered.ids[-1]) if ends_turn else None, session)
        past_reasoning: PastReasoning = session.policy.get("past_reasoning", self._settings.past_reasoning)
        if past_reasoning == "strip" and not all(reasoning in rendered for reasoning in answered.reasoning):
            raise _NotContinued("reasoning_by_template", past_reasoning)
        prompt = np.concatenate([answered.ids, np.array(ids, dtype=np.int32)])
        if prompt.size >= self._engine.info.context_length:
            raise _NotContinued("context_full")
        try:
            accepted = await self._engine.accept_prompt(request, prompt)
        except CannotContinueError as error:
            log.info("a call is not continued: %s", error)
            under_grammar = await self._engine.constrains(request)
            raise _NotContinued("constrained" if under_grammar else "engine_cannot") from error
        return PromptPlan(accepted, past_reasoning=past_reasoning, config=config)

    async def _other_end(self, answered: AnsweredCall) -> PromptReason:
        """For an answer that ended neither with one of `eos_token_ids` nor at the token limit, return why it cannot be
        continued."""
        if answered.finish_reason not in ("stop", "tool_calls"):
            return "aborted"
        text = await self._engine.decode(answered.ids[answered.prompt_size :].tolist()) if answered.stop else ""
        return "stop_sequence" if any(stop in text for stop in answered.stop) else "other_end_of_turn"

    async def _load(self, session: SessionState, base: Base) -> AnsweredCall | None:
        """Return the base (the call that is extended) from the store; None if it cannot be continued from its stored
        tokens.

        The base is not in memory if another gateway or an earlier process answered it, or if the cache dropped it.
        """
        try:
            call = await self._read_call(base.call_id)
        except StoreError:  # the prompt is rendered instead; whether the call is answered is decided elsewhere
            return None
        choice = next((choice for choice in call.choices if choice.index == base.choice), None) if call else None
        if call is None or choice is None or call.prompt_ids is None or not choice.token_ids.size:
            return None
        if not tokens_match_texts(call):
            return None
        try:
            request = recorded_request(call)
        except RequestError:
            return None
        if not isinstance(request, ChatRequest):
            return None
        reasoning = tuple(text for message in request.messages for text in reasoning_prefix(message))
        config, stop = prompt_config(request), tuple(call.sampling.get("stop", ()))
        return session.remember_answer(
            call.call_id, call.prompt_ids, choice, stop, config, reasoning, engine_name=call.engine_name
        )

    async def _suffix(
        self, request: ChatRequest, base: Base, sampled_stop: int | None, session: SessionState
    ) -> tuple[str, list[int]]:
        """Return the rendering of the request, and the token ids that follow the base's answer.

        `sampled_stop` is the token that ended the answer; None if the answer was cut. Raises _NotContinued.
        """
        stops = await self._texts_of_stops()
        ended = stops.get(sampled_stop) if sampled_stop is not None else None
        written = WRITTEN_STOPS[ended][0] if ended in WRITTEN_STOPS else None
        try:
            ends = {*stops.values(), *([written] if written else ())}
            rendered, found = await self._after_answer(request, base, ends, session)
        except RenderingError as error:
            log.info("a call is not continued: %s", error)
            raise _NotContinued(error.problem) from error
        if sampled_stop is None and not found.stop:
            raise _NotContinued("no_end_of_turn")
        if ended is not None and found.stop not in ("", ended, written):
            raise _NotContinued("other_end_of_turn")
        stop = found.stop or ended or ""
        first = await self._engine.encode(stop)
        ids = await self._engine.encode(stop + found.suffix)
        if len(first) != 1 or ids[:1] != first or not await self._engine.confirm_rendering(request, ids[1:]):
            raise _NotContinued("suffix_unproven")
        return rendered, ids if ended is None else ids[1:]

    async def _after_answer(
        self, request: ChatRequest, base: Base, stops: Collection[str], session: SessionState
    ) -> tuple[str, AfterAnswer]:
        """Return the rendering of the request, and the part of it that follows the base's answer. Raises
        RenderingError."""
        messages = request.messages
        answer_start = turn_start(messages, base.end)
        problem = RenderingError("answer_not_found")
        plain: str | None = None
        for marking in sorted(MARKINGS, key=lambda marking: marking != self._marking):
            marked = await self._thread.run(request.large, self._marker.mark, messages, marking)
            front = replace(request, messages=marked[:answer_start])
            known = session.marked_text
            front_text = known.text if known is not None and known.is_front(request, answer_start, marking) else None
            fronts, plains = [front] if front_text is None else [], [request] if plain is None else []
            texts = await self._engine.render_texts([replace(request, messages=marked), *fronts, *plains])
            whole_text = texts[0]
            front_text = texts[1] if front_text is None else front_text
            plain = texts[-1] if plain is None else plain
            if self._marker.unmark(whole_text) != plain:
                continue  # the template reads the texts that were marked
            compare = partial(compare_renderings, whole_text, front_text, messages, base.end, self._marker, stops)
            try:
                found = await self._thread.run(request.large, compare)
            except RenderingError as error:
                if error.problem != "history_changed":
                    problem = error
                    continue
                # The template may open the next answer with a text that past answers do not have.
                (closed,) = await self._engine.render_texts([front], generation=False)
                if not front_text.startswith(closed):
                    raise
                found = await self._thread.run(request.large, compare, front_text[len(closed) :])
            self._marking = marking
            session.remember_marked_text(MarkedText(request, marking, whole_text))
            return plain, found
        raise problem

    async def _texts_of_stops(self) -> dict[int, str]:
        """Return the tokens that end an answer: token id -> text."""
        ids = self._engine.info.eos_token_ids
        if not all(token in self._stop_texts for token in ids):
            self._stop_texts = {token: await self._engine.decode([token]) for token in ids}
        return self._stop_texts


def prompt_config(request: ChatRequest) -> PromptConfig:
    """Return digests of the tools and template options.

    The order of tools and of keys does not matter, and the field `cache_control` of a tool is ignored.
    """
    tools = orjson.dumps(() if request.tool_choice == "none" else request.tools)
    digest_tools = _tools_digest if len(tools) <= _CACHED_BYTES else _tools_digest.__wrapped__
    return PromptConfig(digest_tools(tools), _digest(_canonical_json(dict(request.template_kwargs))))


@lru_cache(maxsize=64)
def _tools_digest(tools: bytes) -> bytes:
    """Return the digest of a JSON list of tools. Cached, because agents send the same list with every call."""
    unmarked = ({key: value for key, value in tool.items() if key != "cache_control"} for tool in orjson.loads(tools))
    return _digest(b"\n".join(sorted(map(_canonical_json, unmarked))))


def _canonical_json(value: Json) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
