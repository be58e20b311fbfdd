"""OpenAI Responses. Source: https://platform.openai.com/docs/api-reference/responses

The module family: `_tools` (what is offered for the client's tools), `_custom` (tools of free text), `_input` (items ->
conversation), `_items` (answer -> items, ids), `_object` (the response object), `_encoder` (the event stream).

How `previous_response_id` works: a response's id leads to its recorded call, whose items and answer are written out in
front of the new input (`resume`); the new call is then recorded whole.
Everything is stored whatever `store` says. `instructions` are kept as a first item of type `instructions` of the
recorded conversation, and are not carried over to a resumed one, as the API defines it.

Refused, because the model would miss something: `background`, `conversation`, `prompt` (a stored template).
Tolerated and without effect: truncation, service_tier, prompt_cache_*, max_tool_calls, context_management, verbosity,
reasoning options but for effort `none`, which switches thinking off where the model's template can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from polar_proxy.dialects.base import Dialect, Encoder, ParsedRequest, PreviousCall, TokenCount, stored_tools, to_json
from polar_proxy.dialects.openai_common import error_body, parse_sampling, required, take
from polar_proxy.dialects.openai_responses.encoder import ResponsesEncoder
from polar_proxy.dialects.openai_responses.input import collect_tools, to_messages
from polar_proxy.dialects.openai_responses.items import answer_items, call_of_response
from polar_proxy.dialects.openai_responses.tools import Toolbox
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json

_REFUSED = ("conversation", "prompt")
_LOGPROBS = "message.output_text.logprobs"


class OpenAIResponses(Dialect):
    name = "openai_responses"

    def parse(self, body: Json) -> ParsedRequest:
        request, tools, items = _read(body)
        params = {key: value for key, value in body.items() if key not in ("input", "tools", "instructions")}
        to_json(params, "body")
        raw_tools = to_json(body["tools"], "tools") if body.get("tools") else None
        instructions = body.get("instructions")
        kept = [{"type": "instructions", "role": "system", "content": instructions}] if instructions else []
        return ParsedRequest(
            requests=(request,),
            stream=bool(take(body, "stream", bool)),
            messages=(
                (
                    *(to_json(item, "instructions") for item in kept),
                    *(to_json(item, f"input[{i}]") for i, item in enumerate(items)),
                ),
            ),
            tools=raw_tools,
            params=params,
            options={
                "tools": tools,
                "echo": {**_echo(body), "tools": orjson.Fragment(raw_tools or b"[]")},
                "logprobs": request.sampling.logprobs,
            },
        )

    def body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        items = [orjson.loads(message) for message in messages]
        # An item of this type that says something is never a client's: `parse` refuses it.
        if items and items[0].get("type") == "instructions" and items[0].get("content"):
            return {**params, "instructions": items[0]["content"], "input": items[1:], **stored_tools(tools)}
        return {**params, "input": items, **stored_tools(tools)}

    def previous_call_id(self, body: Json) -> str | None:
        previous = body.get("previous_response_id")
        return None if previous is None else call_of_response(previous)

    def resume(self, body: Json, earlier: PreviousCall) -> Json:
        call_id = call_of_response(body.get("previous_response_id"))
        before = [orjson.loads(message) for message in earlier.messages]
        if not all(isinstance(item, dict) for item in before):
            raise RequestError(
                "The previous response is a text completion, not a conversation.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        items = [item for item in before if item.get("type") != "instructions"]
        return {**body, "input": [*items, *answer_items(earlier.answer, call_id), *_items(body)]}

    def encoder(self, parsed: ParsedRequest, call_id: str, created: int) -> Encoder:
        return ResponsesEncoder(parsed.options, call_id, created)

    def error(self, error: RequestError) -> bytes:
        return error_body(error)


class ResponsesTokenCount(TokenCount):
    """`POST /v1/responses/input_tokens`."""

    def parse(self, body: Json) -> ChatRequest:
        return _read(body)[0]

    def respond(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, error: RequestError) -> bytes:
        return error_body(error)


def _read(body: Json) -> tuple[ChatRequest, Toolbox, list[Json]]:
    """The engine's request, the tools, and the input as a list of items."""
    for key in _REFUSED:
        if body.get(key) is not None:
            raise RequestError(
                f"'{key}' is not supported here: send the conversation in 'input'.",
                param=key,
                code="unsupported_parameter",
            )
    if take(body, "background", bool):
        raise RequestError("'background' is not supported here.", param="background", code="unsupported_parameter")
    model = required(body, "model", str)
    items = _items(body)
    instructions = take(body, "instructions", str)
    tools = Toolbox()
    for position, tool in enumerate(take(body, "tools", list) or ()):
        tools.add(tool, f"tools[{position}]")
    collect_tools(tools, items)
    messages = to_messages(items, instructions, tools)
    if not items or not messages:
        raise RequestError("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
    tool_choice, functions = tools.choose(body.get("tool_choice"))
    request = ChatRequest(
        model=model,
        messages=messages,
        sampling=parse_sampling(
            {**body, "n": None},
            max_tokens=take(body, "max_output_tokens", int, low=1),
            logprobs=_LOGPROBS in _include(body),
            top_logprobs=take(body, "top_logprobs", int, low=0, high=20) or 0,
        ),
        tools=functions,
        tool_choice=tool_choice,
        parallel_tool_calls=take(body, "parallel_tool_calls", bool),
        response_format=_response_format(body),
        template_kwargs=_template_kwargs(body),
    )
    return request, tools, items


def _items(body: Json) -> list[Json]:
    """The input as items; a string is a user message."""
    value = body.get("input")
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError(
            "Invalid type for 'input': expected a string or an array of items.", param="input", code="invalid_type"
        )
    for position, item in enumerate(value):
        if not isinstance(item, dict):
            where = f"input[{position}]"
            raise RequestError(f"Invalid type for '{where}': expected an object.", param=where, code="invalid_type")
    return value


def _include(body: Json) -> list[Any]:
    include = take(body, "include", list) or []
    if not all(isinstance(item, str) for item in include):
        raise RequestError("Invalid 'include': expected an array of strings.", param="include", code="invalid_type")
    return include


def _response_format(body: Json) -> Json | None:
    text = take(body, "text", dict) or {}
    form = text.get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema" and isinstance(form.get("schema"), dict):
        fields = ("name", "description", "schema", "strict")
        schema = {key: form[key] for key in fields if form.get(key) is not None}
        return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
    raise RequestError(
        "Invalid 'text.format': expected text, json_object, or json_schema with a schema.", param="text.format"
    )


def _template_kwargs(body: Json) -> Json:
    effort = (take(body, "reasoning", dict) or {}).get("effort")
    if not isinstance(effort, str | None):
        raise RequestError(
            "Invalid type for 'reasoning.effort': expected a string.", param="reasoning.effort", code="invalid_type"
        )
    own = take(body, "chat_template_kwargs", dict) or {}
    return {"enable_thinking": False, **own} if effort == "none" else own


def _echo(body: Json) -> Json:
    """The fields of the request that every response object repeats, with the API's defaults."""
    store = take(body, "store", bool)
    parallel = take(body, "parallel_tool_calls", bool)
    text = dict(take(body, "text", dict) or {})
    text["format"] = text.get("format") or {"type": "text"}
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": take(body, "max_output_tokens", int),
        "max_tool_calls": take(body, "max_tool_calls", int),
        "metadata": take(body, "metadata", dict) or {},
        "model": body["model"],
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": take(body, "previous_response_id", str),
        "prompt_cache_key": take(body, "prompt_cache_key", str),
        "reasoning": {"effort": None, "summary": None, **(take(body, "reasoning", dict) or {})},
        "safety_identifier": take(body, "safety_identifier", str),
        "service_tier": take(body, "service_tier", str) or "default",
        "store": True if store is None else store,
        "temperature": take(body, "temperature", float),
        "text": text,
        "tool_choice": body.get("tool_choice") or "auto",
        "top_logprobs": take(body, "top_logprobs", int) or 0,
        "top_p": take(body, "top_p", float),
        "truncation": take(body, "truncation", str) or "disabled",
        "user": take(body, "user", str),
    }
