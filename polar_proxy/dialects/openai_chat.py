"""OpenAI Chat Completions. Source: https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from polar_proxy.dialects.base import (
    Answer,
    Dialect,
    Encoder,
    ParsedRequest,
    assistant_message,
    sse,
    stored_tools,
    to_json,
)
from polar_proxy.dialects.openai_common import (
    chat_logprobs,
    error_body,
    error_object,
    parse_sampling,
    required,
    stream_options,
    take,
    usage,
)
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, ToolCall

_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


class OpenAIChat(Dialect):
    name = "openai_chat"

    def parse(self, body: Json) -> ParsedRequest:
        return self.parse_after(body, None)

    def parse_after(self, body: Json, before: ParsedRequest | None) -> ParsedRequest:
        raw_messages = required(body, "messages", list)
        if not raw_messages:
            raise RequestError(
                "Invalid 'messages': expected at least one message.", param="messages", code="empty_array"
            )
        messages, stored = _read_messages(raw_messages, before)
        tools, tools_stored = _read_tools(body, before)
        top_logprobs = take(body, "top_logprobs", int, low=0, high=20) or 0
        logprobs = bool(take(body, "logprobs", bool))
        if top_logprobs and not logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        max_tokens = take(body, "max_completion_tokens", int, low=1) or take(body, "max_tokens", int, low=1)
        request = ChatRequest(
            model=required(body, "model", str),
            messages=messages,
            sampling=parse_sampling(body, max_tokens=max_tokens, logprobs=logprobs, top_logprobs=top_logprobs),
            tools=tools,
            tool_choice=_parse_tool_choice(body, tools),
            parallel_tool_calls=take(body, "parallel_tool_calls", bool),
            response_format=_parse_response_format(body),
            template_kwargs=take(body, "chat_template_kwargs", dict) or {},
        )
        params = {key: value for key, value in body.items() if key not in ("messages", "tools")}
        to_json(params, "body")
        return ParsedRequest(
            requests=(request,),
            stream=bool(take(body, "stream", bool)),
            messages=(stored,),
            tools=tools_stored,
            params=params,
            options={
                "model": request.model,
                "usage": stream_options(body),
                "logprobs": logprobs,
                "token_ids": bool(body.get("return_token_ids")),
            },
        )

    def body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        return {**params, "messages": [orjson.loads(message) for message in messages], **stored_tools(tools)}

    def encoder(self, parsed: ParsedRequest, call_id: str, created: int) -> Encoder:
        return ChatEncoder(parsed.options, call_id, created)

    def error(self, error: RequestError) -> bytes:
        return error_body(error)


def _read_messages(raw: list[Any], before: ParsedRequest | None) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
    """The messages and their bytes. An agent sends its whole conversation with every turn: what it sent with the turn
    before is compared as bytes and not read again."""
    known, told = _chat_of(before)
    same = 0
    with suppress(TypeError):  # what cannot be written is not the same, and refused below
        for item, data in zip(raw, told, strict=False):
            if orjson.dumps(item) != data:
                break
            same += 1
    new = range(same, len(raw))
    messages = (*known[:same], *(parse_message(raw[i], i) for i in new))
    return messages, (*told[:same], *(to_json(raw[i], f"messages[{i}]") for i in new))


def _chat_of(before: ParsedRequest | None) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
    request = None if before is None else before.requests[0]
    return (request.messages, before.messages[0]) if before and isinstance(request, ChatRequest) else ((), ())


def _read_tools(body: Json, before: ParsedRequest | None) -> tuple[tuple[Json, ...], bytes | None]:
    """The functions that are offered; and all tools as bytes, those of a type that no engine here is told of too: what
    came is kept."""
    if not body.get("tools"):
        return _parse_tools(body), None
    stored = to_json(body["tools"], "tools")
    request = None if before is None else before.requests[0]
    if before is not None and isinstance(request, ChatRequest) and before.tools == stored:
        return request.tools, before.tools
    return _parse_tools(body), stored


def parse_message(item: Any, position: int) -> Message:
    where = f"messages[{position}]"
    if not isinstance(item, dict):
        raise RequestError(f"Invalid type for '{where}': expected an object.", param=where, code="invalid_type")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"Invalid value for '{where}.role': expected one of {', '.join(sorted(_ROLES))}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    content = item.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not _is_part(part):
                path = f"{where}.content[{number}]"
                raise RequestError(
                    f"Invalid '{path}': expected a content part with a type, and text in one of type text.", param=path
                )
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"Invalid type for '{where}.content': expected a string or an array of content parts.",
            param=f"{where}.content",
            code="invalid_type",
        )
    reasoning = item.get("reasoning_content")
    if reasoning is None:
        reasoning = item.get("reasoning")
    tool_call_id = item.get("tool_call_id")
    name = item.get("name")
    return Message(
        role=role,
        content=content,
        reasoning=reasoning if isinstance(reasoning, str) else None,
        tool_calls=_parse_tool_calls(item.get("tool_calls"), where),
        tool_call_id=tool_call_id if isinstance(tool_call_id, str) else None,
        name=name if isinstance(name, str) else None,
    )


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return False
    return part["type"] != "text" or isinstance(part.get("text"), str)


def _parse_tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    path = f"{where}.tool_calls"
    if not isinstance(value, list):
        raise RequestError(f"Invalid type for '{path}': expected an array.", param=path, code="invalid_type")
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"Invalid '{path}': each call needs a function with a name.", param=path)
        arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = to_json(arguments, path).decode()
        call_id = call.get("id")
        calls.append(ToolCall(call_id if isinstance(call_id, str) else "", function["name"], arguments))
    return tuple(calls)


def _parse_tools(body: Json) -> tuple[Json, ...]:
    tools = take(body, "tools", list) or []
    for position, tool in enumerate(tools):
        path = f"tools[{position}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise RequestError(f"Invalid '{path}': expected a tool with a type.", param=path)
        if tool["type"] == "function":
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(f"Invalid '{path}.function': a function needs a name.", param=f"{path}.function")
            if not isinstance(function.get("parameters"), dict | None):
                param = f"{path}.function.parameters"
                raise RequestError(f"Invalid '{param}': expected a JSON schema object.", param=param)
    return tuple(tool for tool in tools if tool["type"] == "function")


def _parse_tool_choice(body: Json, tools: tuple[Json, ...]) -> str | Json | None:
    choice = body.get("tool_choice")
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        if choice == "required" and not tools:
            raise RequestError("'tool_choice' is 'required' but there are no tools.", param="tool_choice")
        return choice
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            if name not in {tool["function"]["name"] for tool in tools}:
                raise RequestError(f"Invalid 'tool_choice': {name!r} is not among the tools.", param="tool_choice")
            return {"type": "function", "function": {"name": name}}
    raise RequestError("Invalid value for 'tool_choice'.", param="tool_choice", code="invalid_value")


def _parse_response_format(body: Json) -> Json | None:
    value = take(body, "response_format", dict)
    if value is None or value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return {"type": "json_object"}
    schema = value.get("json_schema")
    if value.get("type") == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return value
    raise RequestError(
        "Invalid 'response_format': expected text, json_object, or json_schema with a schema.",
        param="response_format",
    )


class ChatEncoder(Encoder):
    def __init__(self, options: Json, call_id: str, created: int) -> None:
        self._model: str = options["model"]
        self._usage: bool = options["usage"]
        self._logprobs: bool = options["logprobs"]
        self._token_ids: bool = options["token_ids"]
        self._id = "chatcmpl-" + call_id
        self._created = created
        self._opened: set[int] = set()

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._usage:
            chunk["usage"] = None
        return chunk

    def feed(self, part: int, event: SampleEvent) -> bytes:
        out = b""
        if event.index not in self._opened:
            self._opened.add(event.index)
            first = self._chunk([_choice(event.index, {"role": "assistant", "content": ""})])
            if self._token_ids and event.prompt_ids is not None:
                first["prompt_token_ids"] = event.prompt_ids
            out = sse(first)
        delta: Json = {}
        if event.text:
            delta["content"] = event.text
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.tool_calls:
            delta["tool_calls"] = [
                _tool_delta(call.index, call.id, call.name, call.arguments) for call in event.tool_calls
            ]
        wants_tokens = event.token_ids and (self._logprobs or self._token_ids)
        if not delta and not wants_tokens:
            return out
        choice = _choice(event.index, delta)
        if self._logprobs and event.token_ids:
            choice["logprobs"] = chat_logprobs(list(event.tokens), list(event.logprobs), list(event.top))
        if self._token_ids:
            choice["token_ids"] = event.token_ids
        return out + sse(self._chunk([choice]))

    def end(self, answers: list[Answer]) -> bytes:
        out = b"".join(
            sse(self._chunk([_choice(index, {}, state.finish_reason or "stop")]))
            for index, state in sorted(answers[0].choices.items())
        )
        if self._usage:
            out += sse({**self._chunk([]), "usage": usage(answers)})
        return out + b"data: [DONE]\n\n"

    def respond(self, answers: list[Answer]) -> bytes:
        answer = answers[0]
        choices = []
        for index, state in sorted(answer.choices.items()):
            message = assistant_message(state)
            message.setdefault("refusal", None)
            choice: Json = {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(state.tokens, state.logprobs, state.top) if self._logprobs else None,
                "finish_reason": state.finish_reason or "stop",
            }
            if self._token_ids:
                choice["token_ids"] = state.token_ids
            choices.append(choice)
        body: Json = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage(answers),
        }
        if self._token_ids:
            body["prompt_token_ids"] = answer.prompt_ids
        return orjson.dumps(body)

    def fail(self, message: str, status: int) -> bytes:
        return sse(error_object(message, status))


def _choice(index: int, delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _tool_delta(index: int, call_id: str | None, name: str | None, arguments: str) -> Json:
    function: Json = {"arguments": arguments}
    if name is not None:
        function["name"] = name
    out: Json = {"index": index, "function": function}
    if call_id is not None:
        out["id"] = call_id
        out["type"] = "function"
    return out
