"""Anthropic's response: content blocks, as one object or as a stream of events.

Source: https://docs.anthropic.com/en/api/messages-streaming

Text and thinking are streamed as they arrive. A tool call is sent at the end of the answer, when the answer is
recorded: `input` must be an object, and only the complete arguments show whether they are an object. (Anthropic's own
servers hold arguments back for the same reason.) The arguments of a tool with `eager_input_streaming` (an eager tool)
are streamed as they arrive, valid or not.

One block is open at a time. While the arguments for an eager tool are incomplete, other text and tool calls wait until
these arguments are complete or the answer ends.

Thinking is sent only if the client requested it by `thinking`; otherwise the client gets only text and tool calls. The
record always holds the thinking, and a continued prompt contains the thinking as it was sampled.

If the arguments are not a JSON object (`[1]`, or cut short by `max_tokens`), they are not repaired. The tool call is
sent as text, with its name and arguments as sampled. So the agent runs nothing that the model did not write, and
nothing is lost.

Claude Code acts on the text of two errors: it compacts the conversation when a 400 begins with `prompt is too long`,
and requests fewer tokens after `input length and max_tokens exceed context limit`. Engines word the two errors
differently, and give both the code `context_length_exceeded`. An agent that only requests too many tokens must not be
told that its prompt is too long: it would compact a conversation that fits.
Source: https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_proxy.dialects.base import Answer, AnswerChoice, Encoder
from polar_proxy.dialects.wire import is_json_object, named_sse, seal, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, SampleEvent, ToolCall, ToolDelta

_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_CONTEXT = re.compile(r"context length (?:is|of) (?:only )?(\d+)|longer than the maximum model length of (\d+)", re.I)
_INPUT = re.compile(r"(\d+) (?:input tokens|in the messages)|passed (\d+)|[Pp]rompt \(length (\d+)\)")
_OUTPUT = re.compile(r"too large: (\d+)|(\d+) (?:output tokens|in the completion)|requested (\d+) output")


@dataclass
class AnthropicEncoder(Encoder):
    model: str
    eager: frozenset[str]
    """Names of the tools with `eager_input_streaming`."""
    send_thinking: bool
    """True if the client requested thinking."""
    omit_thinking: bool
    """True if thinking blocks have a signature, but no text."""
    _started: bool = field(default=False, init=False)
    _block_count: int = field(default=0, init=False)
    """Number of blocks that have begun. The next block has this number as its index."""
    _open: str | None = field(default=None, init=False)
    """Type of the open block."""
    _open_index: int = field(default=0, init=False)
    _thinking: list[str] = field(default_factory=list, init=False)
    _begun_calls: list[int] = field(default_factory=list, init=False)
    """Numbers of the tool calls whose block has begun. The last of these blocks may still be open."""
    _received: AnswerChoice = field(default_factory=AnswerChoice, init=False)
    """The tool calls so far, if there are eager tools."""
    _waiting: list[tuple[str, str]] = field(default_factory=list, init=False)
    """Text and thinking that wait until the arguments of the open tool call are complete: (type of block, text)."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        out = b"" if self._started else self._start(event.prompt_ids, event.cached_tokens)
        if event.reasoning:
            self._waiting.append(("thinking", event.reasoning))
        if event.text:
            self._waiting.append(("text", event.text))
        out += self._send_waiting()
        for delta in event.tool_calls if self.eager else ():
            out += self._call_delta(delta) + self._send_waiting()
        return out

    def end(self, answers: list[Answer]) -> bytes:
        answer = answers[0]
        choice = answer.first
        out = b"" if self._started else self._start(answer.prompt_ids, answer.cached_tokens)
        numbers = _calls_in_blocks(choice, self._begun_calls)
        for kind, text in [*self._waiting, ("text", _calls_as_text(choice, numbers))]:
            out += self._text_delta(kind, text)
        for number in numbers:
            if number not in self._begun_calls:
                call = choice.tool_calls[number]
                out += self._begin_call(number, call) + _input_delta(self._open_index, _input_text(call.arguments))
        out += self._close()
        reason, stop = _stop_reason(choice, called=bool(numbers))
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
        if choice.reasoning and self.send_thinking:
            thinking = "".join(choice.reasoning)
            shown = "" if self.omit_thinking else thinking
            content.append({"type": "thinking", "thinking": shown, "signature": seal(thinking)})
        numbers = _calls_in_blocks(choice, ())
        text = "".join(choice.text) + _calls_as_text(choice, numbers)
        if text:
            content.append({"type": "text", "text": text})
        content += [_tool_use(choice.tool_calls[number]) for number in numbers]
        reason, stop = _stop_reason(choice, called=bool(numbers))
        return orjson.dumps(self._message(content, reason, stop, answer))

    def fail(self, message: str, status: int) -> bytes:
        return named_sse("error", error_object(message, status, self.call_id))

    def _message(self, content: list[Json], reason: str | None, stop: str | None, answer: Answer) -> Json:
        return {
            "id": "msg_" + self.call_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(answer),
        }

    def _start(self, prompt_ids: Sequence[int] | None, cached_tokens: int | None) -> bytes:
        self._started = True
        message = self._message([], None, None, Answer(prompt_ids, cached_tokens))
        return _event("message_start", message=message) + _event("ping")

    def _begin_block(self, kind: str, **fields: Any) -> bytes:
        """Return the events that end the open block and begin another one."""
        out = self._close()
        self._open, self._open_index = kind, self._block_count
        self._block_count += 1
        block = {"type": kind, **fields}
        return out + _event("content_block_start", index=self._open_index, content_block=block)

    def _begin_call(self, number: int, call: ToolCall) -> bytes:
        self._begun_calls.append(number)
        return self._begin_block("tool_use", id=call.id, name=call.name, input={})

    def _close(self) -> bytes:
        """End the open block, if there is one."""
        out = b""
        if self._open == "thinking":
            out = _delta(self._open_index, {"type": "signature_delta", "signature": seal("".join(self._thinking))})
            self._thinking = []
        if self._open is not None:
            out += _event("content_block_stop", index=self._open_index)
        self._open = None
        return out

    def _text_delta(self, kind: str, text: str) -> bytes:
        """Return the events for a piece of `text` or `thinking`."""
        if not text or (kind == "thinking" and not self.send_thinking):
            return b""
        if kind == "text":
            out = b"" if self._open == "text" else self._begin_block("text", text="")
            return out + _delta(self._open_index, {"type": "text_delta", "text": text})
        out = b"" if self._open == "thinking" else self._begin_block("thinking", thinking="", signature="")
        self._thinking.append(text)
        if self.omit_thinking:
            return out
        return out + _delta(self._open_index, {"type": "thinking_delta", "thinking": text})

    def _call_delta(self, delta: ToolDelta) -> bytes:
        """Return the events for a piece of a tool call; no events if its block is not open."""
        self._received.add(SampleEvent(tool_calls=(delta,)))
        is_open = self._open == "tool_use" and self._begun_calls[-1] == delta.index
        return _input_delta(self._open_index, delta.arguments) if is_open else b""

    def _send_waiting(self) -> bytes:
        """Return the events that can be sent now: for waiting text and thinking, then for calls of eager tools, in
        order.

        Nothing is sent after an incomplete call. The first call of a tool that is not eager, and all calls after it,
        are sent at the end of the answer.
        """
        out, calls = b"", self._received.tool_calls
        while self._open != "tool_use" or _is_complete(calls[self._begun_calls[-1]].arguments):
            if self._waiting:
                out += self._text_delta(*self._waiting.pop(0))
                continue
            number = len(self._begun_calls)
            if number >= len(calls) or calls[number].name not in self.eager:
                break
            if not calls[number].arguments.lstrip().startswith("{"):
                break
            out += self._begin_call(number, calls[number]) + _input_delta(self._open_index, calls[number].arguments)
        return out


