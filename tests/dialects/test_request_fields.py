"""docs/reference/fields.md names every field of the providers' request types, and is right about each."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from google.genai.types import GenerationConfig
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.errors import RequestError
from polar_proxy.types import Json
from scripts.request_fields import FIELDS, REFUSED, WITHOUT_EFFECT, used_fields

USER: Json = {"role": "user", "content": "hi"}
CHAT: Json = {"model": "m", "messages": [USER]}
GOOGLE: Json = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
BODIES: dict[str, tuple[Dialect, Json]] = {
    "openai_chat": (OpenAIChat(), CHAT),
    "openai_completions": (OpenAICompletions(), {"model": "m", "prompt": "hi"}),
    "openai_responses": (OpenAIResponses(), {"model": "m", "input": "hi"}),
    "anthropic_messages": (AnthropicMessages(), {**CHAT, "max_tokens": 9}),
    "google_generate_content": (GoogleGenerateContent("m"), GOOGLE),
}


def typed_fields(module: Any, name: str) -> set[str]:
    """Return the fields of a request type of OpenAI's or Anthropic's SDK."""
    return {*getattr(module, f"{name}Base").__annotations__, *getattr(module, f"{name}Streaming").__annotations__}


PUBLISHED = {
    "openai_chat": typed_fields(chat_create_params, "CompletionCreateParams"),
    "openai_completions": typed_fields(completion_create_params, "CompletionCreateParams"),
    "openai_responses": typed_fields(response_create_params, "ResponseCreateParams"),
    "anthropic_messages": typed_fields(message_create_params, "MessageCreateParams")
    | typed_fields(beta_message_create_params, "MessageCreateParams"),
    "google_generate_content: generationConfig": {
        field.alias or name for name, field in GenerationConfig.model_fields.items()
    },
}


@pytest.mark.parametrize("dialect", PUBLISHED)
def test_every_published_field_is_named(dialect: str) -> None:
    named = {*used_fields(dialect), *WITHOUT_EFFECT[dialect], *REFUSED[dialect]}
    assert PUBLISHED[dialect] - named == set()


@pytest.mark.parametrize("dialect", BODIES)
def test_a_field_without_effect_changes_no_request_and_is_recorded(dialect: str) -> None:
    parser, body = BODIES[dialect]
    plain = parser.parse(body)
    for name in WITHOUT_EFFECT[dialect]:
        field, _, key = name.partition(".")
        value: Any = {key: "x"} if key else 3 if name in ("n", "max_tool_calls") else {} if name == "metadata" else "x"
        parsed = parser.parse({**body, field: value})
        assert parsed.requests == plain.requests, name
        assert parsed.params[field] == value


@pytest.mark.parametrize("dialect", BODIES)
def test_a_refused_field_is_refused_by_name(dialect: str) -> None:
    parser, body = BODIES[dialect]
    for name in REFUSED[dialect]:
        with pytest.raises(RequestError) as caught:
            parser.parse({**body, name: "x"})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_every_dialect_has_its_tables() -> None:
    assert FIELDS.keys() == WITHOUT_EFFECT.keys() == REFUSED.keys()
