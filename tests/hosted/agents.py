"""One agent for each dialect, written with the official SDK: it asks, runs a tool, and asks again."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anthropic import AsyncAnthropic
from google import genai
from google.genai import types
from openai import AsyncOpenAI

SYSTEM, QUESTION, RESULT = "Be brief.", "What is the weather in Zürich?", "rain, 9 °C"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Look it up.", "parameters": SCHEMA}


@dataclass
class Exchange:
    """What an agent read."""

    text: str
    arguments: dict[str, Any]
    final: str
    input_tokens: int
    """Prompt tokens of the last answer, those read from a cache included."""
    output_tokens: int
    reasoning: str = ""


def openai_client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url + "/v1", api_key="agent", max_retries=0, timeout=60)


def anthropic_client(url: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="agent", max_retries=0, timeout=60)


def google_client(url: str) -> Any:
    retries = types.HttpRetryOptions(attempts=1)
    options = types.HttpOptions(base_url=url, timeout=60_000, retry_options=retries)
    return genai.Client(api_key="agent", http_options=options).aio


async def chat_agent(url: str, stream: bool) -> Exchange:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    async with openai_client(url) as client:

        async def ask() -> Any:
            body: Any = {"model": "m", "messages": messages, "tools": tools, "max_tokens": 500}
            if not stream:
                return await client.chat.completions.create(**body)
            async with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
                return await events.get_final_completion()

        first = (await ask()).choices[0].message
        (call,) = first.tool_calls
        messages.append(first.model_dump(exclude_none=True, exclude={"parsed", "refusal", "reasoning"}))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        second = await ask()
    final, usage = second.choices[0].message, second.usage
    arguments = json.loads(call.function.arguments)
    return Exchange(first.content, arguments, final.content, usage.prompt_tokens, usage.completion_tokens)


async def responses_agent(url: str, stream: bool) -> Exchange:
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    items: Any = [{"role": "user", "content": QUESTION}]
    async with openai_client(url) as client:

        async def ask() -> Any:
            body: Any = {"model": "m", "input": items, "instructions": SYSTEM, "tools": tools, "store": False}
            body["reasoning"] = {"effort": "low", "summary": "auto"}
            if not stream:
                return await client.responses.create(**body)
            async with client.responses.stream(**body) as events:
                return await events.get_final_response()

        first = await ask()
        (call,) = [item for item in first.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
        second = await ask()
    usage = second.usage
    reasoning = "".join(part.text for item in first.output if item.type == "reasoning" for part in item.summary)
    arguments = json.loads(call.arguments)
    return Exchange(
        first.output_text, arguments, second.output_text, usage.input_tokens, usage.output_tokens, reasoning
    )


async def messages_agent(url: str, stream: bool) -> Exchange:
    tools: Any = [{"name": "get_weather", "description": "Look it up.", "input_schema": SCHEMA}]
    tools[-1]["cache_control"] = {"type": "ephemeral"}
    system: Any = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    messages: Any = [{"role": "user", "content": QUESTION}]
    async with anthropic_client(url) as client:

        async def ask() -> Any:
            body: Any = {"model": "m", "messages": messages, "system": system, "tools": tools, "max_tokens": 4000}
            body["thinking"] = {"type": "enabled", "budget_tokens": 2000}
            if not stream:
                return await client.messages.create(**body)
            async with client.messages.stream(**body) as events:
                return await events.get_final_message()

        first = await ask()
        (call,) = [block for block in first.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages.append({"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]})
        second = await ask()
    usage = second.usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    text = "".join(block.text for block in first.content if block.type == "text")
    reasoning = "".join(block.thinking for block in first.content if block.type == "thinking")
    return Exchange(text, call.input, second.content[-1].text, prompt, usage.output_tokens, reasoning)


async def generate_agent(url: str, stream: bool) -> Exchange:
    declaration = types.FunctionDeclaration(
        name="get_weather", description="Look it up.", parameters_json_schema=SCHEMA
    )
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM,
        tools=[types.Tool(function_declarations=[declaration])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        thinking_config=types.ThinkingConfig(include_thoughts=True, thinking_budget=512),
        max_output_tokens=500,
    )
    contents: Any = [types.Content(role="user", parts=[types.Part(text=QUESTION)])]
    async with google_client(url) as client:

        async def ask() -> tuple[list[Any], Any]:
            if not stream:
                answer = await client.models.generate_content(model="m", contents=contents, config=config)
                return answer.candidates[0].content.parts, answer.usage_metadata
            parts: list[Any] = []
            usage = None
            async for chunk in await client.models.generate_content_stream(model="m", contents=contents, config=config):
                parts += chunk.candidates[0].content.parts
                usage = chunk.usage_metadata or usage
            return parts, usage

        first, _ = await ask()
        (call,) = [part.function_call for part in first if part.function_call]
        contents.append(types.Content(role="model", parts=first))
        response = types.FunctionResponse(id=call.id, name=call.name, response={"output": RESULT})
        contents.append(types.Content(role="user", parts=[types.Part(function_response=response)]))
        second, usage = await ask()
    text = "".join(part.text for part in first if part.text and not part.thought)
    reasoning = "".join(part.text for part in first if part.thought)
    final = "".join(part.text for part in second if part.text and not part.thought)
    output = usage.candidates_token_count + (usage.thoughts_token_count or 0)
    return Exchange(text, call.args, final, usage.prompt_token_count, output, reasoning)


Agent = Callable[[str, bool], Awaitable[Exchange]]
AGENTS: Mapping[str, Agent] = {
    "openai_chat": chat_agent,
    "openai_responses": responses_agent,
    "anthropic_messages": messages_agent,
    "google_generate_content": generate_agent,
}
"""The agents with tools, by dialect. Completions has no tools."""
