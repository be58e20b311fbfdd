"""The tools of a Responses body: the function offered for each kind, and the items of their calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.dialects.openai_responses.items import call_item
from polar_proxy.dialects.openai_responses.tools import ResponsesTools
from polar_proxy.types import ChatRequest, Json, ToolCall

GRAMMAR = 'start: "*** Begin Patch"'
PATCH: Json = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
SPACE: Json = {
    "type": "namespace",
    "name": "functions",
    "description": "",
    "tools": [
        {"type": "custom", "name": "exec", "description": "Run JavaScript."},
        {"type": "function", "name": "wait", "parameters": {"type": "object"}, "defer_loading": True},
    ],
}


def box(*raw: Json) -> ResponsesTools:
    tools = ResponsesTools()
    for number, tool in enumerate(raw):
        tools.add(tool, f"tools[{number}]")
    return tools


def parse(**fields: Any) -> ChatRequest:
    (request,) = OpenAIResponses().parse({"model": "m", "input": "hi", **fields}).requests
    assert isinstance(request, ChatRequest)
    return request


def names(request: ChatRequest) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools]


def test_custom_tool_is_a_function_of_one_string() -> None:
    (tool,) = box(PATCH).functions()
    assert tool["function"]["name"] == "apply_patch"
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "Edit files." in tool["function"]["description"]
    assert GRAMMAR in tool["function"]["description"]


def test_namespace_is_flattened_and_its_calls_carry_both_names() -> None:
    tools = box(SPACE)
    assert list(tools.by_name) == ["functions__exec", "functions__wait"]
    custom = call_item(tools, ToolCall("c1", "functions__exec", '{"input":"1+1"}'), "call_x", 0, "completed")
    assert custom == {
        "id": "ctc_x_0",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "c1",
        "name": "exec",
        "namespace": "functions",
        "input": "1+1",
    }
    function = call_item(tools, ToolCall("c2", "functions__wait", "{}"), "call_x", 1, "completed")
    assert (function["type"], function["name"], function["namespace"]) == ("function_call", "wait", "functions")


def test_equal_flat_names_get_a_number() -> None:
    plain: Json = {"type": "function", "name": "functions__exec", "parameters": None}
    tools = box(plain, SPACE)
    assert list(tools.by_name) == ["functions__exec", "functions__exec_2", "functions__wait"]
    assert tools.offered_name("functions", "exec") == "functions__exec_2"
    assert tools.offered_name(None, "functions__exec") == "functions__exec"
    assert call_item(tools, ToolCall("c", "functions__exec_2", "{}"), "call_x", 0, "completed")["name"] == "exec"


def test_namespace_that_ends_in_the_separator() -> None:
    assert list(box({**SPACE, "name": "mcp__git__"}).by_name) == ["mcp__git__exec", "mcp__git__wait"]


def test_offers_additional_tools_of_the_input() -> None:
    """Codex sends its tools this way to newer models."""
    item = {"type": "additional_tools", "role": "developer", "tools": [SPACE, PATCH]}
    request = parse(input=[item, {"role": "user", "content": "hi"}])
    assert names(request) == ["functions__exec", "functions__wait", "apply_patch"]
    assert [message.role for message in request.messages] == ["user"]


def test_found_tools_are_listed_and_offered() -> None:
    search: Json = {"type": "tool_search", "execution": "client", "description": "BM25", "parameters": None}
    found = {"type": "tool_search_output", "call_id": "c1", "execution": "client", "tools": [SPACE]}
    asked = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "js"}}
    request = parse(tools=[search], input=[{"role": "user", "content": "hi"}, asked, found])
    assert names(request) == ["tool_search", "functions__exec", "functions__wait"]
    _, call, output = request.messages
    assert call.tool_calls == (ToolCall("c1", "tool_search", '{"query":"js"}'),)
    assert (output.role, output.tool_call_id) == ("tool", "c1")
    assert isinstance(output.content, str)
    assert [tool["name"] for tool in json.loads(output.content)["tools"]] == ["functions__exec", "functions__wait"]
    tools = box(search)
    item = call_item(tools, ToolCall("c1", "tool_search", '{"query":"js"}'), "call_x", 0, "completed")
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "js"})


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search", "external_web_access": True},
        {"type": "tool_search"},
        {"type": "mcp", "server_label": "s"},
        {"type": "image_generation"},
        {"type": "not yet invented"},
    ],
)
def test_provider_tools_are_tolerated_and_not_offered(tool: Json) -> None:
    parsed = OpenAIResponses().parse({"model": "m", "input": "hi", "tools": [tool], "tool_choice": "auto"})
    (request,) = parsed.requests
    assert request == parse()
    assert parsed.tools is not None
    assert json.loads(parsed.tools) == [tool]


@pytest.mark.parametrize(
    ("kind", "arguments", "holder"),
    [
        ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}, "action"),
        ("shell", {"commands": ["ls"], "max_output_length": 9}, "action"),
        ("apply_patch", {"type": "update_file", "path": "a.py", "diff": "@@"}, "operation"),
    ],
)
def test_built_in_tool_round_trip(kind: str, arguments: Json, holder: str) -> None:
    tools = box({"type": kind})
    item = call_item(tools, ToolCall("c1", kind, json.dumps(arguments)), "call_x", 0, "completed")
    assert item["type"] == f"{kind}_call"
    assert arguments.items() <= item[holder].items()
    request = parse(tools=[{"type": kind}], input=[{"role": "user", "content": "hi"}, item])
    (call,) = request.messages[1].tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("c1", kind, arguments)


@pytest.mark.parametrize(
    "arguments",
    ["", "[1]", "broken", "{}", '{"command":"ls"}', '{"command":["ls"],"env":{}}', '{"command":["ls"],"user":null}'],
)
def test_arguments_that_do_not_fit_a_built_in_call_are_sent_unchanged(arguments: str) -> None:
    item = call_item(box({"type": "local_shell"}), ToolCall("c1", "local_shell", arguments), "call_x", 0, "completed")
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "local_shell", arguments)


@pytest.mark.parametrize("arguments", ["", "[1]", "*** Begin Patch", "{}", '{"input":1}', '{"input":"a","b":1}'])
def test_custom_call_of_another_form_round_trip(arguments: str) -> None:
    item = call_item(box(PATCH), ToolCall("c1", "apply_patch", arguments), "call_x", 0, "completed")
    assert (item["type"], item["input"]) == ("custom_tool_call", arguments)
    request = parse(tools=[PATCH], input=[{"role": "user", "content": "hi"}, item])
    assert request.messages[1].tool_calls == (ToolCall("c1", "apply_patch", arguments),)


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tool_choice_words(choice: str) -> None:
    assert parse(tools=[PATCH], tool_choice=choice).tool_choice == choice


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "wait", "namespace": "functions"}, "functions__wait"),
        ({"type": "shell"}, "shell"),
    ],
)
def test_tool_choice_by_name(choice: Json, expected: str) -> None:
    request = parse(tools=[PATCH, SPACE, {"type": "shell"}], tool_choice=choice)
    assert request.tool_choice == {"type": "function", "function": {"name": expected}}


def test_tool_choice_allowed_tools() -> None:
    allowed = [{"type": "custom", "name": "apply_patch"}, {"type": "namespace", "name": "functions"}, {"type": "mcp"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    request = parse(tools=[{"type": "shell"}, PATCH, SPACE], tool_choice=choice)
    assert names(request) == ["apply_patch", "functions__exec", "functions__wait"]
    assert request.tool_choice == "required"


def test_strict_is_passed_on_if_true() -> None:
    """Chat templates print the whole definition, so an unset field must be absent."""
    plain: Json = {"type": "function", "name": "a", "parameters": {}, "strict": False, "output_schema": {}}
    one, two = box(plain, {**plain, "name": "b", "strict": True}).functions()
    assert set(one["function"]) == {"name", "parameters"}
    assert two["function"]["strict"] is True
