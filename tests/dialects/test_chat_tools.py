"""Chat Completions: custom tools, allowed tools, and the legacy fields `functions` and `function_call`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, ToolCall, ToolDelta
from tests.dialects.encoding import encode

USER: Json = {"role": "user", "content": "hi"}
BASH: Json = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
GRAMMAR: Json = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
PATCH: Json = {"type": "custom", "custom": {"name": "patch", "description": "Applies it.", "format": GRAMMAR}}
PATCH_FUNCTION: Json = {
    "type": "function",
    "function": {
        "name": "patch",
        "description": "Applies it.\n\nGive the whole text as the string `input`.\n\n"
        "The text must follow this lark grammar:\nstart: /a+/",
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    },
}
TEXT = '*** Begin\n"é" \\n\u2028'
FIT = json.dumps({"input": TEXT})


def body(**fields: Any) -> Json:
    return {"model": "m", "messages": [USER], **fields}


def parse(**fields: Any) -> ChatRequest:
    (request,) = OpenAIChat().parse(body(**fields)).requests
    assert isinstance(request, ChatRequest)
    return request


def allowed(mode: str, *tools: Json) -> Json:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def chunks(stream: bytes) -> list[Json]:
    lines = stream.decode().split("\n\n")[:-2]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]


def test_a_custom_tool_is_offered_as_a_function() -> None:
    assert parse(tools=[BASH, PATCH]).tools == (BASH, PATCH_FUNCTION)


def test_a_custom_tool_can_be_chosen() -> None:
    choice = {"type": "custom", "custom": {"name": "patch"}}
    assert parse(tools=[BASH, PATCH], tool_choice=choice).tool_choice == {
        "type": "function",
        "function": {"name": "patch"},
    }


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered_and_the_choice_is_stored(mode: str) -> None:
    choice = allowed(mode, {"type": "custom", "custom": {"name": "patch"}})
    parsed = OpenAIChat().parse(body(tools=[BASH, PATCH], tool_choice=choice))
    (request,) = parsed.requests
    assert isinstance(request, ChatRequest)
    assert (request.tools, request.tool_choice) == ((PATCH_FUNCTION,), mode)
    assert parsed.params["tool_choice"] == choice


def test_the_next_request_is_offered_all_tools_again() -> None:
    first = OpenAIChat().parse(body(tools=[BASH, PATCH], tool_choice=allowed("auto", BASH)))
    (request,) = OpenAIChat().parse(body(tools=[BASH, PATCH]), first).requests
    assert isinstance(request, ChatRequest)
    assert request.tools == (BASH, PATCH_FUNCTION)


@pytest.mark.parametrize("cut", [0, 3, len(FIT)])
def test_a_call_of_a_custom_tool_comes_back_as_its_text(cut: int) -> None:
    events = [
        SampleEvent(tool_calls=(ToolDelta(0, "c0", "patch", FIT[:cut]),)),
        SampleEvent(tool_calls=(ToolDelta(0, arguments=FIT[cut:]), ToolDelta(1, "c1", "bash", "{}"))),
        SampleEvent(finish_reason="tool_calls"),
    ]
    encoded = encode(OpenAIChat(), body(tools=[BASH, PATCH]), events)
    patch, bash = encoded.response["choices"][0]["message"]["tool_calls"]
    assert patch == {"id": "c0", "type": "custom", "custom": {"name": "patch", "input": TEXT}}
    assert bash["function"] == {"name": "bash", "arguments": "{}"}
    streamed = chunks(encoded.stream)
    pieces = [call for chunk in streamed for call in chunk["delta"].get("tool_calls", ()) if call["index"] == 0]
    assert {key: pieces[0][key] for key in ("id", "type")} == {"id": "c0", "type": "custom"}
    assert pieces[0]["custom"]["name"] == "patch"
    assert "".join(piece["custom"]["input"] for piece in pieces) == TEXT
    assert (streamed[-1]["delta"], streamed[-1]["finish_reason"]) == ({}, "tool_calls")


def test_the_text_of_a_custom_call_is_streamed_as_it_is_sampled() -> None:
    events = [SampleEvent(tool_calls=(ToolDelta(0, "c0", "patch", ""),))]
    events += [SampleEvent(tool_calls=(ToolDelta(0, arguments=character),)) for character in FIT]
    encoded = encode(OpenAIChat(), body(tools=[PATCH]), [*events, SampleEvent(finish_reason="tool_calls")])
    pieces = [call for chunk in chunks(encoded.stream) for call in chunk["delta"].get("tool_calls", ())]
    assert "".join(piece["custom"]["input"] for piece in pieces) == TEXT
    assert len(pieces) > len(TEXT) // 2
    assert ["id" in piece for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_the_text_of_a_custom_call_comes_back_as_its_arguments() -> None:
    sent = {"role": "assistant", "tool_calls": [{"id": "c0", "type": "custom", "custom": {"name": "p", "input": TEXT}}]}
    (call,) = parse(messages=[USER, sent]).messages[1].tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("c0", "p", {"input": TEXT})


@pytest.mark.parametrize("arguments", ['{"other": 1}', '{"input": "cut', "[]", ""])
def test_arguments_of_another_form_come_back_unchanged_as_a_function(arguments: str) -> None:
    delta = ToolDelta(0, "c0", "patch", arguments)
    encoded = encode(
        OpenAIChat(), body(tools=[PATCH]), [SampleEvent(tool_calls=(delta,)), SampleEvent(finish_reason="length")]
    )
    (call,) = encoded.response["choices"][0]["message"]["tool_calls"]
    assert call == ToolCall("c0", "patch", arguments).to_openai()
    streamed = [piece for chunk in chunks(encoded.stream) for piece in chunk["delta"].get("tool_calls", ())]
    if arguments.startswith('{"input": "cut'):  # its text was sent before it was cut
        assert streamed == [{"index": 0, "id": "c0", "type": "custom", "custom": {"name": "patch", "input": "cut"}}]
    else:
        assert streamed == [{"index": 0, **call}]
    history = [USER, {"role": "assistant", "tool_calls": [call]}]
    assert parse(messages=history).messages[1].tool_calls == (ToolCall("c0", "patch", arguments),)


@pytest.mark.parametrize(("choice", "expected"), [("none", "none"), ("auto", "auto"), (None, None)])
def test_legacy_functions_are_offered_as_tools(choice: Any, expected: Any) -> None:
    request = parse(functions=[BASH["function"]], function_call=choice)
    assert (request.tools, request.tool_choice) == ((BASH,), expected)
    assert request.parallel_tool_calls is False


def test_a_legacy_function_can_be_chosen() -> None:
    request = parse(functions=[BASH["function"]], function_call={"name": "bash"})
    assert request.tool_choice == {"type": "function", "function": {"name": "bash"}}


def test_a_legacy_call_comes_back_as_function_call() -> None:
    events = [
        SampleEvent(tool_calls=(ToolDelta(0, "c0", "bash", '{"a":'),)),
        SampleEvent(tool_calls=(ToolDelta(0, arguments="1}"),)),
        SampleEvent(finish_reason="tool_calls"),
    ]
    encoded = encode(OpenAIChat(), body(functions=[BASH["function"]]), events)
    (choice,) = encoded.response["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": {"name": "bash", "arguments": '{"a":1}'},
    }
    streamed = chunks(encoded.stream)
    pieces = [chunk["delta"]["function_call"] for chunk in streamed if "function_call" in chunk["delta"]]
    assert pieces == [{"name": "bash", "arguments": '{"a":'}, {"arguments": "1}"}]
    assert streamed[-1]["finish_reason"] == "function_call"


def test_legacy_history_reads_as_a_tool_call_and_its_result() -> None:
    history = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "bash", "arguments": "{}"}},
        {"role": "function", "name": "bash", "content": "ok"},
    ]
    assert parse(messages=history).messages[1:] == (
        Message("assistant", None, tool_calls=(ToolCall("call_1", "bash", "{}"),)),
        Message("tool", "ok", tool_call_id="call_1", name="bash"),
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_the_history_is_read_by_either_name(name: str) -> None:
    message = {"role": "assistant", "content": "hi", name: "hm"}
    assert parse(messages=[USER, message]).messages[1].reasoning == "hm"


def test_reasoning_is_sent_under_both_names() -> None:
    encoded = encode(OpenAIChat(), body(), [SampleEvent(reasoning="hm"), SampleEvent(finish_reason="stop")])
    message = encoded.response["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")
    delta = chunks(encoded.stream)[1]["delta"]
    assert (delta["reasoning"], delta["reasoning_content"]) == ("hm", "hm")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"tools": [BASH], "functions": [BASH["function"]]}, "functions"),
        ({"functions": [{}]}, "functions[0]"),
        ({"functions": [BASH["function"]], "function_call": {"name": "other"}}, "function_call"),
        ({"function_call": {"name": "bash"}}, "function_call"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [PATCH, PATCH]}, "tools"),
        ({"tools": [BASH], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [BASH], "tool_choice": allowed("none", BASH)}, "tool_choice"),
        ({"tools": [BASH], "tool_choice": allowed("required")}, "tool_choice"),
        ({"tools": [BASH], "tool_choice": allowed("auto", PATCH)}, "tool_choice"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
    ],
)
def test_error_names_the_wrong_field(fields: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
