"""Anthropic's response: content blocks, as one object or as a stream of events.

Source: https://docs.anthropic.com/en/api/messages-streaming

Text and thinking are streamed as they arrive. A tool call is sent when it is complete and committed: `input` must be an
object, which is known only when all arguments were sampled. (Anthropic's own servers hold arguments back for the same
reason.) The arguments of a tool with `eager_input_streaming` are streamed as they arrive, valid or not.

Arguments that are not a JSON object (`[1]`, or cut short by `max_tokens`) are not changed into one: the call is sent as
text, with its name and arguments as sampled. So the agent runs nothing that the model did not write, and nothing is
lost.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import orjson

from polar_proxy.dialects.answer import Answer, AnswerChoice
from polar_proxy.dialects.anthropic.errors import error_object
from polar_proxy.dialects.anthropic.signature import seal
from polar_proxy.dialects.base import Encoder
from polar_proxy.dialects.wire import named_sse, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, SampleEvent, ToolCall, ToolDelta


class AnthropicEncoder(Encoder):
    """Encodes messages and their event stream."""

    def __init__(self, options: Json, call_id: str) -> None:
        self._model: str = options["model"]
        self._eager = frozenset(options["eager"])
        self._omit_thinking: bool = options["omit_thinking"]
        self._id = "msg_" + call_id
        self._started = False
        self._block_count = 0
        """Number of blocks begun so far; the index of the next one."""
        self._open: str | None = None
        """Kind of the open text or thinking block. Tool blocks may be open at the same time."""
        self._open_index = 0
        self._thinking: list[str] = []
        self._begun_calls: dict[int, int] = {}
        """Tool calls whose block has begun: number of the call -> index of its block."""
        self._held_calls: dict[int, ToolCall] = {}
        """Eager calls whose block has not begun."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        out = b"" if self._started else self._start(event.prompt_ids, event.cached_tokens)
        if event.reasoning:
            out += self._thinking_delta(event.reasoning)
        if event.text:
            out += self._text_delta(event.text)
        for delta in event.tool_calls:
            out += self._call_delta(delta)
        return out

    def end(self, answers: list[Answer]) -> bytes:
        answer = answers[0]
        choice = answer.first
        out = b"" if self._started else self._start(answer.prompt_ids, answer.cached_tokens)
        if text := _calls_as_text(choice, self._begun_calls):
            out += self._text_delta(text)
        out += self._close()
        for number, call in enumerate(choice.tool_calls):
            if number in self._begun_calls:
                out += _event("content_block_stop", index=self._begun_calls[number])
            elif _is_input(call.arguments):
                index, begin = self._begin_call(call)
                out += begin + _input_delta(index, _input_text(call.arguments))
                out += _event("content_block_stop", index=index)
        reason, stop = _stop_reason(choice, self._begun_calls)
        out += _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None},
            usage=_usage(answer),
        )
        return out + _event("message_stop")

    def respond(self, answers: list[Answer]) -> bytes:
        answer = answers[0]
        choice = answer.first
        content: list[Json] = []
        if choice.reasoning:
            thinking = "".join(choice.reasoning)
            shown = "" if self._omit_thinking else thinking
            content.append({"type": "thinking", "thinking": shown, "signature": seal(thinking)})
        text = "".join(choice.text) + _calls_as_text(choice, ())
        if text:
            content.append({"type": "text", "text": text})
        content += [_tool_use(call) for call in choice.tool_calls if _is_input(call.arguments)]
        reason, stop = _stop_reason(choice, ())
        return orjson.dumps(self._message(content, reason, stop, answer))

    def fail(self, message: str, status: int) -> bytes:
        return named_sse("error", error_object(message, status))

    def _message(self, content: list[Json], reason: str | None, stop: str | None, answer: Answer) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(answer),
        }

    def _start(self, prompt_ids: Sequence[int] | None, cached_tokens: int | None) -> bytes:
        self._started = True
        message = self._message([], None, None, Answer(prompt_ids, cached_tokens))
        return _event("message_start", message=message) + _event("ping")

    def _begin_block(self, block: Json) -> tuple[int, bytes]:
        index = self._block_count
        self._block_count += 1
        return index, _event("content_block_start", index=index, content_block=block)

    def _begin_call(self, call: ToolCall) -> tuple[int, bytes]:
        return self._begin_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})

    def _close(self) -> bytes:
        """End the open text or thinking block."""
        out = b""
        if self._open == "thinking":
            out = _delta(self._open_index, {"type": "signature_delta", "signature": seal("".join(self._thinking))})
            self._thinking = []
        if self._open is not None:
            out += _event("content_block_stop", index=self._open_index)
        self._open = None
        return out

    def _switch(self, kind: str, block: Json) -> bytes:
        """Make a block of this kind the open one."""
        if self._open == kind:
            return b""
        out = self._close()
        self._open = kind
        self._open_index, begin = self._begin_block(block)
        return out + begin

    def _thinking_delta(self, text: str) -> bytes:
        out = self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self._thinking.append(text)
        if self._omit_thinking:
            return out
        return out + _delta(self._open_index, {"type": "thinking_delta", "thinking": text})

    def _text_delta(self, text: str) -> bytes:
        out = self._switch("text", {"type": "text", "text": ""})
        return out + _delta(self._open_index, {"type": "text_delta", "text": text})

    def _call_delta(self, delta: ToolDelta) -> bytes:
        """Send a piece of an eager call, or hold it back. Calls keep their order: a later one waits."""
        if delta.index in self._begun_calls:
            return _input_delta(self._begun_calls[delta.index], delta.arguments)
        held = self._held_calls.get(delta.index, ToolCall("", "", ""))
        call = ToolCall(held.id or delta.id or "", held.name or delta.name or "", held.arguments + delta.arguments)
        if call.name and call.name not in self._eager:
            return b""
        is_next = delta.index == len(self._begun_calls)
        if not call.name or not is_next or not call.arguments.lstrip().startswith("{"):
            self._held_calls[delta.index] = call
            return b""
        self._held_calls.pop(delta.index, None)
        out = self._close()
        index, begin = self._begin_call(call)
        self._begun_calls[delta.index] = index
        return out + begin + _input_delta(index, call.arguments)


