"""OpenAI Chat Completions. Source: https://platform.openai.com/docs/api-reference/chat

`tools` parses tools and tool calls, `encoder` writes the answer. Messages of the role `function` are results of the
legacy `function_call` in the message before them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import Field

from polar_proxy.dialects.base import ParsedRequest, provider_tools
from polar_proxy.dialects.fields import Integer, invalid, invalid_type, optional_string, other_fields
from polar_proxy.dialects.openai_chat.encoder import ChatEncoder
from polar_proxy.dialects.openai_chat.tools import legacy_call_id, parse_calls, parse_tools
from polar_proxy.dialects.openai_common import OpenAIDialect, StreamFields
from polar_proxy.dialects.wire import storable_params, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, ClientOptions, Json, Message

_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


class ChatFields(StreamFields):
    """The fields of a Chat Completions body. The functions below check what is inside messages and tools."""

    messages: list[Any]
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    functions: list[Any] = Field(default_factory=list)
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] = 0
    response_format: Json | None = None
    chat_template_kwargs: Json = Field(default_factory=dict)


class OpenAIChat(OpenAIDialect):
    name = "openai_chat"

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        fields = ChatFields.read(body)
        if not fields.messages:
            raise invalid("messages", "expected at least one message", code="empty_array")
        if fields.top_logprobs and not fields.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        messages, stored_messages = _parse_messages(fields.messages, previous)
        tools_json = _stored_tools(fields.tools, previous)
        tools = parse_tools(fields.tools, fields.functions)
        choice_field = "function_call" if fields.tool_choice is None else "tool_choice"
        tool_choice, offered = tools.choose(getattr(fields, choice_field), choice_field)
        request = ChatRequest(
            model=fields.model,
            messages=messages,
            sampling=fields.sampling(
                max_tokens=fields.max_completion_tokens or fields.max_tokens,
                logprobs=fields.logprobs,
                top_logprobs=fields.top_logprobs,
            ),
            tools=_same_objects(offered, previous),
            tool_choice=tool_choice,
            parallel_tool_calls=False if tools.legacy else fields.parallel_tool_calls,
            response_format=_parse_response_format(fields.response_format),
            template_kwargs=fields.chat_template_kwargs,
        )
        return ParsedRequest(
            requests=(request,),
            stream=fields.stream,
            messages=(stored_messages,),
            tools=tools_json,
            params=storable_params(body, "messages", "tools"),
            encoder=partial(
                fields.encoder(ChatEncoder, logprobs=fields.logprobs),
                custom_tools=tools.custom,
                legacy_functions=tools.legacy,
            ),
            provider_tools=provider_tools(tools.of_provider, body, "web_search_options"),
        )

    def message_fields(self, stored: list[Json]) -> Json:
        return {"messages": stored}

    def client_options(self, params: Json) -> ClientOptions:
        return ClientOptions(
            self.name,
            effort=optional_string(params, "reasoning_effort"),
            fields=other_fields(params, ChatFields, "reasoning_effort"),
        )


def _parse_messages(raw: list[Any], previous: ParsedRequest | None) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
    """Return the messages and their bytes to store.

    An agent sends its whole conversation with every request. So the messages at the beginning that equal those of
    `previous`, byte for byte, are not parsed again.
    """
    request = None if previous is None else previous.requests[0]
    known: tuple[Message, ...] = ()
    known_bytes: tuple[bytes, ...] = ()
    if previous is not None and isinstance(request, ChatRequest):
        known, known_bytes = request.messages, previous.messages[0]
    same = 0
    with suppress(TypeError):  # raised for a value that cannot be serialised, which to_json refuses below
        for item, data in zip(raw, known_bytes, strict=False):
            if orjson.dumps(item) != data:
                break
            same += 1
    new = range(same, len(raw))
    messages = (*known[:same], *(_parse_message(raw[i], i) for i in new))
    return messages, (*known_bytes[:same], *(to_json(raw[i], f"messages[{i}]") for i in new))


def _stored_tools(raw: list[Any], previous: ParsedRequest | None) -> bytes | None:
    """Return all tools as bytes to store, including the tools that are not offered."""
    stored = to_json(raw, "tools") if raw else None
    return previous.tools if previous is not None and previous.tools == stored else stored


def _same_objects(offered: tuple[Json, ...], previous: ParsedRequest | None) -> tuple[Json, ...]:
    """Return the tools of `previous` if they equal `offered`, else `offered`. So equal tools are in memory once."""
    request = None if previous is None else previous.requests[0]
    return request.tools if isinstance(request, ChatRequest) and request.tools == offered else offered


def _parse_message(item: Any, position: int) -> Message:
    path = f"messages[{position}]"
    if not isinstance(item, dict):
        raise invalid_type(path, "an object")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{path}.role", f"expected one of {', '.join(sorted(_ROLES))}")
    content = item.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not _is_part(part):
                expected = "expected a content part with a type, and with a text if the type is text"
                raise invalid(f"{path}.content[{number}]", expected)
    elif content is not None and not isinstance(content, str):
        raise invalid_type(f"{path}.content", "a string or an array of content parts")
    reasoning = item.get("reasoning_content")
    if reasoning is None:
        reasoning = item.get("reasoning")
    message = Message(
        role=role,
        content=content,
        reasoning=reasoning if isinstance(reasoning, str) else None,
        tool_calls=parse_calls(item, position),
        tool_call_id=optional_string(item, "tool_call_id"),
        name=optional_string(item, "name"),
    )
    return replace(message, role="tool", tool_call_id=legacy_call_id(position - 1)) if role == "function" else message


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


def _parse_response_format(value: Json | None) -> Json | None:
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return {"type": "json_object"}
    schema = value.get("json_schema")
    if value.get("type") == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return value
    raise invalid("response_format", "expected text, json_object, or json_schema with a schema")
