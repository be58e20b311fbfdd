"""The tools of a Responses body, and the functions that the engine is offered in place of the tools.

Engines know only functions. A tool of another kind is offered as a function, and a call of that function goes back to
the client as the item of the tool's kind:

* `function`: unchanged. A function inside a `namespace` is offered as `namespace__name`; the items of its calls have
  the namespace and the name in separate fields.
* `custom` (free text, such as apply_patch with a grammar): a function with one string parameter `input`
  (`custom_tools.py`).
* `tool_search` run by the client, `local_shell`, `shell`, `apply_patch`: a function with that tool's own arguments.
* Tools that the provider itself runs (web search, file search, code interpreter, MCP, ...) and unknown kinds are
  listed and not offered, because nothing here can run them.

Tools are in `tools`, in `additional_tools` items of the input, and in the results of a tool search. All are offered;
`defer_loading` is ignored. A tool keeps its offered name when later tools arrive, so that earlier calls in a growing
conversation keep their names. Arguments that do not fit the item of a tool's kind are never changed: see `call_item`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_proxy.dialects.custom_tools import custom_parameters
from polar_proxy.dialects.fields import invalid, object_schema
from polar_proxy.dialects.openai_common import choice_mode
from polar_proxy.types import Json

_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer"}


@dataclass(frozen=True, slots=True)
class BuiltInTool:
    """A tool whose arguments the API defines. A call of the tool is an item: `item` is the item's type, and
    `arguments_field` the name of the item's field with the arguments."""

    description: str
    parameters: Json
    item: str
    arguments_field: str
    constants: Json = field(default_factory=dict)
    """Members with fixed values that Polar puts beside the arguments. The model does not write these members."""


BUILT_IN_TOOLS: dict[str, BuiltInTool] = {
    "local_shell": BuiltInTool(
        "Run a command on the local machine and get its output.",
        object_schema(
            ["command"],
            command={"type": "array", "items": _TEXT, "description": "The program and its arguments."},
            working_directory=_TEXT,
            timeout_ms=_NUMBER,
        ),
        item="local_shell_call",
        arguments_field="action",
        constants={"type": "exec", "env": {}},
    ),
    "shell": BuiltInTool(
        "Run shell commands, one after the other, and get their output.",
        object_schema(
            ["commands"],
            commands={"type": "array", "items": _TEXT},
            timeout_ms=_NUMBER,
            max_output_length=_NUMBER,
        ),
        item="shell_call",
        arguments_field="action",
    ),
    "apply_patch": BuiltInTool(
        "Create, update or delete one file.",
        object_schema(
            ["type", "path"],
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff={"type": "string", "description": "The diff to apply; not needed to delete a file."},
        ),
        item="apply_patch_call",
        arguments_field="operation",
    ),
}
"""The built-in tools by type, as OpenAI's API reference describes them."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of the client and the function that replaces it."""

    kind: str
    """`function`, `custom`, `tool_search`, or a key of `BUILT_IN_TOOLS`."""
    name: str
    """Name of the tool in the client's request, without its namespace."""
    namespace: str | None
    function: Json


