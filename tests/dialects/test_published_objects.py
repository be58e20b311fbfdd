"""Every object and event of each provider is valid by the strict models of the provider's own SDK."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import anthropic.types as anthropic_types
import google.genai.types as google_types
import openai.types as openai_types
import openai.types.chat as chat_types
import openai.types.responses as responses_types
import pytest
from anthropic.types import ErrorResponse
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, SampleEvent, ToolDelta, TopLogprob
from tests.dialects.encoding import gather

USER: Json = {"role": "user", "content": "hi"}
SCHEMA: Json = {"type": "object", "properties": {}}
CHAT: Json = {
    "model": "m",
    "messages": [USER],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 1,
}
CHAT_TOOLS: Json = {**CHAT, "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]}
CUSTOM: Json = {**CHAT, "tools": [{"type": "custom", "custom": {"name": "bash"}}]}
LEGACY: Json = {**CHAT, "functions": [{"name": "bash", "parameters": SCHEMA}]}
RESPONSES: Json = {
    "model": "m",
    "input": "hi",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "temperature": 0.5,
    "instructions": "be brief",
    "metadata": {"a": "b"},
}
RESPONSES_TOOLS: Json = {
    **RESPONSES,
    "tools": [
        {"type": "function", "name": "bash"},
        {"type": "custom", "name": "patch"},
        {"type": "local_shell"},
        {"type": "shell"},
        {"type": "apply_patch"},
    ],
}
ANTHROPIC: Json = {"model": "m", "max_tokens": 99, "messages": [USER], "thinking": {"type": "adaptive"}}
EAGER: Json = {
    **ANTHROPIC,
    "tools": [{"name": "bash", "input_schema": SCHEMA, "eager_input_streaming": True}, {"type": "memory_20250818"}],
}
GOOGLE: Json = {
    "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}, "responseLogprobs": True, "logprobs": 1},
}


def _event(token: int, **fields: Any) -> SampleEvent:
    top = ((TopLogprob(token, "t", -0.5),),)
    return SampleEvent(token_ids=(token,), logprobs=(-0.5,), tokens=("t",), top=top, **fields)


def _call(name: str, *pieces: str) -> list[SampleEvent]:
    first = _event(3, tool_calls=(ToolDelta(0, "call_1", name, pieces[0]),))
    return [first, *(_event(4, tool_calls=(ToolDelta(0, arguments=piece),)) for piece in pieces[1:])]


OPENING = [_event(1, reasoning="hm", prompt_ids=(5, 6), cached_tokens=1), _event(2, text="so")]
ANSWERS: dict[str, list[SampleEvent]] = {
    "text": [*OPENING, _event(9, finish_reason="stop")],
    "cut": [*OPENING, _event(9, finish_reason="length")],
    "stop sequence": [*OPENING, _event(9, finish_reason="stop", stop_sequence="END")],
    "call": [*OPENING, *_call("bash", '{"a": ', "1}"), _event(9, finish_reason="tool_calls")],
    "cut call": [*OPENING, *_call("bash", '{"a": '), _event(9, finish_reason="length")],
    "call without arguments": [*_call("bash", ""), _event(9, finish_reason="tool_calls")],
    "custom": [*_call("patch", '{"input": "a', ' b"}'), _event(9, finish_reason="tool_calls")],
    "local shell": [*_call("local_shell", '{"command": ["ls"]}'), _event(9, finish_reason="tool_calls")],
    "shell": [*_call("shell", '{"commands": ["ls"]}'), _event(9, finish_reason="tool_calls")],
    "patch": [*_call("apply_patch", '{"type": "delete_file", "path": "a"}'), _event(9, finish_reason="tool_calls")],
    "nothing": [_event(9, finish_reason="stop")],
}
GOOGLE_DIALECT = GoogleGenerateContent("m", stream=True, sse=True)
KINDS: list[tuple[str, Dialect, Json, Any, Any]] = [
    ("chat", OpenAIChat(), CHAT, chat_types.ChatCompletion, chat_types.ChatCompletionChunk),
    ("chat tools", OpenAIChat(), CHAT_TOOLS, chat_types.ChatCompletion, chat_types.ChatCompletionChunk),
    # The SDK has no type for a chunk with the call of a custom tool.
    ("chat custom", OpenAIChat(), CUSTOM, chat_types.ChatCompletion, None),
    ("chat legacy", OpenAIChat(), LEGACY, chat_types.ChatCompletion, chat_types.ChatCompletionChunk),
    (
        "responses",
        OpenAIResponses(),
        RESPONSES,
        responses_types.Response,
        responses_types.ResponseStreamEvent,
    ),
    (
        "responses tools",
        OpenAIResponses(),
        RESPONSES_TOOLS,
        responses_types.Response,
        responses_types.ResponseStreamEvent,
    ),
    (
        "anthropic",
        AnthropicMessages(),
        ANTHROPIC,
        anthropic_types.Message,
        anthropic_types.RawMessageStreamEvent,
    ),
    ("anthropic eager", AnthropicMessages(), EAGER, anthropic_types.Message, anthropic_types.RawMessageStreamEvent),
    (
        "google",
        GOOGLE_DIALECT,
        GOOGLE,
        google_types.GenerateContentResponse,
        google_types.GenerateContentResponse,
    ),
]


def _events(stream: bytes) -> list[Json]:
    lines = [line for block in stream.decode().split("\n\n") for line in block.split("\n")]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def _validate(model: Any, value: Json) -> None:
    """Assert that `value` is valid: required fields are there, types are exact, and null is where it is allowed."""
    _adapter(model).validate_json(json.dumps(value), strict=True)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(("dialect", "body", "whole", "piece"), [k[1:] for k in KINDS], ids=[k[0] for k in KINDS])
def test_answers_and_events_are_valid(dialect: Dialect, body: Json, whole: Any, piece: Any, answer: str) -> None:
    parsed = dialect.parse(body)
    events = ANSWERS[answer]
    gathered = gather(events)
    gathered.ended_at = 2.5
    response = parsed.encoder("call_1", 1, sampled=parsed.requests[0]).respond([gathered])
    _validate(whole, json.loads(response))
    encoder = parsed.encoder("call_1", 1, sampled=parsed.requests[0])
    stream = b"".join(encoder.feed(0, event) for event in events) + encoder.end([gathered])
    found = _events(stream)
    assert found
    for event in found if piece is not None else ():
        if event.get("type") != "ping":
            _validate(piece, event)


@pytest.mark.parametrize("answer", ["text", "cut", "stop sequence", "nothing"])
def test_completions_are_valid(answer: str) -> None:
    """The response only: the SDK's type forbids the `finish_reason: null` that the API sends in each chunk."""
    parsed = OpenAICompletions().parse({"model": "m", "prompt": "hi", "logprobs": 1})
    _validate(openai_types.Completion, json.loads(parsed.encoder("call_1", 1).respond([gather(ANSWERS[answer])])))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 429, 500, 502, 503, 504])
