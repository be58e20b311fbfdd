"""Chat Completions bodies: fields, tolerated fields, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, Sampling, ToolCall

USER: Json = {"role": "user", "content": "hi"}
TOOL: Json = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def parse(**fields: Any) -> ChatRequest:
    (request,) = OpenAIChat().parse({"model": "m", "messages": [USER], **fields}).requests
    assert isinstance(request, ChatRequest)
    return request


def call(**function: Any) -> Json:
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def test_minimal_body() -> None:
    assert parse() == ChatRequest("m", (Message("user", "hi"),))


def test_every_field() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    request = parse(
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "bash"}},
        parallel_tool_calls=False,
        response_format=schema,
        chat_template_kwargs={"enable_thinking": False},
        temperature=1,
        top_p=0.5,
        top_k=20,
        min_p=0.1,
        max_tokens=7,
        max_completion_tokens=9,
        seed=-3,
        stop=["a", "", "b"],
        n=2,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"12": -100, "7": 0.5},
        logprobs=True,
        top_logprobs=3,
    )
    assert request.sampling == Sampling(
        temperature=1.0,
        top_p=0.5,
        top_k=20,
        min_p=0.1,
        max_tokens=9,
        seed=-3,
        stop=("a", "b"),
        n=2,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={"12": -100, "7": 0.5},
        logprobs=True,
        top_logprobs=3,
    )
    assert isinstance(request.sampling.temperature, float)
    assert request.tools == (TOOL,)
    assert request.tool_choice == {"type": "function", "function": {"name": "bash"}}
    assert request.parallel_tool_calls is False
    assert request.response_format == schema
    assert request.template_kwargs == {"enable_thinking": False}


def test_messages_of_each_role() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    arguments = '{"command":  "ls"}'
    request = parse(
        messages=[
            {"role": "developer", "content": "be exact"},
            {"role": "user", "content": parts, "name": "ann"},
            {"content": None, "reasoning_content": "hm", **call(name="bash", arguments=arguments)},
            {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        ]
    )
    assert request.messages == (
        Message("developer", "be exact"),
        Message("user", parts, name="ann"),
        Message("assistant", None, "hm", (ToolCall("c1", "bash", arguments),)),
        Message("tool", "a.py", tool_call_id="c1"),
    )


@pytest.mark.parametrize(
    ("arguments", "expected"), [(None, ""), ({"a": 1}, '{"a":1}'), ("not json", "not json"), ("", "")]
)
def test_tool_call_arguments(arguments: object, expected: str) -> None:
    """A string stays unchanged; other JSON, which some agents send, becomes a string."""
    (message,) = parse(messages=[call(name="bash", arguments=arguments)]).messages
    assert message.tool_calls[0].arguments == expected


_NULLABLE = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "seed", "stop", "n", "stream"),
    *("stream_options", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "tools"),
    *("tool_choice", "parallel_tool_calls", "response_format", "chat_template_kwargs", "return_token_ids"),
)


def test_null_is_absent() -> None:
    assert parse(**dict.fromkeys(_NULLABLE)) == parse()
    null = {**USER, "name": None, "tool_calls": None, "tool_call_id": None, "reasoning_content": None}
    assert parse(messages=[null]) == parse()


def test_unknown_fields_are_tolerated_and_stored() -> None:
    body = {
        "model": "m",
        "messages": [{**USER, "cache_control": {"type": "ephemeral"}}],
        "store": True,
        "service_tier": "flex",
        "metadata": {"a": [1, None]},
    }
    parsed = OpenAIChat().parse(body)
    assert parsed.requests == (parse(),)
    assert parsed.params == {key: value for key, value in body.items() if key != "messages"}
    assert [json.loads(message) for message in parsed.messages[0]] == body["messages"]


def test_tools_of_another_type_are_stored_and_not_offered() -> None:
    other = {"type": "web_search"}
    parsed = OpenAIChat().parse({"model": "m", "messages": [USER], "tools": [other]})
    assert parsed.requests == (parse(),)
    assert parsed.tools is not None
    assert json.loads(parsed.tools) == [other]


@pytest.mark.parametrize(("top_k", "expected"), [(-1, None), (0, None), (5, 5)])
def test_top_k_off(top_k: int, expected: int | None) -> None:
    assert parse(top_k=top_k).sampling.top_k == expected


@pytest.mark.parametrize("value", [2, 2.0])
def test_integral_float_is_an_integer(value: float) -> None:
    assert parse(max_tokens=value).sampling.max_tokens == 2
    assert isinstance(parse(max_tokens=value).sampling.max_tokens, int)


_FORMAT = {"type": "json_schema"}
WRONG: list[tuple[Json, str]] = [
    *(({"model": value}, "model") for value in (None, 1, ["m"])),
    *(({"messages": value}, "messages") for value in (None, [], "hi", {})),
    *(({"messages": [value]}, "messages[0]") for value in (None, "hi", [], 1)),
    *(({"messages": [USER, {"role": role}]}, "messages[1].role") for role in (None, "king", 1, [], {})),
    *(({"messages": [{"role": "user", "content": value}]}, "messages[0].content") for value in (1, True, {})),
    *(
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}, "messages[0].content[1]")
        for part in (None, "x", {}, {"type": 1}, {"type": "text"}, {"type": "text", "text": None})
    ),
    *(
        ({"messages": [{"role": "assistant", "tool_calls": value}]}, "messages[0].tool_calls")
        for value in ("x", {}, [None], [{}], [{"function": {"name": 1}}])
    ),
    *(({"temperature": value}, "temperature") for value in (-0.1, 2.1, "1", True, [], 10**400)),
    *(({"top_p": value}, "top_p") for value in (-0.1, 1.1, "1")),
    *(({"top_k": value}, "top_k") for value in (-2, 0.5, 2**31)),
    *(({"min_p": value}, "min_p") for value in (-0.1, 1.1)),
    *(({"max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "9", True, 2**63)),
    *(({"max_completion_tokens": value}, "max_completion_tokens") for value in (0, "9")),
    *(({"n": value}, "n") for value in (0, 129, 1.5, "1")),
    *(({"seed": value}, "seed") for value in (2**63, 0.5, "1")),
    *(({"stop": value}, "stop") for value in (1, [1], {})),
    *(({"presence_penalty": value}, "presence_penalty") for value in (-2.1, "0")),
    *(({"frequency_penalty": value}, "frequency_penalty") for value in (2.1, "0")),
    *(({"logit_bias": value}, "logit_bias") for value in ([], {"x": 1}, {"1": "2"}, {"1": 101}, {"1": True})),
    *(({"logprobs": value}, "logprobs") for value in (1, "true")),
    *(({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-1, 21, True)),
    ({"top_logprobs": 2}, "top_logprobs"),
    *(({"stream": value}, "stream") for value in (1, "true")),
    *(({"stream_options": value}, "stream_options") for value in (True, [])),
    *(({"tools": value}, "tools") for value in ({}, "bash")),
    *(({"tools": [value]}, "tools[0]") for value in (None, {}, {"type": 1})),
    *(
        ({"tools": [{"type": "function", "function": value}]}, "tools[0].function")
        for value in (None, {}, {"name": None})
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    *(({"tools": [TOOL], "tool_choice": value}, "tool_choice") for value in ("any", 1, [], {}, {"function": {}})),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    *(({"response_format": value}, "response_format") for value in ("json", {"type": "xml"}, {}, _FORMAT)),
    ({"response_format": {**_FORMAT, "json_schema": {"name": "s"}}}, "response_format"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{param}-{i}" for i, (_, param) in enumerate(WRONG)])
def test_error_names_the_wrong_field(fields: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize("field", ["model", "messages"])
def test_error_names_the_missing_field(field: str) -> None:
    body = {"model": "m", "messages": [USER]}
    del body[field]
    with pytest.raises(RequestError) as caught:
        OpenAIChat().parse(body)
    assert (caught.value.param, caught.value.code) == (field, "missing_required_parameter")
