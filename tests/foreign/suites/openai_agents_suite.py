"""The OpenAI Agents SDK against Polar: runs, streams, tools, handoffs, typed output, sessions, conversations."""

import os

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
KINDS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


class Person(BaseModel):
    name: str
    age: int


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"{city} is sunny"


@pytest.fixture
def client():
    return AsyncOpenAI(base_url=os.environ["POLAR_URL"] + "/v1", api_key="agents", max_retries=0)


@pytest.fixture(params=KINDS)
def model(request, client):
    return KINDS[request.param]("scripted-model", client)


async def test_text(model):
    result = await Runner.run(Agent("a", instructions="be brief", model=model), "hi")
    assert result.final_output == "You said: hi"
    assert result.context_wrapper.usage.output_tokens > 0


async def test_stream(model):
    result = Runner.run_streamed(Agent("a", model=model), "hi")
    kinds = {event.type async for event in result.stream_events()}
    assert result.final_output == "You said: hi"
    assert "raw_response_event" in kinds


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_loop(model, stream):
    agent = Agent("a", model=model, tools=[weather])
    if stream:
        result = Runner.run_streamed(agent, "weather in 'Oslo'")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "weather in 'Oslo'")
    assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == ["Oslo is sunny"]
    assert result.final_output == "You said: weather in 'Oslo'"


async def test_typed_output(model):
    result = await Runner.run(Agent("a", model=model, output_type=Person), "'Ada' is 36")
    assert result.final_output == Person(name="Ada", age=36)


async def test_handoff(model):
    other = Agent("other", model=model, instructions="you are the other")
    result = await Runner.run(Agent("a", model=model, handoffs=[other]), "hi")
    assert (result.last_agent.name, result.final_output) == ("other", "You said: hi")


async def test_local_session(model):
    agent, session = Agent("a", model=model, tools=[weather]), SQLiteSession("s")
    for text in ("weather in 'Oslo'", "thanks"):
        result = await Runner.run(agent, text, session=session)
        assert result.final_output == f"You said: {text}"


async def test_reasoning(model):
    assert (await Runner.run(Agent("a", model=model), "please think")).final_output == "You said: please think"


async def test_required_tool(model):
    settings = ModelSettings(tool_choice="required", temperature=0.5, parallel_tool_calls=False)
    agent = Agent("a", model=model, tools=[weather], model_settings=settings)
    assert (await Runner.run(agent, "'Oslo'")).final_output == "You said: 'Oslo'"


async def test_conversations_session(client):
    """The history is kept by Polar; the SDK adds to it and takes from it.

    Not with the SDK's chat model: the session removes the ids of its items, and that model accepts none without an id.
    """
    model = OpenAIResponsesModel("scripted-model", client)
    agent, session = Agent("a", model=model, tools=[weather]), OpenAIConversationsSession(openai_client=client)
    for text in ("think of the weather in 'Oslo'", "thanks"):
        result = await Runner.run(agent, text, session=session)
        assert result.final_output == f"You said: {text}"
    items = await session.get_items()
    assert [item["type"] for item in items].count("function_call_output") >= 1
    assert [item["id"] for item in await session.get_items(limit=2)] == [item["id"] for item in items[-2:]]
    assert (await session.pop_item())["id"] == items[-1]["id"]
    await session.add_items([{"role": "user", "content": str(number)} for number in range(25)])
    assert len(await session.get_items()) == len(items) - 1 + 25
    await session.clear_session()
    assert await session.get_items() == []


async def test_conversation_of_the_server(client):
    agent = Agent("a", model=OpenAIResponsesModel("scripted-model", client), tools=[weather])
    conversation = await client.conversations.create()
    for text in ("weather in 'Oslo'", "thanks"):
        result = await Runner.run(agent, text, conversation_id=conversation.id)
        assert result.final_output == f"You said: {text}"
    items = [item async for item in client.conversations.items.list(conversation.id, order="asc")]
    turn = ["message", "function_call", "function_call_output", "message"]
    assert [item.type for item in items] == turn * 2


async def test_previous_response(client):
    agent = Agent("a", model=OpenAIResponsesModel("scripted-model", client), tools=[weather])
    first = await Runner.run(agent, "weather in 'Oslo'")
    second = await Runner.run(agent, "thanks", previous_response_id=first.last_response_id)
    assert second.final_output == "You said: thanks"
