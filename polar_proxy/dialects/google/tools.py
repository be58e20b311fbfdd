"""Google's tools as OpenAI functions: declarations, their schemas, and the choice of the tools that the model may call.

Source: https://ai.google.dev/api/caching#Tool and #Schema. Tools that Google would run itself (googleSearch,
codeExecution, urlContext, ...) are not offered to the model, because no engine here can run them. `tools_of_provider`
returns their names.
"""

from __future__ import annotations

from typing import Any

from polar_proxy.dialects.fields import function_tool, invalid, missing
from polar_proxy.dialects.google.schema import FunctionCallingConfig, FunctionDeclaration, Tool, camel_case
from polar_proxy.types import Json

_COUNTS = {"maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties"}
_NOT_IN_JSON_SCHEMA = {"nullable", "propertyOrdering"}
_CAMEL_CASE = {"additionalProperties", "anyOf", *_COUNTS, *_NOT_IN_JSON_SCHEMA}
_MODES = ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED")


def parse_tools(tools: list[Tool]) -> tuple[Json, ...]:
    return tuple(
        _function(declaration, f"tools[{position}].functionDeclarations[{number}]")
        for position, tool in enumerate(tools)
        for number, declaration in enumerate(tool.function_declarations)
    )


def tools_of_provider(tools: list[Any]) -> list[str]:
    """Return the names of the tools that Google itself runs, such as `googleSearch`."""
    names = [camel_case(name) for tool in tools for name, value in tool.items() if value is not None]
    return [name for name in names if name != "functionDeclarations"]


def _function(declaration: FunctionDeclaration, path: str) -> Json:
    if not declaration.name:
        raise missing(f"{path}.name")
    parameters = declaration.parameters_json_schema
    if parameters is None:
        parameters = json_schema(declaration.parameters)
    return function_tool(declaration.name, declaration.description, parameters)


def json_schema(schema: Any) -> Any:
    """Convert Google's Schema (an OpenAPI subset) to JSON schema.

    Type names become lower case, `nullable` becomes the type `null`, counts that came as strings become numbers, and
    `propertyOrdering` is dropped. Names inside `properties`, and values of `enum`, `default` and `example`, are data
    and stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    out: Json = {}
    for word, value in schema.items():
        key = camel if (camel := camel_case(word)) in _CAMEL_CASE else word
        if value is None or key in _NOT_IN_JSON_SCHEMA:
            continue
        if key == "type" and isinstance(value, str):
            if value.upper() == "TYPE_UNSPECIFIED":
                continue
            value = value.lower()
        elif key in ("properties", "defs", "$defs") and isinstance(value, dict):
            value = {name: json_schema(inner) for name, inner in value.items()}
        elif key in ("items", "additionalProperties"):
            value = json_schema(value)
        elif key == "anyOf" and isinstance(value, list):
            value = [json_schema(inner) for inner in value]
        elif key in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
            value = int(value)
        out[f"${key}" if key in ("defs", "ref") else key] = value
    if schema.get("nullable") is True:
        if isinstance(out.get("type"), str):
            out["type"] = [out["type"], "null"]
            if isinstance(out.get("enum"), list):
                out["enum"] = [*out["enum"], None]
        elif isinstance(out.get("anyOf"), list):
            out["anyOf"] = [*out["anyOf"], {"type": "null"}]
    return out


def parse_tool_choice(
    config: FunctionCallingConfig, tools: tuple[Json, ...]
) -> tuple[tuple[Json, ...], str | Json | None]:
    """Return (tools to offer, OpenAI's tool_choice).

    If `allowedFunctionNames` is not empty, the modes ANY and VALIDATED offer only the tools that it names, because
    engines cannot restrict a choice to some of the offered tools. In all other respects VALIDATED is treated as AUTO.
    Google also enforces the tools' schemas in mode VALIDATED. Engines here enforce schemas in every mode or in none.
    """
    path = "toolConfig.functionCallingConfig"
    mode = (config.mode or "AUTO").upper()
    if mode not in _MODES:
        raise invalid(f"{path}.mode", "expected AUTO, ANY, NONE or VALIDATED")
    declared = {tool["function"]["name"] for tool in tools}
    allowed = set(config.allowed_function_names)
    if unknown := [name for name in config.allowed_function_names if name not in declared]:
        raise invalid(f"{path}.allowedFunctionNames", f"{unknown[0]!r:.80} is not among the declared functions")
    if mode in ("ANY", "VALIDATED") and allowed:
        tools = tuple(tool for tool in tools if tool["function"]["name"] in allowed)
    if mode == "ANY":
        if not tools:
            raise invalid(f"{path}.mode", "it is ANY but no functions are declared")
        if len(tools) == 1:
            return tools, {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
        return tools, "required"
    if mode == "NONE":
        return tools, "none"
    return tools, "auto" if config.mode is not None and tools else None
