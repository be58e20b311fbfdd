"""One conversation (a system prompt, a tool, a call with its result, a question) in the form of each dialect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from polar_proxy.dialects import get_dialect
from polar_proxy.types import CallRecord, Json
from tests.factories import call

SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}}
_ARGUMENTS = '{"command":"ls"}'
_FUNCTION: Json = {"name": "bash", "description": "Run it.", "parameters": SCHEMA}

BODIES: dict[str, Json] = {
    "openai_chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be exact."},
            {"role": "user", "content": "What is here?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": _ARGUMENTS}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
            {"role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
    },
    "openai_responses": {
        "model": "m",
        "instructions": "Be exact.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is here?"}]},
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": _ARGUMENTS},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
            {"type": "message", "role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", **_FUNCTION}],
    },
    "anthropic_messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is here?"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "a.py"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "tools": [{"name": "bash", "description": "Run it.", "input_schema": SCHEMA}],
    },
    "google_generate_content": {
        "systemInstruction": {"parts": [{"text": "Be exact."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "What is here?"}]},
            {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "bash", "args": {"command": "ls"}}}]},
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "c1", "name": "bash", "response": {"output": "a.py"}}},
                    {"text": "And?"},
                ],
            },
        ],
        "tools": [
            {"functionDeclarations": [{"name": "bash", "description": "Run it.", "parametersJsonSchema": SCHEMA}]}
        ],
    },
}


def recorded(name: str, body: Json | None = None, **changes: Any) -> CallRecord:
    """Return the record of a call with this body, as the gateway makes it."""
    parsed = get_dialect(name, "m").parse(BODIES[name] if body is None else body)
    kept = {"messages": parsed.messages[0], "tools": parsed.tools, "params": orjson.loads(orjson.dumps(parsed.params))}
    return replace(call("call_1", 0.0, [10, 1], [11, 2]), **{"dialect": name, "model": "m", **kept, **changes})
