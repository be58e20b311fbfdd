"""The record says whether an answer was sampled under a grammar, in every dialect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polar_proxy.dialects import get_dialect
from polar_proxy.engines.scripted import INFO
from polar_proxy.gateway.recording import recorded_sampling
from polar_proxy.types import ChatRequest, EngineInfo, Json
from tests.export.dialect_requests import BODIES

_SCHEMA: Json = {"type": "object"}
_FORMAT: dict[str, Json] = {
    "openai_chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
    "openai_responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}},
    "anthropic_messages": {"output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
    "google_generate_content": {
        "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": _SCHEMA}
    },
}
_FORCED: dict[str, Json] = {
    "openai_chat": {"tool_choice": "required"},
    "openai_responses": {"tool_choice": {"type": "function", "name": "bash"}},
    "anthropic_messages": {"tool_choice": {"type": "any"}},
    "google_generate_content": {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
}
_FORBIDDEN: dict[str, Json] = {
    "openai_chat": {"tool_choice": "none"},
    "openai_responses": {"tool_choice": "none"},
    "anthropic_messages": {"tool_choice": {"type": "none"}},
    "google_generate_content": {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
}


_ENFORCES = replace(INFO, capabilities=frozenset({"tools", "json_schema", "tool_choice_required"}))
_FREE_OBJECTS: list[tuple[str, Json]] = [
    ("openai_chat", {"tool_choice": {"type": "auto"}}),
    ("openai_chat", {"tool_choice": {"type": "none"}}),
    ("openai_responses", {"tool_choice": {"type": "auto"}}),
    ("openai_responses", {"tool_choice": {"type": "none"}}),
    ("anthropic_messages", {"tool_choice": {"type": "auto"}}),
    ("anthropic_messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ("anthropic_messages", {"tool_choice": {"type": "none", "disable_parallel_tool_use": True}}),
    ("google_generate_content", {"toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}}),
]


def constrained(name: str, *changes: Json, tools: bool = True, engine: EngineInfo = _ENFORCES) -> bool | None:
    body = {key: value for key, value in BODIES[name].items() if tools or key != "tools"}
    for change in changes:
        body |= change
    (request,) = get_dialect(name, "m").parse(body).requests
    recorded: bool | None = recorded_sampling(request, engine).get("constrained")
    return recorded


@pytest.mark.parametrize("name", BODIES)
def test_records_whether_the_answer_was_constrained(name: str) -> None:
    assert constrained(name) is None
    assert constrained(name, tools=False) is None
    assert constrained(name, _FORBIDDEN[name]) is None
    assert constrained(name, _FORMAT[name], tools=False) is True
    assert constrained(name, _FORMAT[name], _FORBIDDEN[name]) is True
    assert constrained(name, _FORCED[name]) is True
    assert constrained(name, _FORMAT[name]) is False  # the tools may be called
    assert constrained(name, _FORMAT[name], _FORCED[name]) is True


@pytest.mark.parametrize(("name", "choice"), _FREE_OBJECTS)
def test_a_choice_that_forces_nothing_is_not_constrained(name: str, choice: Json) -> None:
    assert constrained(name, choice) is None


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("name", ["openai_chat", "openai_responses"])
def test_allowed_tools_are_constrained_only_if_one_is_required(name: str, mode: str) -> None:
    (request,) = get_dialect(name, "m").parse(BODIES[name]).requests
    assert isinstance(request, ChatRequest)
    names = [tool["function"]["name"] for tool in request.tools][:1]
    if name == "openai_chat":
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        choice: Json = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    else:
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": names[0]}]}
    assert constrained(name, {"tool_choice": choice}) is (True if mode == "required" else None)
    (narrowed,) = get_dialect(name, "m").parse(BODIES[name] | {"tool_choice": choice}).requests
    assert isinstance(narrowed, ChatRequest)
    assert [tool["function"]["name"] for tool in narrowed.tools] == names


@pytest.mark.parametrize("name", BODIES)
def test_an_engine_without_grammars_constrains_nothing(name: str) -> None:
    assert constrained(name, _FORCED[name], engine=INFO) is False
    assert constrained(name, _FORMAT[name], tools=False, engine=INFO) is False
