"""Continuation, the pure half: which tokens come behind an answer, as the engine's own template writes them.

A continued prompt is the base's prompt, its sampled answer, and a suffix: the tokens of what is new. The suffix is not
written by code for each model. The engine renders a short stand-in, a user message, an assistant turn that calls the
same tools, and the new messages; what stands behind the end-of-turn token of that assistant turn is the suffix.

Invariants:

* The end of turn is found by counting end-of-turn tokens, which are special tokens: text on one side of them does not
  change the tokens on the other. Nothing is taken where there is none.
* A suffix is believed only after one of its shape (roles of the new messages, calls of the turn before, template
  options) was seen to be exactly how the engine's rendering of a whole request ends.
* The base's tokens are never rendered again, so what a harness did to its history (other JSON, dropped reasoning,
  other white space) cannot change them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import orjson

from polar_proxy.types import ChatRequest, Json, Message, Sampling, ToolCall

PromptReason = Literal[
    "no_base",
    "raw_prompt",
    "tools_changed",
    "template_options_changed",
    "images",
    "constrained",
    "base_without_tokens",
    "stop_sequence",
    "aborted",
    "no_end_of_turn",
    "template_refuses",
    "suffix_unproven",
    "reasoning_by_template",
    "context_full",
    "engine_cannot",
    "engine_failed",
    "off",
]
"""Why a prompt was not continued from its base's tokens.

no_base                   the request begins a conversation, or goes on with none that was recorded
raw_prompt                Completions: the client gives the whole prompt
tools_changed, template_options_changed
                          the harness offers other tools, or asks for another rendering: the prompt's beginning changes
images                    a prompt with pictures is more than its token ids
constrained               the answer is held to a grammar, which the engine enforces on its own route
base_without_tokens       the base was recorded without ids (a hosted engine)
stop_sequence, aborted    the base's answer ended otherwise than by its own end of turn or the limit of tokens
no_end_of_turn            the engine's end-of-turn token does not show in its rendering of an assistant turn
template_refuses          the template cannot render the stand-in or the request
suffix_unproven           the engine's rendering of the whole request does not end in the suffix of the stand-in
reasoning_by_template     `past_reasoning = strip`, and the template drops reasoning of an older turn
context_full              with all that was sampled the prompt leaves no room for an answer
engine_cannot             the engine does not sample chats from ids (`polar doctor --engine-url` says why)
engine_failed             the engine did not answer the question how it renders
off                       `prompt_mode = observe`; nothing else stood against it
"""

PastReasoning = Literal["keep", "strip"]

_OPENING = Message("user", "Go on.")


@dataclass(frozen=True, slots=True)
class TurnEnding:
    """How the rendering of the stand-in up to its assistant turn ends: `turns` end-of-turn tokens, then `after`.

    Without turns: no end of turn shows in it."""

    turns: int
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Suffix:
    """What follows the `end` token of an assistant turn, up to the opening of the next answer."""

    end: int
    ids: tuple[int, ...]


class PromptConfig(NamedTuple):
    """Digests of what shapes a prompt beside its messages: the tools that are shown, and the template's options."""

    tools: bytes
    options: bytes


def prompt_config(request: ChatRequest) -> PromptConfig:
    """Order of keys and of tools means nothing here; neither does a cache mark."""
    tools = [] if request.tool_choice == "none" else sorted(_canonical(_unmarked(tool)) for tool in request.tools)
    return PromptConfig(_digest(b"\n".join(tools)), _digest(_canonical(dict(request.template_kwargs))))


def probe_request(request: ChatRequest, base_messages: int) -> tuple[ChatRequest, ChatRequest]:
    """The stand-in up to its assistant turn, and with the new messages.

    The turn calls tools as the last one of the base did, so that results have a call to belong to.
    """
    calls = tuple(
        ToolCall(call.id, call.name, "{}")
        for message in _last_turn(request.messages[:base_messages])
        for call in message.tool_calls
    )
    turn = Message("assistant", None if calls else "Yes.", tool_calls=calls)
    head = replace(
        request, messages=(_OPENING, turn), tools=(), tool_choice=None, response_format=None, sampling=Sampling()
    )
    return head, replace(head, messages=(*head.messages, *request.messages[base_messages:]))


def head_shape(head: ChatRequest) -> Hashable:
    """What the way the rendering of a head ends depends on."""
    return len(head.messages[-1].tool_calls), _canonical(dict(head.template_kwargs))


def shape_of(request: ChatRequest, base_messages: int) -> Hashable:
    """What the form of a suffix depends on; the texts of the new messages are no part of it."""
    calls = sum(len(message.tool_calls) for message in _last_turn(request.messages[:base_messages]))
    new = tuple(
        (message.role, bool(message.reasoning), len(message.tool_calls), isinstance(message.content, str))
        for message in request.messages[base_messages:]
    )
    return calls, new, bool(request.tools), _canonical(dict(request.template_kwargs))


def turn_ending(head_ids: Sequence[int], end_of_turn: Collection[int]) -> TurnEnding:
    """How the rendering of a head (without the opening of an answer) ends."""
    places = [place for place, token in enumerate(head_ids) if token in end_of_turn]
    return TurnEnding(len(places), tuple(head_ids[places[-1] + 1 :]) if places else ())


def suffix_of(whole_ids: Sequence[int], head: TurnEnding, end_of_turn: Collection[int]) -> Suffix | None:
    """What stands behind the assistant turn in the rendering of a whole stand-in; None where it cannot be told."""
    left = head.turns
    for place, token in enumerate(whole_ids):
        if token in end_of_turn:
            left -= 1
            if left == 0:
                ids = tuple(whole_ids[place + 1 :])
                clean = len(ids) > len(head.after) and ids[: len(head.after)] == head.after
                return Suffix(token, ids) if clean else None
    return None


def is_end_of(full_ids: Sequence[int], suffix: Suffix) -> bool:
    """Whether the engine's rendering of a whole request ends in an end of turn and exactly this suffix."""
    size = len(suffix.ids) + 1
    return len(full_ids) > size and tuple(full_ids[-size:]) == (suffix.end, *suffix.ids)


def has_images(messages: Sequence[Message]) -> bool:
    """Whether any message holds what is not text."""
    return any(
        part.get("type") not in ("text", "input_text", "output_text", "refusal", "thinking", "reasoning")
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )


def _last_turn(messages: Sequence[Message]) -> Sequence[Message]:
    """The assistant messages at the end."""
    start = len(messages)
    while start and messages[start - 1].role == "assistant":
        start -= 1
    return messages[start:]


def _unmarked(tool: Json) -> Json:
    return {key: value for key, value in tool.items() if key != "cache_control"}


def _canonical(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
