"""LiteLLM against Polar, through its OpenAI, Anthropic and Gemini routes."""

import json
import os

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads its list of models
import litellm

URL = os.environ["POLAR_URL"]
ROUTES = {
    "openai": {"model": "openai/scripted-model", "api_base": URL + "/v1"},
    "anthropic": {"model": "anthropic/scripted-model", "api_base": URL, "max_tokens": 999},
    # A name that LiteLLM knows: with others it writes the schema of an object into the prompt.
    "gemini": {"model": "gemini/gemini-2.5-pro", "api_base": URL + "/v1beta"},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(params=ROUTES)
def route(request):
    return {**ROUTES[request.param], "api_key": "litellm"}


def _user(text):
    return [{"role": "user", "content": text}]


def test_text(route):
    found = litellm.completion(messages=_user("hi"), **route)
    assert found.choices[0].message.content == "You said: hi"
    assert found.usage.completion_tokens > 0


async def test_async_text(route):
    found = await litellm.acompletion(messages=_user("hi"), **route)
    assert found.choices[0].message.content == "You said: hi"


def test_stream(route):
    pieces = [
        piece.choices[0].delta.content or ""
        for piece in litellm.completion(messages=_user("good morning"), stream=True, **route)
    ]
    assert "".join(pieces) == "You said: good morning"


def test_tool_loop(route):
    asked = _user("weather in 'Oslo'")
    first = litellm.completion(messages=asked, tools=[TOOL], **route).choices[0].message
    assert json.loads(first.tool_calls[0].function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    found = litellm.completion(messages=[*asked, first, result], tools=[TOOL], **route)
    assert found.choices[0].message.content == "You said: weather in 'Oslo'"


def test_streamed_tool_call(route):
    pieces = list(litellm.completion(messages=_user("weather in 'Oslo'"), tools=[TOOL], stream=True, **route))
    found = litellm.stream_chunk_builder(pieces)
    assert json.loads(found.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo"}


def test_responses():
    found = litellm.responses(input="hi", api_key="litellm", **ROUTES["openai"])
    assert found.output[0].content[0].text == "You said: hi"


def test_token_limit(route):
    found = litellm.completion(messages=_user("a long text"), **{**route, "max_tokens": 2})
    assert found.choices[0].finish_reason == "length"


def test_object(route):
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    found = litellm.completion(messages=_user("'Ada' is 36"), response_format=form, **route)
    assert json.loads(found.choices[0].message.content) == {"name": "Ada"}


def test_error(route):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=_user("hi"), temperature=9, num_retries=0, **route)
