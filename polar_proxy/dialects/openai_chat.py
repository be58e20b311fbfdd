"""OpenAI Chat Completions. Source: https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field

from polar_proxy.dialects.base import Answer, AnswerChoice, ParsedRequest
from polar_proxy.dialects.fields import Integer, invalid, invalid_type, optional_string
from polar_proxy.dialects.openai_common import (
    OpenAIDialect,
    OpenAIEncoder,
    StreamFields,
    choice_mode,
    make_choice,
    token_logprobs,
)
from polar_proxy.dialects.wire import storable_params, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, ToolCall, ToolDelta

_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


class ChatFields(StreamFields):
    """The fields of a Chat Completions body. The functions below check what is inside messages and tools."""

    messages: list[Any]
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
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
        tools, tools_json = _parse_tools(fields.tools, previous)
        tool_choice, offered = _parse_tool_choice(fields.tool_choice, tools)
        request = ChatRequest(
            model=fields.model,
            messages=messages,
            sampling=fields.sampling(
                max_tokens=fields.max_completion_tokens or fields.max_tokens,
                logprobs=fields.logprobs,
                top_logprobs=fields.top_logprobs,
            ),
            tools=offered,
            tool_choice=tool_choice,
            parallel_tool_calls=fields.parallel_tool_calls,
            response_format=_parse_response_format(fields.response_format),
            template_kwargs=fields.chat_template_kwargs,
        )
        return ParsedRequest(
            requests=(request,),
            stream=fields.stream,
            messages=(stored_messages,),
            tools=tools_json,
            params=storable_params(body, "messages", "tools"),
            encoder=fields.encoder(ChatEncoder, logprobs=fields.logprobs),
        )

    def message_fields(self, stored: list[Json]) -> Json:
        return {"messages": stored}


def _parse_messages(raw: list[Any], previous: ParsedRequest | None) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
    """Return the messages and their bytes to store.

    An agent sends its whole conversation with every request. The messages at the start whose bytes are the same as in
    `previous` are taken from it and not parsed again.
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


def _parse_tools(raw: list[Any], previous: ParsedRequest | None) -> tuple[tuple[Json, ...], bytes | None]:
    """Return the functions to offer, and all tools as bytes to store.

    Tools of another type are stored as well, but no engine offers them.
    """
    if not raw:
        return (), None
    stored = to_json(raw, "tools")
    request = None if previous is None else previous.requests[0]
    if previous is not None and isinstance(request, ChatRequest) and previous.tools == stored:
        return request.tools, previous.tools
    for position, tool in enumerate(raw):
        _check_tool(tool, f"tools[{position}]")
    return tuple(tool for tool in raw if tool["type"] == "function"), stored


def _check_tool(tool: Any, path: str) -> None:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise invalid(path, "expected a tool with a type")
    if tool["type"] == "function":
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{path}.function", "a function needs a name")
        if not isinstance(function.get("parameters"), dict | None):
            raise invalid(f"{path}.function.parameters", "expected a JSON schema object")


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
    return Message(
        role=role,
        content=content,
        reasoning=reasoning if isinstance(reasoning, str) else None,
        tool_calls=_parse_tool_calls(item.get("tool_calls"), f"{path}.tool_calls"),
        tool_call_id=optional_string(item, "tool_call_id"),
        name=optional_string(item, "name"),
    )


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


def _parse_tool_calls(value: Any, path: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid_type(path, "an array")
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(path, "each tool call needs a function with a name")
        arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = to_json(arguments, path).decode()
        calls.append(ToolCall(optional_string(call, "id") or "", function["name"], arguments))
    return tuple(calls)


def _parse_tool_choice(choice: Any, tools: tuple[Json, ...]) -> tuple[str | Json | None, tuple[Json, ...]]:
    """Return the engine's (tool_choice, tools). With `allowed_tools` the other tools are not offered."""
    if isinstance(choice, dict) and isinstance(allowed := choice.get("allowed_tools"), dict):
        choice, named = allowed.get("mode"), allowed.get("tools")
        if choice not in ("auto", "required") or not isinstance(named, list):
            raise invalid("tool_choice", "'allowed_tools' needs a mode (auto or required) and tools")
        names = {_function_name(tool) for tool in named}
        tools = tuple(tool for tool in tools if tool["function"]["name"] in names)
    if choice is None:
        return None, tools
    mode = choice_mode(choice)
    if mode is not None:
        if mode == "required" and not tools:
            raise invalid("tool_choice", "it is 'required' but there are no tools")
        return mode, tools
    name = _function_name(choice)
    if name is None:
        raise invalid("tool_choice", "expected none, auto, required, or a function that is among the tools")
    if name not in {tool["function"]["name"] for tool in tools}:
        raise invalid("tool_choice", f"{name!r:.80} is not among the tools")
    return {"type": "function", "function": {"name": name}}, tools


def _function_name(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _parse_response_format(value: Json | None) -> Json | None:
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return {"type": "json_object"}
    schema = value.get("json_schema")
    if value.get("type") == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return value
    raise invalid("response_format", "expected text, json_object, or json_schema with a schema")


@dataclass
class ChatEncoder(OpenAIEncoder):
    id_prefix = "chatcmpl-"
    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    empty_content: ClassVar = {"delta": {}}
    null_usage = True

    _started: set[int] = field(default_factory=set, init=False)
    """Indexes of the choices whose first chunk was written."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        out = b"" if event.index in self._started else self._first_chunk(event)
        delta: Json = {}
        if event.text:
            delta["content"] = event.text
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.tool_calls:
            delta["tool_calls"] = [_tool_delta(call) for call in event.tool_calls]
        wants_tokens = event.token_ids and (self.logprobs or self.token_ids)
        if not delta and not wants_tokens:
            return out
        choice = make_choice(event.index, {"delta": delta})
        if self.logprobs and event.token_ids:
            choice["logprobs"] = _logprobs_object(event)
        if self.token_ids:
            choice["token_ids"] = event.token_ids
        return out + self._chunk([choice])

    def respond(self, answers: list[Answer]) -> bytes:
        choices = []
        for index, state in answers[0].in_order:
            message = {**state.message.to_openai(), "refusal": None}
            choice = make_choice(index, {"message": message}, state.finish_reason or "stop")
            if self.logprobs:
                choice["logprobs"] = _logprobs_object(state)
            if self.token_ids:
                choice["token_ids"] = state.token_ids
            choices.append(choice)
        prompt = {"prompt_token_ids": answers[0].prompt_ids} if self.token_ids else {}
        return self._response(choices, answers, **prompt)

    def _first_chunk(self, event: SampleEvent) -> bytes:
        self._started.add(event.index)
        choice = make_choice(event.index, {"delta": {"role": "assistant", "content": ""}})
        if self.token_ids and event.prompt_ids is not None:
            return self._chunk([choice], prompt_token_ids=event.prompt_ids)
        return self._chunk([choice])


def _logprobs_object(sampled: SampleEvent | AnswerChoice) -> Json:
    return {"content": token_logprobs(sampled), "refusal": None}


def _tool_delta(call: ToolDelta) -> Json:
    function: Json = {"arguments": call.arguments}
    if call.name is not None:
        function["name"] = call.name
    out: Json = {"index": call.index, "function": function}
    if call.id is not None:
        out["id"] = call.id
        out["type"] = "function"
    return out
