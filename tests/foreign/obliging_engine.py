"""A scripted engine that obliges: it calls a tool that is offered, and answers in the form that is asked for.

The suites of other projects ask a real model to use a tool or to fill in a schema. This engine does so without a model:
values come from the last user message (a quoted text, a number), else they are fixed. So the suites test the wire, not
the model.
"""

from __future__ import annotations

import json
import re
from typing import Any

from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine, ScriptedReply
from polar_proxy.types import ChatRequest, EngineRequest, Json, Message, ToolCall, new_id

_QUOTED = re.compile(r"'([^']+)'")
_NUMBER = re.compile(r"-?\d+")


def obliging_engine() -> ScriptedEngine:
    return ScriptedEngine(oblige, tokens_per_event=3)


def oblige(request: EngineRequest) -> ScriptedAnswer:
    if not isinstance(request, ChatRequest):
        return "a completion"
    asked = _last_text(request.messages)
    reasoning = "Let me think." if "think" in asked.lower() else ""
    choice = request.tool_choice
    forced = choice == "required" or isinstance(choice, dict)
    answered = request.messages[-1].role == "tool"
    if request.tools and choice != "none" and (forced or not answered):
        functions = [tool["function"] for tool in request.tools]
        if isinstance(choice, dict):
            functions = [function for function in functions if function["name"] == choice["function"]["name"]]
        calls = functions if "every tool" in asked else functions[:1]
        return ScriptedReply(reasoning=reasoning, calls=tuple(_call(function, asked) for function in calls))
    form = request.response_format or {}
    if form.get("type") == "json_schema":
        schema = form["json_schema"]["schema"]
        return ScriptedReply(json.dumps(_value(schema, schema, asked), ensure_ascii=False), reasoning)
    if form.get("type") == "json_object" or "JSON" in asked:
        return ScriptedReply('{"setup": "a", "punchline": "b"}', reasoning)
    return ScriptedReply(f"You said: {asked}" if asked else "hello", reasoning)


def _last_text(messages: tuple[Message, ...]) -> str:
    """Return the text of the last user message."""
    for message in reversed(messages):
        if message.role == "user":
            content = message.content or ""
            if isinstance(content, str):
                return content
            return " ".join(part["text"] for part in content if part["type"] == "text")
    return ""


def _call(function: Json, asked: str) -> ToolCall:
    schema = function.get("parameters") or {}
    arguments = _value(schema, schema, asked) if schema.get("properties") else {}
    return ToolCall(new_id("call"), function["name"], json.dumps(arguments, ensure_ascii=False))


def _value(schema: Json, root: Json, asked: str) -> Any:
    """Return a value that is valid by a JSON schema. `root`: the schema that holds its definitions."""
    if "$ref" in schema:
        found: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return _value(found, root, asked)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _value(schema[key][0], root, asked)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required") or list(schema.get("properties", {}))
        return {name: _value(schema["properties"][name], root, asked) for name in required}
    if kind == "array":
        return [_value(schema.get("items", {}), root, asked) for _ in range(max(1, schema.get("minItems", 1)))]
    quoted, number = _QUOTED.search(asked), _NUMBER.search(asked)
    if kind in ("integer", "number"):
        return int(number[0]) if number else 3
    return {"boolean": True, "null": None}.get(kind, quoted[1] if quoted else "Paris")
