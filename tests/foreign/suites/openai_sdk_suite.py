"""The `openai` SDK against Polar: the calls that few agents make. The common ones are in tests/gateway."""

import os

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

URL = os.environ["POLAR_URL"] + "/v1"
USER = [{"role": "user", "content": "hi"}]
ADA = [{"role": "user", "content": "'Ada' is 36"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
FLAT = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
CUSTOM = {"type": "custom", "name": "note", "description": "Take a note."}


class Person(BaseModel):
    name: str
    age: int


class Weather(BaseModel):
    city: str


@pytest.fixture
def client():
    with OpenAI(base_url=URL, api_key="openai-sdk", max_retries=0) as made:
        yield made


@pytest.fixture
def chat(client):
    return lambda **fields: client.chat.completions.create(**{"model": "m", "messages": USER, **fields})


@pytest.fixture
def respond(client):
    return lambda **fields: client.responses.create(**{"model": "m", "input": "hi", **fields})


def test_chat_parse(client):
    found = client.chat.completions.parse(model="m", messages=ADA, response_format=Person)
    assert found.choices[0].message.parsed == Person(name="Ada", age=36)


def test_chat_parse_of_a_tool_call(client):
    tool = openai.pydantic_function_tool(Weather, name="weather")
    found = client.chat.completions.parse(model="m", messages=[{"role": "user", "content": "'Oslo'"}], tools=[tool])
    assert found.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Oslo")


def test_chat_stream_helper_parses(client):
    with client.chat.completions.stream(model="m", messages=ADA, response_format=Person) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == Person(name="Ada", age=36)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_chat_stream_helper_of_a_tool_call(client):
    with client.chat.completions.stream(model="m", messages=USER, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def test_raw_response(client):
    raw = client.chat.completions.with_raw_response.create(model="m", messages=USER)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == "You said: hi"
    assert raw.parse()._request_id == raw.headers["x-request-id"]


def test_streaming_response(client):
    with client.chat.completions.with_streaming_response.create(model="m", messages=USER, stream=True) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "developer", "content": "be brief"}, *USER]},
        {"messages": [{"role": "user", "name": "ada", "content": [{"type": "text", "text": "hi"}]}]},
        {"seed": 7, "stop": ["zebra"], "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"metadata": {"a": "b"}, "store": False, "user": "u", "service_tier": "auto", "safety_identifier": "s"},
        {"max_tokens": 99},
        {"max_completion_tokens": 99, "reasoning_effort": "low", "verbosity": "low"},
        {"modalities": ["text"], "prompt_cache_key": "k", "logit_bias": {"65": -1}},
        {"response_format": {"type": "text"}, "parallel_tool_calls": False},
        {"extra_headers": {"x-a": "b"}, "extra_query": {"c": "d"}, "timeout": 30},
    ],
    ids=["developer", "name", "penalties", "metadata", "max_tokens", "effort", "modalities", "text", "extra"],
)
def test_chat_fields(chat, fields):
    assert chat(**fields).choices[0].message.content == "You said: hi"


def test_chat_top_logprobs(chat):
    token = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
    assert token.logprob <= 0
    assert bytes(token.bytes)


def test_chat_usage_of_a_stream(chat):
    *_, last = chat(stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens > 0


def test_chat_usage_without_a_stream_is_refused(chat):
    with pytest.raises(openai.BadRequestError):
        chat(stream_options={"include_usage": True})


def test_chat_custom_tool(chat):
    call = chat(tools=[{"type": "custom", "custom": {"name": "note", "description": "Take a note."}}])
    assert (call.choices[0].message.tool_calls[0].type, call.choices[0].finish_reason) == ("custom", "tool_calls")


def test_chat_allowed_tools(chat):
    named = {"type": "function", "function": {"name": "clock"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    found = chat(tools=[TOOL, CLOCK], tool_choice=choice)
    assert [call.function.name for call in found.choices[0].message.tool_calls] == ["clock"]


def test_chat_legacy_functions(chat):
    found = chat(functions=[CLOCK["function"]], function_call={"name": "clock"})
    assert (found.choices[0].message.function_call.name, found.choices[0].finish_reason) == ("clock", "function_call")


def test_chat_image(chat):
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    assert chat(messages=[{"role": "user", "content": parts}]).choices[0].message.content == "You said: hi"


def test_chat_length(chat):
    assert chat(max_completion_tokens=2).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"temperature": 9},
        {"n": 0},
        {"logit_bias": {"65": 1000}},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_schema"}},
    ],
    ids=["messages", "temperature", "n", "logit_bias", "tool_choice", "schema"],
)
def test_chat_refused(chat, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(**fields)
    assert caught.value.body["type"] == "invalid_request_error"


async def test_async_client():
    async with AsyncOpenAI(base_url=URL, api_key="openai-sdk") as client:
        found = await client.with_options(timeout=30).chat.completions.create(model="m", messages=USER)
        pieces = [piece async for piece in await client.completions.create(model="m", prompt="a", stream=True)]
    assert found.choices[0].message.content == "You said: hi"
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == "a completion"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2]]], ids=["text", "texts", "ids", "lists of ids"])
def test_completion_prompts(client, prompt):
    found = client.completions.create(model="m", prompt=prompt, max_tokens=99, n=1)
    assert {choice.text for choice in found.choices} == {"a completion"}


