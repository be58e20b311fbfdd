"""Tools whose form Anthropic defines: their schemas hold what the documentation and the SDK name."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import anthropic.types as types
import anthropic.types.beta as beta
import pytest

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.types import ChatRequest, Json, SampleEvent, ToolDelta
from tests.dialects.encoding import encode

BODY: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
DISPLAY: Json = {"display_width_px": 1024, "display_height_px": 768}
SDK_TYPES: list[Any] = [
    types.ToolBash20250124Param,
    types.ToolTextEditor20250124Param,
    types.ToolTextEditor20250429Param,
    types.ToolTextEditor20250728Param,
    beta.BetaToolBash20241022Param,
    beta.BetaToolTextEditor20241022Param,
    beta.BetaMemoryTool20250818Param,
    beta.BetaToolComputerUse20241022Param,
    beta.BetaToolComputerUse20250124Param,
    beta.BetaToolComputerUse20251124Param,
]


def offered(*tools: Json) -> list[Json]:
    (request,) = AnthropicMessages().parse({**BODY, "tools": list(tools)}).requests
    assert isinstance(request, ChatRequest)
    return [tool["function"] for tool in request.tools]


def properties(kind: str, **fields: Any) -> Json:
    (function,) = offered({"type": kind, **fields})
    found: Json = function["parameters"]["properties"]
    return found


def _literal(declared: Any, name: str) -> str:
    inner = get_args(get_type_hints(declared, include_extras=True)[name])[0]
    return str(get_args(inner)[0])


@pytest.mark.parametrize("declared", SDK_TYPES, ids=lambda declared: declared.__name__)
def test_each_tool_of_the_sdk_is_offered_under_its_documented_name(declared: Any) -> None:
    kind, name = _literal(declared, "type"), _literal(declared, "name")
    (named,) = offered({"type": kind, "name": name, **DISPLAY})
    (unnamed,) = offered({"type": kind, **DISPLAY})
    assert named == unnamed
    assert named["name"] == name
    assert named["description"]
    assert set(named["parameters"]["required"]) <= named["parameters"]["properties"].keys()


def test_the_memory_tool_has_the_commands_and_fields_of_the_sdk() -> None:
    found = properties("memory_20250818")
    commands = get_args(get_args(beta.BetaMemoryTool20250818Command)[0])
    assert set(found["command"]["enum"]) == {get_args(each.model_fields["command"].annotation)[0] for each in commands}
    assert found.keys() == {name for each in commands for name in each.model_fields}


@pytest.mark.parametrize(
    ("kind", "undo", "inserted"),
    [
        ("text_editor_20241022", True, "new_str"),
        ("text_editor_20250124", True, "new_str"),
        ("text_editor_20250429", False, "new_str"),
        ("text_editor_20250728", False, "insert_text"),
    ],
)
def test_text_editor_schema_follows_its_version(kind: str, undo: bool, inserted: str) -> None:
    found = properties(kind)
    assert ("undo_edit" in found["command"]["enum"]) is undo
    assert "`insert`" in found[inserted]["description"]
    assert ("insert_text" in found) is (inserted == "insert_text")


def test_computer_schema_follows_its_version_and_options() -> None:
    first = properties("computer_20241022", **DISPLAY)
    later = properties("computer_20250124", **DISPLAY)
    zoom = properties("computer_20251124", **DISPLAY, enable_zoom=True)
    assert "scroll" not in first["action"]["enum"]
    assert "scroll" in later["action"]["enum"]
    assert later.keys() - first.keys() == {"start_coordinate", "scroll_direction", "scroll_amount", "duration"}
    assert zoom.keys() - later.keys() == {"region"}
    assert zoom["action"]["enum"] == [*later["action"]["enum"], "zoom"]
    (function,) = offered({"type": "computer_20250124", **DISPLAY})
    assert "1024 x 768" in function["description"]


def test_the_editors_limit_is_in_its_description() -> None:
    (function,) = offered({"type": "text_editor_20250728", "max_characters": 777})
    assert "777" in function["description"]


def test_tools_of_anthropics_servers_are_not_offered() -> None:
    kinds = ("web_search_20250305", "code_execution_20250825", "web_fetch_20250910", "bash_code_execution_20250825")
    assert offered(*({"type": kind, "name": "x"} for kind in kinds)) == []


def test_a_call_comes_back_as_an_ordinary_tool_use() -> None:
    body = {**BODY, "tools": [{"type": "bash_20250124", "name": "bash"}]}
    events = [
        SampleEvent(tool_calls=(ToolDelta(0, "c0", "bash", '{"command": "ls"}'),)),
        SampleEvent(finish_reason="tool_calls"),
    ]
    response = encode(AnthropicMessages(), body, events).response
    assert response["content"] == [{"type": "tool_use", "id": "c0", "name": "bash", "input": {"command": "ls"}}]
    assert response["stop_reason"] == "tool_use"


def test_a_tool_can_be_chosen_by_name() -> None:
    choice = {"type": "tool", "name": "bash"}
    tools = [{"type": "bash_20250124"}]
    (request,) = AnthropicMessages().parse({**BODY, "tools": tools, "tool_choice": choice}).requests
    assert isinstance(request, ChatRequest)
    assert request.tool_choice == {"type": "function", "function": {"name": "bash"}}
