"""The record says whether an answer was sampled under a grammar, in every dialect."""

from __future__ import annotations

import pytest

from polar_proxy.dialects import get_dialect
from polar_proxy.gateway.recording import recorded_sampling
from polar_proxy.types import Json
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


def constrained(name: str, *changes: Json, tools: bool = True) -> bool | None:
    body = {key: value for key, value in BODIES[name].items() if tools or key != "tools"}
    for change in changes:
        body |= change
    (request,) = get_dialect(name, "m").parse(body).requests
    recorded: bool | None = recorded_sampling(request).get("constrained")
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
