"""Anthropic's tools as OpenAI functions, including those whose loading is deferred.

The top of the prompt offers the model each tool that the client runs, except tools whose loading is deferred. (A
deferred tool that `tool_choice` names is offered there, too.) Tools whose arguments Anthropic defines (`bash_20250124`,
...) get their definitions from `client_tools.py`. Tools that Anthropic's own servers run (`web_search`,
`code_execution`, ...) are listed in `of_provider` and not offered.

A deferred tool (`defer_loading`) is shown where the conversation loads it: a `tool_reference` in a tool result, or a
`tool_addition` in a message, becomes the tool's definition. The definition has the format that Claude Code's ToolSearch
announces to the model. The prompt before the definition does not change, so the prompt of the previous call can be
continued token for token; adding the tool to the list at the top would rewrite the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polar_proxy.dialects.anthropic.client_tools import client_tool
from polar_proxy.dialects.fields import function_tool, invalid, invalid_type
from polar_proxy.dialects.wire import to_json
from polar_proxy.types import Json


@dataclass(frozen=True, slots=True)
class AnthropicTools:
    """The tools of one request, as OpenAI functions."""

    offered: tuple[Json, ...]
    by_name: Mapping[str, Json]
    """All tools that the client runs, deferred ones included."""
    eager: frozenset[str]
    """Tools with `eager_input_streaming`: their arguments are streamed in pieces, valid JSON or not."""
    of_provider: tuple[str, ...] = ()
    """Types of the tools that Anthropic's own servers run. These tools are not offered to the model."""


def parse_tools(raw: list[Any], tool_choice: Json | None) -> AnthropicTools:
    offered: list[Json] = []
    by_name: dict[str, Json] = {}
    eager: set[str] = set()
    of_provider: list[str] = []
    forced = tool_choice.get("name") if tool_choice is not None and tool_choice.get("type") == "tool" else None
    for position, tool in enumerate(raw):
        function = _parse_tool(tool, f"tools[{position}]")
        if function is None:
            of_provider.append(tool["type"])
            continue
        name = function["function"]["name"]
        if name in by_name:
            raise invalid("tools", "Tool names must be unique")
        by_name[name] = function
        if not tool.get("defer_loading") or name == forced:
            offered.append(function)
        if tool.get("eager_input_streaming"):
            eager.add(name)
    return AnthropicTools(tuple(offered), by_name, frozenset(eager), tuple(of_provider))


def _parse_tool(tool: Any, path: str) -> Json | None:
    """Return the tool as an OpenAI function; None for a tool that the client does not run."""
    if not isinstance(tool, dict):
        raise invalid_type(path, "an object")
    kind = tool.get("type")
    if kind is not None and not isinstance(kind, str):
        raise invalid_type(f"{path}.type", "a string")
    if kind not in (None, "custom"):
        return client_tool(tool)
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise invalid(f"{path}.name", "a tool needs a name")
    if not isinstance(schema, dict | None):
        raise invalid_type(f"{path}.input_schema", "a JSON schema object")
    return function_tool(name, tool.get("description"), schema)


def parse_tool_choice(choice: Json | None, tools: AnthropicTools) -> tuple[str | Json | None, bool | None]:
    """Return (tool_choice, parallel_tool_calls) in OpenAI's form."""
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
                raise invalid("tool_choice", "it is 'any' but no tool is offered")
            return "required", parallel
        case "tool":
            name = choice.get("name")
            if not isinstance(name, str) or name not in tools.by_name:
                raise invalid("tool_choice", f"tool {name!r:.80} is not among the tools")
            return {"type": "function", "function": {"name": name}}, parallel
    raise invalid("tool_choice", "expected type auto, any, tool or none")


def render_definitions(functions: Iterable[Json]) -> str:
    """Return the definitions of deferred tools as text for the model. The text is placed where the conversation loads
    the tools."""
    lines = [
        "<function>"
        + to_json({key: item["function"][key] for key in sorted(item["function"])}, "tools").decode()
        + "</function>"
        for item in functions
    ]
    return "\n".join(["<functions>", *lines, "</functions>"])


def parse_tool_addition(value: Any, tools: AnthropicTools, path: str) -> Json | None:
    """Return the tool of a `tool_addition` as an OpenAI function. The block either defines the tool, or names a tool
    that the request declares. Return None if the client does not run the tool, or if the request does not declare the
    named tool."""
    if not isinstance(value, dict):
        raise invalid_type(path, "an object")
    if value.get("type") == "tool_definition":
        return _parse_tool(value.get("definition"), f"{path}.definition")
    name = value.get("name")
    return tools.by_name.get(name) if isinstance(name, str) else None
