"""The `anthropic` SDK against Polar: the calls that few agents make. The common ones are in tests/gateway."""

import os

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from pydantic import BaseModel

URL = os.environ["POLAR_URL"]
USER = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PAGE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a page"}, "title": "t"}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client():
    with Anthropic(base_url=URL, api_key="anthropic-sdk", max_retries=0) as made:
        yield made


@pytest.fixture
def create(client):
    return lambda **fields: client.messages.create(**{"model": "m", "max_tokens": 2048, "messages": USER, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]},
        {"metadata": {"user_id": "u"}, "service_tier": "auto"},
        {"extra_body": {"top_k": 5, "top_p": 0.9, "temperature": 0.5}},
        {"stop_sequences": ["zebra"]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "disabled"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, PICTURE]}]},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"extra_headers": {"anthropic-beta": "a-beta"}, "timeout": 30},
    ],
    ids=["system", "metadata", "sampling", "stop", "thinking", "no thinking", "picture", "no tool", "beta header"],
)
def test_fields(create, fields):
    assert create(**fields).content[-1].text == "You said: hi"


def test_document(create):
    assert "a page" in create(messages=[{"role": "user", "content": [PAGE]}]).content[0].text


def test_thinking(create):
    asked = [{"role": "user", "content": "please think"}]
    found = create(messages=asked, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in found.content] == ["thinking", "text"]
    again = [*asked, {"role": "assistant", "content": found.content}, *USER]
    assert create(messages=again).content[-1].text == "You said: hi"


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, ["weather"]), ({"type": "tool", "name": "clock"}, ["clock"])],
    ids=["any", "named"],
)
def test_tool_choice(create, choice, names):
    found = create(tools=[WEATHER, CLOCK], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert ([block.name for block in found.content], found.stop_reason) == (names, "tool_use")


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_tools_that_the_client_runs(client, kind):
    name = {"bash": "bash", "text": "str_replace_based_edit_tool", "memory": "memory"}[kind.split("_")[0]]
    found = client.beta.messages.create(model="m", max_tokens=999, messages=USER, tools=[{"type": kind, "name": name}])
    assert found.content[0].name == name


def test_stream_helper(client):
    with client.messages.stream(model="m", max_tokens=999, messages=USER) as stream:
        assert "".join(stream.text_stream) == "You said: hi"
        assert stream.get_final_message().usage.output_tokens > 0


def test_stream_helper_events(client):
    with client.messages.stream(model="m", max_tokens=999, messages=USER, tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
    assert "input_json" in kinds
    assert kinds[-1] == "message_stop"


def test_raw_response(client):
    raw = client.messages.with_raw_response.create(model="m", max_tokens=999, messages=USER)
    assert raw.headers["request-id"] == raw.parse()._request_id


def test_streaming_response(client):
    with client.messages.with_streaming_response.create(model="m", max_tokens=99, messages=USER, stream=True) as raw:
        assert "event: message_stop" in list(raw.iter_lines())


def test_parse(client):
    asked = [{"role": "user", "content": "'Ada' is 36"}]
    found = client.messages.parse(model="m", max_tokens=999, messages=asked, output_format=Person)
    assert found.parsed_output == Person(name="Ada", age=36)


def test_tool_runner(client):
    @beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"{city} is sunny"

    asked = [{"role": "user", "content": "weather in 'Oslo'"}]
    runner = client.beta.messages.tool_runner(model="m", max_tokens=999, messages=asked, tools=[weather])
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]


def test_token_count(client, create):
    counted = client.messages.count_tokens(model="m", messages=USER, tools=[WEATHER])
    asked = create(tools=[WEATHER], tool_choice={"type": "none"}).usage.input_tokens
    assert counted.input_tokens >= asked > 0
    assert client.beta.messages.count_tokens(model="m", messages=USER).input_tokens > 0


def test_beta_messages(client):
    found = client.beta.messages.create(model="m", max_tokens=999, messages=USER, betas=["a-beta"])
    assert found.content[0].text == "You said: hi"


def test_length(create):
    assert create(max_tokens=2).stop_reason == "max_tokens"


def test_models(client):
    names = [model.id for model in client.models.list()]
    assert client.models.retrieve(names[0]).id == names[0]


async def test_async_client():
    async with (
        AsyncAnthropic(base_url=URL, api_key="anthropic-sdk") as client,
        client.messages.stream(model="m", max_tokens=999, messages=USER) as stream,
    ):
        assert await stream.get_final_text() == "You said: hi"


@pytest.mark.parametrize(
    "fields",
    [{"messages": []}, {"max_tokens": 0}, {"extra_body": {"temperature": 9}}, {"tool_choice": {"type": "any"}}],
    ids=["messages", "max_tokens", "temperature", "tool choice"],
)
def test_refused(create, fields):
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(**fields)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.request_id == caught.value.body["request_id"]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.messages.batches.list(),
        lambda client: client.beta.files.list(),
        lambda client: client.beta.skills.list(),
        lambda client: client.beta.files.retrieve_metadata("file_1"),
    ],
    ids=["batches", "files", "skills", "file"],
)
def test_routes_that_are_not_served(client, call):
    with pytest.raises(anthropic.NotFoundError) as caught:
        call(client)
    assert str(caught.value)
