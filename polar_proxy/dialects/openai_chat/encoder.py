"""The answer of Chat Completions: one object, or a stream of chunks.

Text, reasoning and calls of functions are streamed as they arrive. A call of a custom tool is in the choice's last
chunk, because only its complete arguments show whether they have the tool's form. Reasoning has two names:
`reasoning_content` (DeepSeek, earlier vLLM) and `reasoning` (OpenRouter, later vLLM).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from polar_proxy.dialects.base import Answer, AnswerChoice
from polar_proxy.dialects.openai_chat.tools import answered_call
from polar_proxy.dialects.openai_common import OpenAIEncoder, make_choice, token_logprobs
from polar_proxy.types import Json, SampleEvent, ToolDelta


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
    """The client reads a tool call as `function_call`."""
    _started: set[int] = field(default_factory=set, init=False)
    """Indexes of the choices whose first chunk was written."""
    _custom_calls: set[tuple[int, int]] = field(default_factory=set, init=False)
    """(choice, tool call) of the calls of custom tools."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        out = b"" if event.index in self._started else self._first_chunk(event)
        delta: Json = {}
        if event.text:
            delta["content"] = event.text
        if event.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = event.reasoning
        calls = [call for call in event.tool_calls if not self._is_custom(event.index, call)]
        if calls and self.legacy_functions:
            delta["function_call"] = _function_delta(calls[0])
        elif calls:
            delta["tool_calls"] = [_tool_delta(call) for call in calls]
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
            if (index, number) in self._custom_calls
        ]
        return {"delta": {"tool_calls": calls}} if calls else super()._last_content(index, choice)

    def _is_custom(self, index: int, call: ToolDelta) -> bool:
        if call.name in self.custom_tools:
            self._custom_calls.add((index, call.index))
        return (index, call.index) in self._custom_calls

    def _first_chunk(self, event: SampleEvent) -> bytes:
        self._started.add(event.index)
        choice = make_choice(event.index, {"delta": {"role": "assistant", "content": ""}})
        if self.token_ids and event.prompt_ids is not None:
            return self._chunk([choice], prompt_token_ids=event.prompt_ids)
        return self._chunk([choice])


def _logprobs_object(sampled: SampleEvent | AnswerChoice) -> Json:
    return {"content": token_logprobs(sampled), "refusal": None}


def _tool_delta(call: ToolDelta) -> Json:
    out: Json = {"index": call.index, "function": _function_delta(call)}
    if call.id is not None:
        out["id"] = call.id
        out["type"] = "function"
    return out


def _function_delta(call: ToolDelta) -> Json:
    return {"arguments": call.arguments} if call.name is None else {"arguments": call.arguments, "name": call.name}
