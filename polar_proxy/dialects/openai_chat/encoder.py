"""The answer of Chat Completions: one object, or a stream of chunks.

Text, reasoning and tool calls are streamed as they arrive. The text of a custom tool's call is decoded from the
arguments as they arrive (`CustomInputDecoder`). If the arguments do not begin as expected, the call is sent in the
choice's last chunk, as the call of a function. Reasoning is sent under two names: `reasoning_content` (DeepSeek,
earlier vLLM) and `reasoning` (OpenRouter, later vLLM).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from polar_proxy.dialects.base import Answer, AnswerChoice
from polar_proxy.dialects.custom_tools import CustomInputDecoder
from polar_proxy.dialects.openai_chat.tools import answered_call
from polar_proxy.dialects.openai_common import OpenAIEncoder, make_choice, token_logprobs
from polar_proxy.types import Json, SampleEvent, ToolDelta


@dataclass
class _CustomCall:
    """The call of a custom tool in a stream."""

    id: str | None
    name: str
    announced: bool = False
    """True once the client got the id and the name of the tool call."""
    decoder: CustomInputDecoder = field(default_factory=CustomInputDecoder)


@dataclass
class ChatEncoder(OpenAIEncoder):
    id_prefix = "chatcmpl-"
    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    empty_content: ClassVar = {"delta": {}}
    null_usage = True

    custom_tools: frozenset[str]
    """Names of the custom tools."""
    legacy_functions: bool
    """True if the client reads a tool call as `function_call`."""
    _started: set[int] = field(default_factory=set, init=False)
    """Indexes of the choices whose first chunk was written."""
    _custom_calls: dict[tuple[int, int], _CustomCall] = field(default_factory=dict, init=False)
    """The calls of custom tools, by index of the choice and number of the tool call in it."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        out = b"" if event.index in self._started else self._first_chunk(event)
        delta: Json = {}
        if event.text:
            delta["content"] = event.text
        if event.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = event.reasoning
        calls = [call for piece in event.tool_calls if (call := self._tool_delta(event.index, piece)) is not None]
        if calls and self.legacy_functions:
            delta["function_call"] = calls[0]["function"]
        elif calls:
            delta["tool_calls"] = calls
        wants_tokens = event.token_ids and (self.logprobs or self.token_ids)
        if not delta and not wants_tokens:
            return out
        choice = make_choice(event.index, {"delta": delta})
        if self.logprobs and event.token_ids:
            choice["logprobs"] = _logprobs_object(event)
        if self.token_ids:
            choice["token_ids"] = event.token_ids
        return out + self._chunk([choice])

    def respond(self, answers: list[Answer]) -> bytes:
        choices = []
        for index, state in answers[0].in_order:
            choice = make_choice(index, {"message": self._message(state)}, self._finish_reason(state))
            if self.logprobs:
                choice["logprobs"] = _logprobs_object(state)
            if self.token_ids:
                choice["token_ids"] = state.token_ids
            choices.append(choice)
        prompt = {"prompt_token_ids": answers[0].prompt_ids} if self.token_ids else {}
        return self._response(choices, answers, **prompt)

    def _message(self, state: AnswerChoice) -> Json:
        message = {**state.message.to_openai(), "refusal": None}
        if state.reasoning:
            message["reasoning"] = message["reasoning_content"]
        if state.tool_calls and self.legacy_functions:
            message["function_call"] = message.pop("tool_calls")[0]["function"]
        elif state.tool_calls:
            message["tool_calls"] = [answered_call(call, self.custom_tools) for call in state.tool_calls]
        return message

    def _finish_reason(self, choice: AnswerChoice) -> str:
        reason = super()._finish_reason(choice)
        return "function_call" if self.legacy_functions and reason == "tool_calls" else reason

    def _last_content(self, index: int, choice: AnswerChoice) -> Json:
        calls = [
            {"index": number, **answered_call(call, self.custom_tools)}
            for number, call in enumerate(choice.tool_calls)
            if (custom := self._custom_calls.get((index, number))) is not None and not custom.announced
        ]
        return {"delta": {"tool_calls": calls}} if calls else super()._last_content(index, choice)

    def _tool_delta(self, choice: int, piece: ToolDelta) -> Json | None:
        """Return the delta to send for a piece of a tool call; None if nothing can be sent yet."""
        if piece.name in self.custom_tools:
            self._custom_calls[choice, piece.index] = _CustomCall(piece.id, piece.name)
        custom = self._custom_calls.get((choice, piece.index))
        if custom is None:
            return _function_call_delta(piece)
        text = custom.decoder.feed(piece.arguments)
        if custom.announced:
            return {"index": piece.index, "custom": {"input": text}} if text else None
        if not custom.decoder.began:
            return None
        custom.announced = True
        named = {"name": custom.name, "input": text}
        return {"index": piece.index, "id": custom.id, "type": "custom", "custom": named}

    def _first_chunk(self, event: SampleEvent) -> bytes:
        self._started.add(event.index)
        choice = make_choice(event.index, {"delta": {"role": "assistant", "content": ""}})
        if self.token_ids and event.prompt_ids is not None:
            return self._chunk([choice], prompt_token_ids=event.prompt_ids)
        return self._chunk([choice])


def _logprobs_object(sampled: SampleEvent | AnswerChoice) -> Json:
    return {"content": token_logprobs(sampled), "refusal": None}


def _function_call_delta(call: ToolDelta) -> Json:
    out: Json = {"index": call.index, "function": {"arguments": call.arguments}}
    if call.name is not None:
        out["function"]["name"] = call.name
    if call.id is not None:
        out["id"] = call.id
        out["type"] = "function"
    return out