def test_errors_are_valid(status: int) -> None:
    """Not 413: Anthropic documents the type `request_too_large`, which its SDK does not know."""
    error = RequestError("It broke.", status=status, param="model", code="broken")
    body = json.loads(OpenAIChat().error_body(error, "req_1"))
    _validate(ErrorObject, body["error"])
    _validate(ErrorResponse, json.loads(AnthropicMessages().error_body(error, "req_1")))


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_errors_inside_a_stream_are_valid(status: int) -> None:
    parsed = OpenAIResponses().parse(RESPONSES)
    failed = parsed.encoder("call_1", 1, sampled=parsed.requests[0]).fail("It broke.", status)
    for event in _events(failed):
        _validate(responses_types.ResponseStreamEvent, event)
    (event,) = _events(AnthropicMessages().parse(ANTHROPIC).encoder("call_1", 1).fail("It broke.", status))
    _validate(ErrorResponse, event)


def test_token_counts_are_valid() -> None:
    _validate(anthropic_types.MessageTokensCount, json.loads(AnthropicMessages().count_body(7)))
    _validate(InputTokenCountResponse, json.loads(OpenAIResponses().count_body(7)))


def test_an_unfinished_response_is_valid() -> None:
    parsed = OpenAIResponses().parse({**RESPONSES, "background": True})
    encoder: Any = parsed.encoder("call_1", 1, sampled=parsed.requests[0])
    for body in (encoder.unfinished("queued"), encoder.ended_early("failed", "It broke.")):
        _validate(responses_types.Response, json.loads(body))
