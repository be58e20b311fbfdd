"""The `google-genai` SDK against Polar: the calls that few agents make. The common ones are in tests/gateway."""

import enum
import os

import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

OPTIONS = types.HttpOptions(base_url=os.environ["POLAR_URL"], retry_options=types.HttpRetryOptions(attempts=1))


class Person(BaseModel):
    name: str
    age: int


class Sky(enum.Enum):
    SUNNY = "sunny"
    RAINY = "rainy"


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"{city} is sunny"


def clock() -> str:
    """Return the time."""
    return "noon"


@pytest.fixture
def client():
    with genai.Client(api_key="google-sdk", http_options=OPTIONS) as made:
        yield made


@pytest.fixture
def ask(client):
    return lambda contents="hi", **fields: client.models.generate_content(
        model="m", contents=contents, config=types.GenerateContentConfig(**fields)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"system_instruction": "be brief"},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7},
        {"stop_sequences": ["zebra"], "max_output_tokens": 999},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"thinking_config": types.ThinkingConfig(thinking_budget=0)},
        {"safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]},
        {"response_modalities": ["TEXT"]},
        {"labels": None, "http_options": types.HttpOptions(headers={"x-a": "b"})},
    ],
    ids=["system", "sampling", "stop", "penalties", "no thinking", "safety", "text", "header"],
)
def test_fields(ask, fields):
    assert ask(**fields).text == "You said: hi"


def test_object(ask):
    found = ask("'Ada' is 36", response_mime_type="application/json", response_schema=Person)
    assert found.parsed == Person(name="Ada", age=36)


def test_list_of_objects(ask):
    found = ask("'Ada' is 36", response_mime_type="application/json", response_schema=list[Person])
    assert found.parsed == [Person(name="Ada", age=36)]


def test_json_schema(ask):
    schema = Person.model_json_schema()
    found = ask("'Ada' is 36", response_mime_type="application/json", response_json_schema=schema)
    assert Person.model_validate_json(found.text).age == 36


def test_choice(ask):
    found = ask(response_mime_type="text/x.enum", response_schema=Sky)
    assert found.parsed is Sky.SUNNY


def test_automatic_function_calling(ask):
    found = ask("weather in 'Oslo'", tools=[weather])
    assert found.text == "You said: weather in 'Oslo'"
    assert len(found.automatic_function_calling_history) == 3


@pytest.mark.parametrize(
    ("mode", "allowed", "names"),
    [("NONE", None, []), ("ANY", None, ["weather"]), ("ANY", ["clock"], ["clock"])],
    ids=["none", "any", "allowed"],
)
def test_function_calling_mode(ask, mode, allowed, names):
    chosen = types.FunctionCallingConfig(mode=mode, allowed_function_names=allowed)
    found = ask(
        tools=[weather, clock],
        tool_config=types.ToolConfig(function_calling_config=chosen),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    assert [call.name for call in found.function_calls or ()] == names


def test_thoughts(ask):
    found = ask("please think", thinking_config=types.ThinkingConfig(include_thoughts=True))
    assert [part.thought for part in found.candidates[0].content.parts] == [True, None]


def test_chat(client):
    chat = client.chats.create(model="m", config=types.GenerateContentConfig(tools=[weather]))
    assert chat.send_message("weather in 'Oslo'").text == "You said: weather in 'Oslo'"
    assert "".join(piece.text or "" for piece in chat.send_message_stream("thanks")).endswith("thanks")
    assert chat.get_history()[-1].role == "model"


def test_picture(ask):
    picture = types.Part.from_bytes(data=b"\0", mime_type="image/png")
    assert ask(["hi", picture]).text == "You said: hi"


def test_candidates_and_logprobs(ask):
    found = ask(candidate_count=2, response_logprobs=True, logprobs=1)
    assert [candidate.logprobs_result is not None for candidate in found.candidates] == [True, True]


def test_length(ask):
    assert ask(max_output_tokens=2).candidates[0].finish_reason is types.FinishReason.MAX_TOKENS


def test_token_count(client):
    assert client.models.count_tokens(model="m", contents="hi").total_tokens > 0


def test_models(client):
    names = [model.name for model in client.models.list()]
    assert client.models.get(model=names[0]).name == names[0]


async def test_async_client():
    async with genai.Client(api_key="google-sdk", http_options=OPTIONS).aio as client:
        found = await client.models.generate_content(model="m", contents="hi")
    assert found.text == "You said: hi"


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 9}, {"max_output_tokens": 0}, {"candidate_count": 0}],
    ids=["temperature", "length", "candidates"],
)
def test_refused(ask, fields):
    with pytest.raises(errors.ClientError) as caught:
        ask(**fields)
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.models.embed_content(model="m", contents="hi"),
        lambda client: client.caches.list(),
        lambda client: client.files.list(),
        lambda client: client.batches.list(),
    ],
    ids=["embeddings", "caches", "files", "batches"],
)
def test_routes_that_are_not_served(client, call):
    with pytest.raises(errors.ClientError) as caught:
        list(call(client))
    assert caught.value.code in (404, 405)
    assert caught.value.message
