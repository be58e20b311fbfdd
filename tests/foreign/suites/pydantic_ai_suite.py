"""Pydantic AI against Polar, through its OpenAI (Chat and Responses) and Anthropic models."""

import os

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ["POLAR_URL"]


class Person(BaseModel):
    name: str
    age: int


def _models():
    openai = OpenAIProvider(base_url=URL + "/v1", api_key="pydantic-ai")
    return {
        "chat": OpenAIChatModel("scripted-model", provider=openai),
        "responses": OpenAIResponsesModel("scripted-model", provider=openai),
        "anthropic": AnthropicModel("scripted-model", provider=AnthropicProvider(base_url=URL, api_key="pydantic-ai")),
    }


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request):
    return _models()[request.param]


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"{city} is sunny"


async def test_text(model):
    result = await Agent(model, instructions="be brief").run("hi")
    assert result.output == "You said: hi"


async def test_stream(model):
    async with Agent(model).run_stream("good morning") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "You said: good morning"
    assert len(pieces) > 1


async def test_tool_loop(model):
    assert (await Agent(model, tools=[weather]).run("weather in 'Oslo'")).output == "You said: weather in 'Oslo'"


async def test_streamed_tool_loop(model):
    async with Agent(model, tools=[weather]).run_stream("weather in 'Oslo'") as result:
        assert await result.get_output() == "You said: weather in 'Oslo'"


async def test_history(model):
    agent = Agent(model, tools=[weather])
    first = await agent.run("please think of 'Oslo'")
    assert (await agent.run("thanks", message_history=first.all_messages())).output == "You said: thanks"


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
async def test_typed_output(model, form):
    """Without the form that is described in the prompt, which only a model can read."""
    if form is NativeOutput and isinstance(model, AnthropicModel):
        pytest.skip("Pydantic AI allows it only for Anthropic's own model names")
    result = await Agent(model, output_type=form(Person)).run("'Ada' is 36")
    assert result.output == Person(name="Ada", age=36)
