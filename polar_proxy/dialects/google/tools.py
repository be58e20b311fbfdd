"""Google's tools as OpenAI's: function declarations, their schemas, and which of them the model may call.

Source: https://ai.google.dev/api/caching#Tool and #Schema. Tools that Google would run itself (googleSearch,
codeExecution, urlContext, ...) are tolerated and not offered: no engine here can run them.
"""

from __future__ import annotations

from typing import Any

from polar_proxy.dialects.google.fields import field, objects, raw_field, snake
from polar_proxy.errors import RequestError
from polar_proxy.types import Json

_CAMEL = {
    snake(name): name
    for name in (
        *("additionalProperties", "anyOf", "maxItems", "minItems", "maxLength", "minLength", "maxProperties"),
        *("minProperties", "propertyOrdering"),
    )
}
_NUMBERS = {"maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties"}
_NOT_JSON_SCHEMA = {"nullable", "propertyOrdering"}


def parse_tools(body: Json) -> tuple[Json, ...]:
    """The declared functions in OpenAI's form."""
    functions = []
    for position, tool in enumerate(objects(body, "tools")):
        where = f"tools[{position}]"
        for number, declaration in enumerate(objects(tool, "functionDeclarations", where)):
            functions.append(_function(declaration, f"{where}.functionDeclarations[{number}]"))
    return tuple(functions)


def _function(declaration: Json, where: str) -> Json:
    name = field(declaration, "name", str, where)
    if not name:
        raise RequestError(f"Missing '{where}.name': a function needs a name.", param=f"{where}.name")
    function: Json = {"name": name}
    description = field(declaration, "description", str, where)
    if description is not None:
        function["description"] = description
    parameters = field(declaration, "parametersJsonSchema", dict, where)
    if parameters is None:
        schema = field(declaration, "parameters", dict, where)
        parameters = {"type": "object", "properties": {}} if schema is None else json_schema(schema)
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def json_schema(schema: Any) -> Any:
    """Google's Schema (an OpenAPI subset) as JSON schema.

    Type names in lower case, `nullable` as a type of its own, 64-bit numbers that came as strings as numbers, and
    without `propertyOrdering`. What is in `properties`, `enum`, `default` and `example` is data, not schema words.
    """
    if not isinstance(schema, dict):
        return schema
    words: Json = schema
    out: Json = {}
    for word, value in words.items():
        key = _CAMEL.get(word, word)
        if value is None or key in _NOT_JSON_SCHEMA:
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
        elif key in _NUMBERS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
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


def parse_tool_choice(body: Json, tools: tuple[Json, ...]) -> tuple[tuple[Json, ...], str | Json | None]:
    """(tools to offer, OpenAI's tool_choice).

    `allowedFunctionNames` (of modes ANY and VALIDATED) narrows what is offered, as no engine knows a choice among
    some of the tools. VALIDATED is AUTO otherwise: engines write arguments by the schema or not at all.
    """
    config = field(body, "toolConfig", dict) or {}
    where = "toolConfig.functionCallingConfig"
    calling = field(config, "functionCallingConfig", dict, "toolConfig") or {}
    mode = (field(calling, "mode", str, where) or "AUTO").upper()
    if mode not in ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise RequestError(
            f"Invalid value for '{where}.mode': expected AUTO, ANY, NONE or VALIDATED.",
            param=f"{where}.mode",
            code="invalid_value",
        )
    allowed = _allowed(calling, where, {tool["function"]["name"] for tool in tools})
    if mode in ("ANY", "VALIDATED") and allowed:
        tools = tuple(tool for tool in tools if tool["function"]["name"] in allowed)
    if mode == "ANY":
        if not tools:
            raise RequestError(f"'{where}.mode' is ANY but no functions are declared.", param=f"{where}.mode")
        if len(tools) == 1:
            return tools, {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
        return tools, "required"
    if mode == "NONE":
        return tools, "none"
    return tools, "auto" if raw_field(calling, "mode") is not None and tools else None


def _allowed(calling: Json, where: str, declared: set[str]) -> set[str]:
    names = field(calling, "allowedFunctionNames", list, where) or []
    path = f"{where}.allowedFunctionNames"
    for name in names:
        if not isinstance(name, str) or name not in declared:
            raise RequestError(f"Invalid '{path}': {name!r:.80} is not among the declared functions.", param=path)
    return set(names)
