"""The texts of errors about request fields."""

from __future__ import annotations

from typing import Any

import pytest

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.errors import RequestError
from polar_proxy.types import Json

USER = {"role": "user", "content": "hi"}
CHAT: Json = {"model": "m", "messages": [USER]}
ANTHROPIC: Json = {**CHAT, "max_tokens": 9}
GOOGLE: Json = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


@pytest.mark.parametrize(
    ("dialect", "body", "text", "code"),
    [
        (OpenAIChat(), {**CHAT, "temperature": "1"}, "Invalid type for 'temperature': expected a number.", "type"),
        (OpenAIChat(), {**CHAT, "temperature": 3}, "Invalid value for 'temperature': it must be at most 2.", "value"),
        (OpenAIChat(), {**CHAT, "max_tokens": 0}, "Invalid value for 'max_tokens': it must be at least 1.", "value"),
        (OpenAIChat(), {**CHAT, "n": True}, "Invalid type for 'n': expected an integer.", "type"),
        (OpenAIChat(), {**CHAT, "stream": 1}, "Invalid type for 'stream': expected a boolean.", "type"),
        (OpenAIChat(), {**CHAT, "tools": {}}, "Invalid type for 'tools': expected an array.", "type"),
        (
            OpenAIChat(),
            {**CHAT, "stream_options": []},
            "Invalid type for 'stream_options': expected an object.",
            "type",
        ),
        (OpenAIChat(), {**CHAT, "messages": [1]}, "Invalid type for 'messages[0]': expected an object.", "type"),
        (OpenAIChat(), {"messages": [USER]}, "Missing required parameter: 'model'.", "missing"),
        (OpenAICompletions(), {"model": "m"}, "Missing required parameter: 'prompt'.", "missing"),
        (
            OpenAIResponses(),
            {"model": "m", "input": "hi", "metadata": 1},
            "Invalid type for 'metadata': expected an object.",
            "type",
        ),
        (AnthropicMessages(), CHAT, "Missing required parameter: 'max_tokens'.", "missing"),
        (
            AnthropicMessages(),
            {**ANTHROPIC, "stop_sequences": [1]},
            "Invalid type for 'stop_sequences': expected an array of strings.",
            "type",
        ),
        (
            GoogleGenerateContent("m"),
            {**GOOGLE, "generation_config": {"top_p": "x"}},
            "Invalid type for 'generationConfig.topP': expected a number.",
            "type",
        ),
        (
            GoogleGenerateContent("m"),
            {"contents": {"parts": [{"text": "a"}, {"function_call": {"name": 1}}]}},
            "Invalid type for 'contents[0].parts[1].functionCall.name': expected a string.",
            "type",
        ),
    ],
)
def test_error_text_and_code(dialect: Dialect, body: Json, text: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        dialect.parse(body)
    codes: dict[str, Any] = {"type": "invalid_type", "value": "invalid_value", "missing": "missing_required_parameter"}
    assert (str(caught.value), caught.value.code, caught.value.status) == (text, codes[code], 400)