def test_completion_logprobs(client):
    found = client.completions.create(model="m", prompt="a", logprobs=1).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) > 0


def test_models(client):
    names = [model.id for model in client.models.list()]
    assert client.models.retrieve(names[0]).id == names[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.embeddings.create(model="m", input="a"),
        lambda client: client.moderations.create(input="a"),
        lambda client: client.images.generate(prompt="a"),
        lambda client: client.files.list(),
        lambda client: client.batches.list(),
        lambda client: client.vector_stores.list(),
        lambda client: client.fine_tuning.jobs.list(),
        lambda client: client.chat.completions.retrieve("chatcmpl-1"),
    ],
    ids=["embeddings", "moderations", "images", "files", "batches", "vector stores", "fine-tuning", "stored chats"],
)
def test_routes_that_are_not_served(client, call):
    """The SDK's error has a message, because the answer has OpenAI's error form."""
    with pytest.raises(openai.NotFoundError) as caught:
        call(client)
    assert caught.value.body["message"]


def test_response_parse(client):
    found = client.responses.parse(model="m", input=ADA, text_format=Person)
    assert found.output_parsed == Person(name="Ada", age=36)


def test_response_stream_helper_parses(client):
    with client.responses.stream(model="m", input=ADA, text_format=Person) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_response_function_tool_is_parsed(client):
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"]
    found = client.responses.parse(model="m", input="'Oslo'", tools=[{"type": "function", **tool}])
    assert found.output[0].parsed_arguments == {"city": "Oslo"}


def test_response_custom_tool(respond):
    call = respond(tools=[CUSTOM]).output[0]
    assert (call.type, call.name) == ("custom_tool_call", "note")


def test_response_retrieval(client, respond):
    made = respond()
    assert client.responses.retrieve(made.id) == made
    assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]


def test_response_events_are_streamed_again(client, respond):
    with client.responses.stream(model="m", input="hi") as stream:
        response = stream.get_final_response()
    again = list(client.responses.retrieve(response.id, stream=True))
    later = list(client.responses.retrieve(response.id, stream=True, starting_after=again[2].sequence_number))
    assert [event.type for event in later] == [event.type for event in again[3:]]


def test_response_continues_a_stream_by_its_id(client, respond):
    with client.responses.stream(model="m", input="hi") as stream:
        made = stream.get_final_response()
    with client.responses.stream(response_id=made.id, starting_after=1) as stream:
        assert stream.get_final_response().output_text == "You said: hi"


def test_response_deletion(client, respond):
    made = respond()
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_response_that_is_not_stored(client, respond):
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(respond(store=False).id)


def test_response_in_the_background(client, respond):
    made = respond(background=True)
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert made.output_text == "You said: hi"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(respond().id)


def test_response_compaction(client, respond):
    compacted = client.responses.compact(model="m", previous_response_id=respond().id)
    history = [item.to_dict() for item in compacted.output]
    assert respond(input=[*history, *USER]).output_text == "You said: hi"


def test_response_token_count(client, respond):
    counted = client.responses.input_tokens.count(model="m", input="hi")
    assert counted.input_tokens == respond().usage.input_tokens


def test_response_logprobs(respond):
    found = respond(include=["message.output_text.logprobs"], top_logprobs=1)
    assert found.output[0].content[0].logprobs


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"truncation": "auto", "service_tier": "default", "max_tool_calls": 3, "parallel_tool_calls": False},
        {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "instructions": "be brief"},
        {"input": [{"role": "developer", "content": "be brief"}, *USER], "temperature": 0.5, "top_p": 0.5},
        {"tools": [FLAT], "tool_choice": "none"},
    ],
    ids=["metadata", "truncation", "reasoning", "text", "developer", "tool choice"],
)
def test_response_fields(respond, fields):
    assert respond(**fields).output_text == "You said: hi"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"id": "p"}},
        {"previous_response_id": "resp_0"},
        {"conversation": "conv_0", "previous_response_id": "resp_0"},
        {"input": []},
        {"max_output_tokens": 0},
    ],
    ids=["prompt", "previous response", "two references", "input", "limit"],
)
def test_response_refused(respond, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(**fields)
    assert caught.value.body["message"]


def test_conversations(client, respond):
    made = client.conversations.create(metadata={"a": "b"}, items=[{"type": "message", **USER[0]}])
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    respond(conversation=made.id, input="more")
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert [item.type for item in items] == ["message"] * 3
    assert client.conversations.items.retrieve(items[1].id, conversation_id=made.id).id == items[1].id
    client.conversations.items.delete(items[1].id, conversation_id=made.id)
    client.conversations.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_responses_over_a_websocket(client):
    with client.responses.connect() as connection:
        connection.response.create(model="m", input="hi")
        for event in connection:
            if event.type == "response.completed":
                break
    assert event.response.output_text == "You said: hi"