def _usage(answer: Answer) -> Json:
    """Return the token counts. Anthropic's `input_tokens` leave out those read from a cache."""
    cached = min(answer.cached_tokens or 0, answer.prompt_tokens)
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer.completion_tokens,
    }


def _stop_reason(choice: AnswerChoice, begun_calls: Container[int]) -> tuple[str, str | None]:
    """Return (stop_reason, stop_sequence). `begun_calls` are the calls whose tool block was sent."""
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.stop_sequence is not None:
        return "stop_sequence", choice.stop_sequence
    if any(number in begun_calls or _is_input(call.arguments) for number, call in enumerate(choice.tool_calls)):
        return "tool_use", None
    return ("refusal" if choice.finish_reason == "content_filter" else "end_turn"), None


def _is_input(arguments: str) -> bool:
    """Return whether arguments can be an `input`: a JSON object that can be stored. Empty ones mean `{}`."""
    if not arguments.strip():
        return True
    try:
        value = orjson.loads(arguments)
        to_json(value, "input")
    except (orjson.JSONDecodeError, RequestError):
        return False
    return isinstance(value, dict)


def _calls_as_text(choice: AnswerChoice, begun_calls: Container[int]) -> str:
    """Return the calls that cannot be a `tool_use` block as sampled, each on a line after the text."""
    calls = [
        f"{call.name}({call.arguments})"
        for number, call in enumerate(choice.tool_calls)
        if number not in begun_calls and not _is_input(call.arguments)
    ]
    return "\n".join(["", *calls] if calls and any(choice.text) else calls)


def _tool_use(call: ToolCall) -> Json:
    # The argument text itself: parsing and printing it could change a long number.
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.Fragment(_input_text(call.arguments))}


def _input_text(arguments: str) -> str:
    return arguments if arguments.strip() else "{}"


def _event(kind: str, **fields: Any) -> bytes:
    return named_sse(kind, {"type": kind, **fields})


def _delta(index: int, delta: Json) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)


def _input_delta(index: int, arguments: str) -> bytes:
    return _delta(index, {"type": "input_json_delta", "partial_json": arguments}) if arguments else b""
