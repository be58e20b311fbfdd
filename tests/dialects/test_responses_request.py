"""Responses bodies: fields, tolerated fields, continued conversations, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_proxy.dialects.base import ParsedRequest, ReferencedCall, References
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, Sampling, ToolCall

BASH: Json = {"type": "function", "name": "bash", "description": "Run.", "parameters": {"type": "object"}}
OFFERED: Json = {
    "type": "function",
    "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}},
}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse_body(**fields: Any) -> ParsedRequest:
    return OpenAIResponses().parse({"model": "m", "input": "hi", **fields})


def parse(**fields: Any) -> ChatRequest:
    (request,) = parse_body(**fields).requests
    assert isinstance(request, ChatRequest)
    return request


def test_minimal_body() -> None:
    assert parse() == ChatRequest("m", (Message("user", "hi"),))
    assert [json.loads(item) for item in parse_body().messages[0]] == [
        {"type": "message", "role": "user", "content": "hi"}
    ]


def test_every_field() -> None:
    request = parse(
        instructions="be exact",
        tools=[BASH],
        tool_choice={"type": "function", "name": "bash"},
        parallel_tool_calls=False,
        text={
            "format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True, "description": None},
            "verbosity": "low",
        },
        reasoning={"effort": "none", "summary": "auto"},
        temperature=1,
        top_p=0.5,
        max_output_tokens=9,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=3,
    )
    assert request == ChatRequest(
        model="m",
        messages=(Message("system", "be exact"), Message("user", "hi")),
        sampling=Sampling(temperature=1.0, top_p=0.5, max_tokens=9, logprobs=True, top_logprobs=3),
        tools=(OFFERED,),
        tool_choice={"type": "function", "function": {"name": "bash"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        template_kwargs={"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [(None, None), ({"type": "text"}, None), ({"type": "json_object"}, {"type": "json_object"})],
)
def test_text_formats(form: Json | None, expected: Json | None) -> None:
    assert parse(text={"format": form}).response_format == expected


@pytest.mark.parametrize(("effort", "expected"), [(None, {}), ("low", {}), ("none", {"enable_thinking": False})])
def test_reasoning_effort(effort: str | None, expected: Json) -> None:
    assert parse(reasoning={"effort": effort}).template_kwargs == expected


def test_unknown_fields_are_tolerated_and_stored() -> None:
    fields: Json = {
        "store": False,
        "stream": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "client_metadata": {"x-codex-window-id": "w:0"},
        "metadata": {"a": "b"},
        "truncation": "auto",
        "max_tool_calls": 3,
        "background": False,
        "user": "u",
    }
    parsed = parse_body(**fields)
    assert parsed.requests == (parse(),)
    assert parsed.stream
    assert parsed.params == {"model": "m", **fields}


_NULLABLE = (
    *("instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "temperature", "top_p"),
    *("max_output_tokens", "include", "top_logprobs", "stream", "metadata", "store", "truncation", "service_tier"),
    *("background", "conversation", "prompt", "previous_response_id", "max_tool_calls", "n", "stop", "user"),
)


def test_null_is_absent() -> None:
    assert parse_body(**dict.fromkeys(_NULLABLE)).requests == parse_body().requests


def test_instructions_are_stored_as_an_item() -> None:
    """They are long and equal in every call. As an item of the conversation they are stored once."""
    parsed = parse_body(instructions="be exact")
    assert parsed.params == {"model": "m"}
    first, _ = parsed.messages[0]
    assert json.loads(first) == {"type": "instructions", "role": "system", "content": "be exact"}


WRONG: list[tuple[Json, str]] = [
    *(({"model": value}, "model") for value in (1, ["m"])),
    *(({"input": value}, "input") for value in (None, [], 1, {})),
    *(({"input": [value]}, "input[0]") for value in (None, "hi", [], 1)),
    *(({"instructions": value}, "instructions") for value in (1, ["x"])),
    *(({"temperature": value}, "temperature") for value in (-0.1, 2.1, "1", True, 10**400)),
    *(({"top_p": value}, "top_p") for value in (-0.1, 1.1, "1")),
    *(({"max_output_tokens": value}, "max_output_tokens") for value in (0, -1, 1.5, "9", True)),
    *(({"top_logprobs": value}, "top_logprobs") for value in (-1, 21, True)),
    *(({"stream": value}, "stream") for value in (1, "true")),
    *(({"store": value}, "store") for value in (1, "no")),
    *(({"parallel_tool_calls": value}, "parallel_tool_calls") for value in (1, "no")),
    *(({"include": value}, "include") for value in ("x", [1])),
    *(({"metadata": value}, "metadata") for value in ("x", [])),
    *(({"text": value}, "text") for value in ("x", [])),
    *(({"text": {"format": value}}, "text.format") for value in ("json", {}, {"type": "xml"}, {"type": "json_schema"})),
    *(({"reasoning": value}, "reasoning") for value in ("high", [])),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"),
    *(({"tools": value}, "tools") for value in ({}, "bash")),
    *(({"tools": [value]}, "tools[0]") for value in (None, {}, {"type": 1}, {"type": "function"}, {"type": "custom"})),
    ({"tools": [{**BASH, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0]"),
    *(({"tools": [BASH], "tool_choice": value}, "tool_choice") for value in ("any", 1, [], {}, {"type": "function"})),
    ({"tools": [BASH], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [BASH], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": [BASH], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    ({"tools": [BASH], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"background": True, "store": False}, "background"),
    ({"background": True, "stream": True}, "stream"),
    ({"conversation": "conv_1", "store": False}, "store"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{param}-{i}" for i, (_, param) in enumerate(WRONG)])
def test_error_names_the_wrong_field(fields: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in str(caught.value)


def test_token_count() -> None:
    dialect = OpenAIResponses()
    assert dialect.parse_count({"model": "m", "input": "hi", "tools": [BASH]}) == parse(tools=[BASH])
    assert json.loads(dialect.count_body(7)) == {"object": "response.input_tokens", "input_tokens": 7}


def test_previous_response_leads_to_its_call() -> None:
    dialect = OpenAIResponses()
    assert dialect.references({"previous_response_id": None}) == References()
    assert dialect.references({"previous_response_id": "resp_01hv"}) == References(calls=frozenset({"call_01hv"}))
    for value in ("", "call_01hv", "resp_", "resp_é", "resp_" + "0" * 65, 1, {}):
        with pytest.raises(RequestError) as caught:
            dialect.references({"previous_response_id": value})
        assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")


def test_continued_conversation_is_written_out() -> None:
    """Its items, its answer as items, and the new input. The earlier instructions are left out."""
    dialect = OpenAIResponses()
    first = parse_body(instructions="first rule", tools=[BASH])
    answer = Message("assistant", None, "hm", (ToolCall("c1", "ns__exec", "{}"),))
    body: Json = {"model": "m", "previous_response_id": "resp_1", "input": "go on", "instructions": "second rule"}
    written = dialect.write_out_references(body, {"call_1": ReferencedCall(first.messages[0], answer)})
    assert [item["type"] for item in written["input"]] == ["message", "reasoning", "function_call", "message"]
    (request,) = dialect.parse(written).requests
    assert isinstance(request, ChatRequest)
    assert request.messages == (
        Message("system", "second rule"),
        Message("user", "hi"),
        Message("assistant", None, "hm", (ToolCall("c1", "ns__exec", "{}"),)),
        Message("user", "go on"),
    )
