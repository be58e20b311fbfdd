"""Anthropic Messages. Source: https://docs.anthropic.com/en/api/messages

What a request may hold and what becomes of it is told in `anthropic_content` (messages) and `anthropic_tools` (tools);
`anthropic_stream` writes the answer. Fields that only steer Anthropic's own servers (`metadata`, `service_tier`,
`context_management`, `container`, `mcp_servers`, `output_config.effort`, ...) and every `anthropic-beta` are tolerated
and recorded. `context_management` is not carried out: clearing old tool results would rewrite the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from polar_proxy.dialects.anthropic.content import parse_messages, parse_system
from polar_proxy.dialects.anthropic.encoder import AnthropicEncoder
from polar_proxy.dialects.anthropic.errors import error_body
from polar_proxy.dialects.anthropic.tools import AnthropicTools, parse_tool_choice, parse_tools
from polar_proxy.dialects.base import Dialect, Encoder, ParsedRequest, TokenCount, stored_tools, to_json
from polar_proxy.dialects.openai_common import required, take
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, Sampling

HELLO_RESPONSE = orjson.dumps({"message": "hello"})
"""The body of `/api/hello`, which Claude Code asks (HEAD) to learn whether the server is there."""


class AnthropicMessages(Dialect):
    """`POST /v1/messages`. Heartbeats are SSE comments: `ping` events too are accepted ahead of `message_start` by the
    SDKs, but comments by any reader of event streams."""

    name = "anthropic_messages"

    def parse(self, body: Json) -> ParsedRequest:
        model, messages, tools = _conversation(body)
        if messages[-1].role == "assistant":
            raise RequestError(
                "This model does not support assistant message prefill. The conversation must end with a user message.",
                param="messages",
            )
        choice, parallel = parse_tool_choice(body, tools)
        request = ChatRequest(
            model=model,
            messages=messages,
            sampling=_sampling(body),
            tools=tools.offered,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=_response_format(body),
            template_kwargs=_template_kwargs(body),
        )
        params = {key: value for key, value in body.items() if key not in ("messages", "system", "tools")}
        to_json(params, "body")
        return ParsedRequest(
            requests=(request,),
            stream=bool(take(body, "stream", bool)),
            messages=(_raw(body),),
            tools=to_json(body["tools"], "tools") if body.get("tools") else None,
            params=params,
            options={
                "model": model,
                "eager": sorted(tools.eager),
                "omit_thinking": (take(body, "thinking", dict) or {}).get("display") == "omitted",
            },
        )

    def body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        items = [orjson.loads(message) for message in messages]
        body = {**params, "messages": items, **stored_tools(tools)}
        # A first message of the client's own with the role `system` reads alike in either place, but cannot be all
        # there is in the one, nor say nothing in the other.
        if len(items) > 1 and items[0]["role"] == "system" and items[0].get("content"):
            body |= {"system": items[0]["content"], "messages": items[1:]}
        return body

    def encoder(self, parsed: ParsedRequest, call_id: str, created: int) -> Encoder:
        return AnthropicEncoder(parsed.options, call_id)

    def error(self, error: RequestError) -> bytes:
        return error_body(error)


class AnthropicTokenCount(TokenCount):
    """`POST /v1/messages/count_tokens`: the length of the prompt that the same body would be sampled from."""

    def parse(self, body: Json) -> ChatRequest:
        model, messages, tools = _conversation(body)
        choice, parallel = parse_tool_choice(body, tools)
        return ChatRequest(
            model=model,
            messages=messages,
            tools=tools.offered,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            template_kwargs=_template_kwargs(body),
        )

    def respond(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def error(self, error: RequestError) -> bytes:
        return error_body(error)


def _conversation(body: Json) -> tuple[str, tuple[Message, ...], AnthropicTools]:
    model = required(body, "model", str)
    raw = required(body, "messages", list)
    if not raw:
        raise RequestError("Invalid 'messages': at least one message is required.", param="messages")
    tools = parse_tools(body)
    system = parse_system(body.get("system"), tools)
    messages = parse_messages(raw, tools)
    return model, tuple(messages if system is None else [system, *messages]), tools


def _raw(body: Json) -> tuple[bytes, ...]:
    """The conversation as it came, for the store: the system prompt first, as a message of its own."""
    system = body.get("system")
    head = () if system in (None, "", []) else (to_json({"role": "system", "content": system}, "system"),)
    return (*head, *(to_json(item, f"messages[{i}]") for i, item in enumerate(body["messages"])))


def _sampling(body: Json) -> Sampling:
    stops = take(body, "stop_sequences", list) or []
    if not all(isinstance(item, str) for item in stops):
        raise RequestError("Invalid type for 'stop_sequences': expected strings.", param="stop_sequences")
    top_k = take(body, "top_k", int, low=-1, high=2**31 - 1)
    return Sampling(
        temperature=take(body, "temperature", float, low=0, high=2),
        top_p=take(body, "top_p", float, low=0, high=1),
        top_k=None if top_k is None or top_k <= 0 else top_k,
        max_tokens=required_count(body),
        stop=tuple(item for item in stops if item),
    )


def required_count(body: Json) -> int:
    """`max_tokens`, which the API demands. 0 asks to warm a cache without an answer: there is nothing to sample."""
    if body.get("max_tokens") is None:
        raise RequestError("Missing required parameter: 'max_tokens'.", param="max_tokens")
    value = take(body, "max_tokens", int, low=1)
    assert value is not None
    return value


def _response_format(body: Json) -> Json | None:
    """`output_config.format` (or `output_format`, its name in the beta) as OpenAI's response_format."""
    config = take(body, "output_config", dict) or {}
    path = "output_config.format" if config.get("format") is not None else "output_format"
    value: Any = config.get("format") if config.get("format") is not None else body.get("output_format")
    if value is None:
        return None
    if isinstance(value, dict) and value.get("type") == "json_schema" and isinstance(value.get("schema"), dict):
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": value["schema"], "strict": True}}
    raise RequestError(f"Invalid '{path}': expected type json_schema with a schema.", param=path)


def _template_kwargs(body: Json) -> Json:
    """`thinking` as the switch that the templates of reasoning models know; without it the template's own default."""
    thinking = take(body, "thinking", dict) or {}
    match thinking.get("type"):
        case "enabled" | "adaptive":
            return {"enable_thinking": True}
        case "disabled":
            return {"enable_thinking": False}
    return {}
