"""The tools of a Chat Completions body as functions, and the tool calls of its messages and answers.

Engines know only functions, so tools of other kinds are replaced:

* `function`: unchanged.
* `custom` (free text): a function with one string parameter `input` (`custom_tools.py`), whose calls are returned as
  calls of the custom tool. A call with any other arguments is returned as a call of a function, so that no argument
  is lost.
* `functions` (deprecated in favour of `tools`): a call is returned as `function_call`, at most one per answer.
* Tools of other types are the provider's own. They are listed and not offered, because nothing here can run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polar_proxy.dialects.custom_tools import custom_input, custom_parameters
from polar_proxy.dialects.fields import invalid, invalid_type, optional_string, string_field
from polar_proxy.dialects.openai_common import choice_mode
from polar_proxy.dialects.wire import to_json
from polar_proxy.types import Json, ToolCall


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of one body."""

    offered: tuple[Json, ...]
    """All tools, as OpenAI functions."""
    custom: frozenset[str] = frozenset()
    """Names of the custom tools."""
    legacy: bool = False
    """True if the tools came in the deprecated field `functions`."""
    of_provider: tuple[str, ...] = ()
    """Types of the tools that the provider itself runs. They are not in `offered`."""

    def choose(self, choice: Any, path: str) -> tuple[str | Json | None, tuple[Json, ...]]:
        """Return (tool_choice, tools) for the engine. `choice` is the value of the body's field, `path` the name of the
        field.

        If the choice is of the type `allowed_tools`, only the allowed tools are offered, because the engine might call
        any tool that is offered.
        """
        functions = self.offered
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            choice, functions = self._allowed(choice, path)
        mode = choice_mode(choice)
        if mode == "required" and not functions:
            raise invalid(path, "it is 'required' but there are no tools")
        if choice is None or mode is not None:
            return mode, functions
        name = _referenced_name(choice)
        if name is None:
            raise invalid(path, "expected none, auto, required, or one of the tools")
        if name not in self._names:
            raise invalid(path, f"{name!r:.80} is not among the tools")
        return {"type": "function", "function": {"name": name}}, functions

    @property
    def _names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.offered}

    def _allowed(self, choice: Json, path: str) -> tuple[str, tuple[Json, ...]]:
        """Return the mode of an `allowed_tools` choice, and the functions that it allows."""
        allowed = choice.get("allowed_tools")
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        named = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(named, list):
            raise invalid(path, "'allowed_tools' needs a mode (auto or required) and tools")
        names = {_referenced_name(tool) for tool in named}
        if unknown := names - self._names:
            raise invalid(path, f"the allowed tool {unknown.pop()!r:.80} is not among the tools")
        return mode, tuple(tool for tool in self.offered if tool["function"]["name"] in names)


def parse_tools(tools: list[Any], functions: list[Any]) -> ChatTools:
    """Return the tools of a body's fields `tools` and `functions`. Raises RequestError if both are used, or if a tool
    is malformed."""
    if tools and functions:
        raise invalid("functions", "send either 'tools' or 'functions', not both")
    offered: list[Json] = []
    custom: set[str] = set()
    of_provider: list[str] = []
    for position, tool in enumerate(tools):
        path = f"tools[{position}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise invalid(path, "expected a tool with a type")
        if kind == "function":
            _checked_name(tool.get("function"), f"{path}.function")
            offered.append(tool)
        elif kind == "custom":
            name = _checked_name(tool.get("custom"), f"{path}.custom")
            custom.add(name)
            offered.append({"type": "function", "function": _custom_function(name, tool["custom"])})
        else:
            of_provider.append(kind)
    for position, function in enumerate(functions):
        _checked_name(function, f"functions[{position}]")
        offered.append({"type": "function", "function": function})
    names = [tool["function"]["name"] for tool in offered]
    if twice := [name for name in custom if names.count(name) > 1]:
        raise invalid("tools", f"the custom tool {twice[0]!r:.80} shares its name with another tool")
    return ChatTools(tuple(offered), frozenset(custom), legacy=bool(functions), of_provider=tuple(of_provider))


def _checked_name(definition: Any, path: str) -> str:
    """Return the name of a function or custom tool. Raises RequestError if its definition is malformed."""
    if not isinstance(definition, dict) or not isinstance(definition.get("name"), str):
        raise invalid(path, "it needs a name")
    if not isinstance(definition.get("parameters"), dict | None):
        raise invalid(f"{path}.parameters", "expected a JSON schema object")
    return str(definition["name"])


def _custom_function(name: str, custom: Json) -> Json:
    form = custom.get("format")
    grammar = form.get("grammar") if isinstance(form, dict) else None
    return {"name": name, **custom_parameters(custom.get("description"), grammar)}


def _referenced_name(reference: Any) -> str | None:
    """Return the name in a reference to a tool, such as {"type": "custom", "custom": {"name": "patch"}}.

    A reference to a legacy function has only the name: {"name": "bash"}.
    """
    if not isinstance(reference, dict):
        return None
    inner = next((reference[kind] for kind in ("function", "custom") if kind in reference), reference)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def parse_calls(message: Json, position: int) -> tuple[ToolCall, ...]:
    """Return the tool calls of message number `position`: its `tool_calls`, or its legacy `function_call`."""
    path = f"messages[{position}]"
    legacy = message.get("function_call")
    if legacy is not None:
        return (_function_call(legacy, legacy_call_id(position), f"{path}.function_call"),)
    value = message.get("tool_calls")
    if not isinstance(value, list | None):
        raise invalid_type(f"{path}.tool_calls", "an array")
    return tuple(_tool_call(call, f"{path}.tool_calls") for call in value or ())


def legacy_call_id(position: int) -> str:
    """Return an id for the `function_call` in message number `position`. The API gives no ids to such calls."""
    return f"call_{position}"


def _tool_call(call: Any, path: str) -> ToolCall:
    if not isinstance(call, dict):
        raise invalid(path, "each tool call must be an object")
    identity = optional_string(call, "id") or ""
    custom = call.get("custom")
    if isinstance(custom, dict):
        text = string_field(custom, "input", f"{path}.custom")
        arguments = to_json({"input": text}, f"{path}.custom.input").decode()
        return ToolCall(identity, string_field(custom, "name", f"{path}.custom"), arguments)
    return _function_call(call.get("function"), identity, path)


def _function_call(function: Any, identity: str, path: str) -> ToolCall:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(path, "each tool call needs a function with a name")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = to_json(arguments, path).decode()
    return ToolCall(identity, function["name"], arguments)


def answered_call(call: ToolCall, custom: frozenset[str]) -> Json:
    """Return a tool call of an answer as the client reads it. `custom`: names of the custom tools."""
    text = custom_input(call.arguments) if call.name in custom else None
    if text is None:
        return call.to_openai()
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
