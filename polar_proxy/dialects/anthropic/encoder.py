"""Answers as Anthropic writes them: content blocks, in one piece or as events.

Source: https://docs.anthropic.com/en/api/messages-streaming

Text and thinking go out as they come. A tool call goes out when it is whole and committed: `input` is an object, so
what the model wrote has to be known to be one before the block may begin. (Anthropic's own servers hold arguments back
for the same reason.) A client that sets `eager_input_streaming` on a tool has asked for its arguments in pieces,
whatever they turn out to be, and gets them as they come.

Arguments that are no JSON object (`[1]`, or cut short by `max_tokens`) are not made into one: the call is handed out as
text, name and arguments as the model wrote them. The agent runs nothing that was not said, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import orjson

from polar_proxy.dialects.anthropic.errors import error_object
from polar_proxy.dialects.anthropic.signature import seal
from polar_proxy.dialects.base import Answer, AnswerChoice, Encoder, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, SampleEvent, ToolCall, ToolDelta


class AnthropicEncoder(Encoder):
    def __init__(self, options: Json, call_id: str) -> None:
        self._model: str = options["model"]
        self._eager = frozenset(options["eager"])
        self._omit: bool = options["omit_thinking"]
        self._id = "msg_" + call_id
        self._begun = False
        self._blocks = 0
        """How many blocks were begun; their indexes."""
        self._open: str | None = None
        """Kind of the text or thinking block that is being written, the last one begun but for tools."""
        self._open_index = 0
        self._thought: list[str] = []
        self._told: dict[int, int] = {}
        """Tool calls whose block has begun: number of the call -> index of its block."""
        self._held: dict[int, ToolCall] = {}
        """Eager calls whose block has not begun yet."""

    def feed(self, part: int, event: SampleEvent) -> bytes:
        out = b"" if self._begun else self._begin(event.prompt_ids, event.cached_tokens)
        if event.reasoning:
            out += self._think(event.reasoning)
        if event.text:
            out += self._say(event.text)
        for delta in event.tool_calls:
            out += self._call_delta(delta)
        return out

    def end(self, answers: list[Answer]) -> bytes:
        answer = answers[0]
        state = _choice(answer)
        out = b"" if self._begun else self._begin(answer.prompt_ids, answer.cached_tokens)
        if text := _unparsed(state, self._told):
            out += self._say(text)
        out += self._close()
        for number, call in enumerate(state.tool_calls):
            if number in self._told:
                out += _event("content_block_stop", index=self._told[number])
            elif is_object(call.arguments):
                index, begun = self._begin_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
                out += begun
                out += self._piece(index, _object(call.arguments))
                out += _event("content_block_stop", index=index)
        reason, stop = stop_reason(state, self._told)
        out += _event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None},
            usage=usage(answer),
        )
        return out + _event("message_stop")

    def respond(self, answers: list[Answer]) -> bytes:
        answer = answers[0]
        state = _choice(answer)
        content: list[Json] = []
        if state.reasoning:
            thinking = "".join(state.reasoning)
            content.append(
                {"type": "thinking", "thinking": "" if self._omit else thinking, "signature": seal(thinking)}
            )
        text = "".join(state.text) + _unparsed(state, ())
        if text:
            content.append({"type": "text", "text": text})
        content += [_tool_use(call) for call in state.tool_calls if is_object(call.arguments)]
        reason, stop = stop_reason(state, ())
        return orjson.dumps(
            {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "model": self._model,
                "content": content,
                "stop_reason": reason,
                "stop_sequence": stop,
                "usage": usage(answer),
            }
        )

    def fail(self, message: str, status: int) -> bytes:
        return b"event: error\ndata: " + orjson.dumps(error_object(message, status)) + b"\n\n"

    def _begin(self, prompt_ids: Sequence[int] | None, cached_tokens: int | None) -> bytes:
        self._begun = True
        message: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(Answer(prompt_ids, cached_tokens)),
        }
        return _event("message_start", message=message) + _event("ping")

    def _begin_block(self, block: Json) -> tuple[int, bytes]:
        index = self._blocks
        self._blocks += 1
        return index, _event("content_block_start", index=index, content_block=block)

    def _close(self) -> bytes:
        """End the text or thinking block that is being written."""
        out = b""
        if self._open == "thinking":
            out = _delta(self._open_index, {"type": "signature_delta", "signature": seal("".join(self._thought))})
            self._thought = []
        if self._open is not None:
            out += _event("content_block_stop", index=self._open_index)
        self._open = None
        return out

    def _switch(self, kind: str, block: Json) -> bytes:
        if self._open == kind:
            return b""
        out = self._close()
        self._open = kind
        self._open_index, begun = self._begin_block(block)
        return out + begun

    def _think(self, text: str) -> bytes:
        out = self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self._thought.append(text)
        if self._omit:
            return out
        return out + _delta(self._open_index, {"type": "thinking_delta", "thinking": text})

    def _say(self, text: str) -> bytes:
        out = self._switch("text", {"type": "text", "text": ""})
        return out + _delta(self._open_index, {"type": "text_delta", "text": text})

    def _call_delta(self, delta: ToolDelta) -> bytes:
        """A piece of a call, if it may go out now: see the top. Calls keep their order, so the first ones go first."""
        if delta.index in self._told:
            return self._piece(self._told[delta.index], delta.arguments)
        held = self._held.get(delta.index, ToolCall("", "", ""))
        call = ToolCall(held.id or delta.id or "", held.name or delta.name or "", held.arguments + delta.arguments)
        if call.name and call.name not in self._eager:
            return b""
        if not call.name or delta.index != len(self._told) or not call.arguments.lstrip().startswith("{"):
            self._held[delta.index] = call
            return b""
        self._held.pop(delta.index, None)
        out = self._close()
        index, begun = self._begin_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._told[delta.index] = index
        return out + begun + self._piece(index, call.arguments)

    def _piece(self, index: int, arguments: str) -> bytes:
        return _delta(index, {"type": "input_json_delta", "partial_json": arguments}) if arguments else b""


def usage(answer: Answer) -> Json:
    """`input_tokens` are those that were not read from a cache, as Anthropic counts."""
    cached = min(answer.cached_tokens or 0, answer.prompt_tokens)
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer.completion_tokens,
    }


def stop_reason(state: AnswerChoice, told: Container[int]) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence). `told`: calls that were handed out as such, whatever their arguments are."""
    if state.finish_reason == "length":
        return "max_tokens", None
    if state.stop_sequence is not None:
        return "stop_sequence", state.stop_sequence
    if any(number in told or is_object(call.arguments) for number, call in enumerate(state.tool_calls)):
        return "tool_use", None
    return ("refusal" if state.finish_reason == "content_filter" else "end_turn"), None


def is_object(arguments: str) -> bool:
    """Whether this is a JSON object that can be told, sent back and kept; no arguments at all are an empty one."""
    if not arguments.strip():
        return True
    try:
        value = orjson.loads(arguments)
        to_json(value, "input")
    except (orjson.JSONDecodeError, RequestError):
        return False
    return isinstance(value, dict)


def _unparsed(state: AnswerChoice, told: Container[int]) -> str:
    """The calls that cannot be a `tool_use`, as the model wrote them, each on a line behind the text."""
    calls = [
        f"{call.name}({call.arguments})"
        for number, call in enumerate(state.tool_calls)
        if number not in told and not is_object(call.arguments)
    ]
    return "\n".join(["", *calls] if calls and any(state.text) else calls)


def _tool_use(call: ToolCall) -> Json:
    # The text of the arguments itself: parsed and printed again, a long number would be another.
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.Fragment(_object(call.arguments))}


def _object(arguments: str) -> str:
    return arguments if arguments.strip() else "{}"


def _choice(answer: Answer) -> AnswerChoice:
    return answer.choices.get(0) or AnswerChoice()


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _delta(index: int, delta: Json) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)
