"""Anthropic's tools as functions, and those whose loading is deferred.

Offered to the model at the top of its prompt is every tool that the client runs and that is not deferred. Tools that
Anthropic's own servers run (`web_search`, `code_execution`, ...) and those whose schema only Anthropic's models know
(`bash_20250124`, ...) carry a `type` of their own: they are tolerated and not offered.

A deferred tool (`defer_loading`) is shown where the conversation loads it: a `tool_reference` in a tool result, or a
`tool_addition` in a message, becomes the tool's definition at that very place, in the form that Claude Code's
ToolSearch promises its model. The prompt in front of it does not change, so the call continues the one before, token
for token; adding the tool to the list at the top would have rewritten the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polar_proxy.dialects.base import to_json
from polar_proxy.dialects.openai_common import take
from polar_proxy.errors import RequestError
from polar_proxy.types import Json


@dataclass(frozen=True, slots=True)
class AnthropicTools:
    """The tools of one request, as OpenAI functions."""

    offered: tuple[Json, ...]
    by_name: Mapping[str, Json]
    """All that the model may ever call, the deferred ones included."""
    eager: frozenset[str]
    """Tools whose client asked for arguments in pieces (`eager_input_streaming`), valid or not."""


def parse_tools(body: Json) -> AnthropicTools:
    offered: list[Json] = []
    by_name: dict[str, Json] = {}
    eager: set[str] = set()
    forced = _forced(body)
    for position, tool in enumerate(take(body, "tools", list) or []):
        function = _function(tool, f"tools[{position}]")
        if function is None:
            continue
        name = function["function"]["name"]
        by_name[name] = function
        if not tool.get("defer_loading") or name == forced:
            offered.append(function)
        if tool.get("eager_input_streaming"):
            eager.add(name)
    return AnthropicTools(tuple(offered), by_name, frozenset(eager))


def _function(tool: Any, path: str) -> Json | None:
    """The tool as an OpenAI function; None for one that is not the client's own."""
    if not isinstance(tool, dict):
        raise RequestError(f"Invalid '{path}': expected an object.", param=path, code="invalid_type")
    kind = tool.get("type")
    if kind is not None and not isinstance(kind, str):
        raise RequestError(f"Invalid '{path}.type': expected a string.", param=f"{path}.type", code="invalid_type")
    if kind not in (None, "custom"):
        return None
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise RequestError(f"Invalid '{path}.name': a tool needs a name.", param=f"{path}.name")
    if not isinstance(schema, dict | None):
        param = f"{path}.input_schema"
        raise RequestError(f"Invalid '{param}': expected a JSON schema object.", param=param, code="invalid_type")
    function: Json = {"name": name}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = schema if schema is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _forced(body: Json) -> str | None:
    choice = body.get("tool_choice")
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "tool" else None
    return name if isinstance(name, str) else None


def parse_tool_choice(body: Json, tools: AnthropicTools) -> tuple[str | Json | None, bool | None]:
    """(tool_choice, parallel_tool_calls) in OpenAI's form."""
    choice = take(body, "tool_choice", dict)
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto":
            return ("auto" if tools.offered else None), parallel
        case "none":
            return ("none" if tools.offered else None), None
        case "any":
            if not tools.offered:
                raise RequestError("'tool_choice' is 'any' but no tool is offered.", param="tool_choice")
            return "required", parallel
        case "tool":
            name = choice.get("name")
            if not isinstance(name, str) or name not in tools.by_name:
                raise RequestError(f"Invalid 'tool_choice': tool {name!r} is not offered.", param="tool_choice")
            return {"type": "function", "function": {"name": name}}, parallel
    raise RequestError(
        "Invalid 'tool_choice.type': expected auto, any, tool or none.", param="tool_choice", code="invalid_value"
    )


def render_definitions(functions: Iterable[Json]) -> str:
    """The definitions of tools that are loaded here, as the model reads them."""
    lines = [
        "<function>"
        + to_json({key: item["function"][key] for key in sorted(item["function"])}, "tools").decode()
        + "</function>"
        for item in functions
    ]
    return "\n".join(["<functions>", *lines, "</functions>"])


def parse_tool_addition(value: Any, tools: AnthropicTools, path: str) -> Json | None:
    """The function of a `tool_addition`: one that the request declares, or one that is defined on the spot."""
    if not isinstance(value, dict):
        raise RequestError(f"Invalid '{path}': expected an object.", param=path, code="invalid_type")
    if value.get("type") == "tool_definition":
        return _function(value.get("definition"), f"{path}.definition")
    name = value.get("name")
    return tools.by_name.get(name) if isinstance(name, str) else None