@dataclass(slots=True)
class ResponsesTools:
    """The tools of one body."""

    by_name: dict[str, OfferedTool] = field(default_factory=dict)
    """All tools that the client runs, by the name under which each is offered."""
    of_provider: list[str] = field(default_factory=list)
    """Types of the tools that the provider itself runs. They are not offered."""
    _names: dict[tuple[str | None, str], str] = field(default_factory=dict)
    """The offered name of each tool of the client, by (namespace, name)."""

    def add(self, raw: Any, path: str) -> list[str]:
        """Add one tool as the client wrote it. Return the names under which it is offered. Raises RequestError."""
        if isinstance(raw, dict) and raw.get("type") == "namespace":
            namespace = _name(raw, path)
            inner = raw.get("tools")
            if not isinstance(inner, list):
                raise invalid(f"{path}.tools", "expected an array of tools")
            return [
                name
                for position, tool in enumerate(inner)
                for name in self._add_one(tool, f"{path}.tools[{position}]", namespace)
            ]
        return self._add_one(raw, path, None)

    def _add_one(self, raw: Any, path: str, namespace: str | None) -> list[str]:
        kind = raw.get("type") if isinstance(raw, dict) else None
        if not isinstance(kind, str):
            raise invalid(path, "expected a tool with a type")
        if kind == "function":
            if isinstance(raw.get("function"), dict) and raw.get("name") is None:  # the form of Chat Completions
                raw, path = raw["function"], f"{path}.function"
            parameters = raw.get("parameters")
            if not isinstance(parameters, dict | None):
                raise invalid(f"{path}.parameters", "expected a JSON schema object")
            function = _function(raw.get("description"), parameters or object_schema([]))
            if raw.get("strict") is True:
                function["strict"] = True
            return self._offer("function", _name(raw, path), namespace, function)
        if kind == "custom":
            function = custom_parameters(raw.get("description"), raw.get("format"))
            return self._offer("custom", _name(raw, path), namespace, function)
        if kind == "tool_search":
            if raw.get("execution") != "client":
                return []  # all tools are offered, so there is nothing to search for
            parameters = raw.get("parameters")
            schema = parameters if isinstance(parameters, dict) else object_schema(["query"], query=_TEXT)
            description = raw.get("description") or "Search for more tools."
            return self._offer("tool_search", "tool_search", None, _function(description, schema))
        built_in = BUILT_IN_TOOLS.get(kind)
        if built_in is None:
            self.of_provider.append(kind)
            return []
        return self._offer(kind, kind, None, _function(built_in.description, built_in.parameters))

    def _offer(self, kind: str, name: str, namespace: str | None, function: Json) -> list[str]:
        offered = self._names.get((namespace, name))
        if offered is None:
            base = offered = _qualified(namespace, name)
            number = 2
            while offered in self.by_name:
                offered, number = f"{base}_{number}", number + 1
            self._names[namespace, name] = offered
        self.by_name[offered] = OfferedTool(kind, name, namespace, {"name": offered, **function})
        return [offered]

    def offered_name(self, namespace: str | None, name: str) -> str:
        """Return the engine's name for the tool that the client calls `name` in `namespace`.

        If the body no longer has this tool, return `namespace__name`, or `name` if there is no namespace.
        """
        return self._names.get((namespace, name)) or _qualified(namespace, name)

    def functions(self, names: Collection[str] | None = None) -> tuple[Json, ...]:
        """Return the function definitions for the engine. `names`: the offered names of the functions to return; None:
        all."""
        chosen = self.by_name if names is None else [name for name in self.by_name if name in names]
        return tuple({"type": "function", "function": self.by_name[name].function} for name in chosen)

    def choose(self, choice: Any) -> tuple[str | Json | None, tuple[Json, ...]]:
        """Return the engine's (tool_choice, tools) for the body's `tool_choice`. Raises RequestError.

        If the choice is of the type `allowed_tools`, only the allowed tools are offered, because the engine might call
        any tool that is offered.
        """
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            names = self._allowed(choice)
            mode = choice.get("mode")
            if mode == "auto":
                return ("auto" if names else None), self.functions(names)
            if mode == "required" and names:
                return "required", self.functions(names)
            raise invalid("tool_choice", "'allowed_tools' needs a mode (auto or required) and tools that are offered")
        mode = choice_mode(choice)
        if choice is None or mode in ("none", "auto"):
            return (mode if self.by_name else None), self.functions()
        if mode == "required":
            if not self.by_name:
                raise invalid("tool_choice", "it is 'required' but there are no tools to call")
            return mode, self.functions()
        if isinstance(choice, dict):
            name = self._find(choice)
            if name is None:
                raise invalid("tool_choice", "this tool is not among the tools that can be called here")
            return {"type": "function", "function": {"name": name}}, self.functions()
        raise invalid("tool_choice", "expected none, auto, required, or a tool")

    def _allowed(self, choice: Json) -> list[str]:
        tools = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise invalid("tool_choice", "its 'tools' must be an array of tools")
        names: list[str] = []
        for tool in tools:
            if tool.get("type") == "namespace":
                names += [name for name, known in self.by_name.items() if known.namespace == tool.get("name")]
            elif (name := self._find(tool)) is not None:
                names.append(name)
        return names

    def _find(self, reference: Json) -> str | None:
        kind = reference.get("type")
        name = reference.get("name") if kind in ("function", "custom") else kind
        namespace = reference.get("namespace")
        if not isinstance(name, str) or not isinstance(namespace, str | None):
            return None
        return self._names.get((namespace, name))


def _qualified(namespace: str | None, name: str) -> str:
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def _name(raw: Json, path: str) -> str:
    name = raw.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(path, "this tool needs a name")
    return name


def _function(description: Any, parameters: Json) -> Json:
    out: Json = {"description": description} if isinstance(description, str) else {}
    out["parameters"] = parameters
    return out


def built_in_item(kind: str, arguments: str) -> Json | None:
    """Return the fields of an output item that calls a built-in tool: its `type`, and the field with the arguments.

    None if such an item cannot hold exactly these arguments.
    """
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict):
        return None
    if kind == "tool_search":
        return {"type": "tool_search_call", "execution": "client", "arguments": value}
    tool = BUILT_IN_TOOLS[kind]
    content = {**tool.constants, **value}
    properties, required = tool.parameters["properties"], tool.parameters["required"]
    if not all(key in value and _matches(value[key], properties[key]) for key in required):
        return None
    if built_in_arguments(kind, content) != value:
        return None
    return {"type": tool.item, tool.arguments_field: content}


def built_in_arguments(kind: str, content: Json) -> Json:
    """Return the model's arguments of a call of a built-in tool, as the client sends the call back.

    `content`: the client's fields of the call. Nulls and the tool's `constants` are left out.
    """
    constants = BUILT_IN_TOOLS[kind].constants
    return {
        key: item
        for key, item in content.items()
        if item is not None and (key not in constants or item != constants[key])
    }


def _matches(value: Any, schema: Json) -> bool:
    if schema["type"] == "array":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, str) and value in schema.get("enum", (value,))