def _is_complete(arguments: str) -> bool:
    # Few pieces end with a brace, so the arguments so far are seldom parsed.
    return arguments.rstrip().endswith("}") and is_json_object(arguments)


def _usage(answer: Answer) -> Json:
    """Return the token counts. Anthropic's `input_tokens` excludes tokens read from a cache or written to it."""
    cached = min(answer.cached_tokens or 0, answer.prompt_tokens)
    written = min(answer.cache_write_tokens or 0, answer.prompt_tokens - cached)
    return {
        "input_tokens": answer.prompt_tokens - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": answer.completion_tokens,
    }


def _stop_reason(choice: AnswerChoice, *, called: bool) -> tuple[str, str | None]:
    """Return (stop_reason, stop_sequence). `called`: the answer has a `tool_use` block."""
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.stop_sequence is not None:
        return "stop_sequence", choice.stop_sequence
    if called:
        return "tool_use", None
    return ("refusal" if choice.finish_reason == "content_filter" else "end_turn"), None


def _calls_in_blocks(choice: AnswerChoice, begun: Container[int]) -> list[int]:
    """Return the numbers of the tool calls that are sent as `tool_use` blocks. All other calls are sent as text.

    A call is sent as a block if its arguments are a JSON object, or if its block has begun already (its number is in
    `begun`).
    """
    return [number for number, call in enumerate(choice.tool_calls) if number in begun or _is_input(call.arguments)]


def _is_input(arguments: str) -> bool:
    """Return whether the arguments can be sent as `input`, which must be a JSON object. Empty text means `{}`."""
    if not arguments.strip():
        return True
    try:
        value = orjson.loads(arguments)
        to_json(value, "input")
    except (orjson.JSONDecodeError, RequestError):
        return False
    return isinstance(value, dict)


def _calls_as_text(choice: AnswerChoice, in_blocks: list[int]) -> str:
    """Return as text the tool calls whose numbers are not in `in_blocks`: name and arguments as sampled, one call per
    line."""
    calls = [
        f"{call.name}({call.arguments})" for number, call in enumerate(choice.tool_calls) if number not in in_blocks
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


def error_object(message: str, status: int, request_id: str, code: str | None = None) -> Json:
    # Inside a stream that has begun there is no code, only the message.
    if code == "context_length_exceeded" or (status == 400 and _CONTEXT.search(message)):
        message = _context_message(message)
    kind = _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _context_message(message: str) -> str:
    """Return an engine's context-length error in the words that Anthropic's clients recognise."""
    if message.startswith(("prompt is too long", "input length and `max_tokens` exceed")):
        return message  # Anthropic's own
    limit, prompt, output = (_number(pattern, message) for pattern in (_CONTEXT, _INPUT, _OUTPUT))
    if limit is not None and prompt is not None:
        if output and prompt < limit:
            return (
                f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, "
                "decrease input length or `max_tokens` and try again"
            )
        return f"prompt is too long: {prompt} tokens > {limit} maximum"
    return f"prompt is too long: {message}"


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(group for group in found.groups() if group)) if found else None
