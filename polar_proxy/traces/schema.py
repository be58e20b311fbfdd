"""A JSON value against a JSON Schema, as far as `certificate.schema.json` uses the language (draft 2020-12).

That is: type, enum, const, minimum, pattern, minItems, maxItems, items, prefixItems, properties, required,
additionalProperties, anyOf, $ref; another keyword is an error. So a checker needs no package for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

import orjson

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "null": type(None),
}
_ANNOTATIONS = frozenset({"$schema", "$defs", "title"})


@cache
def certificate_schema() -> Mapping[str, Any]:
    """The published schema."""
    file = resources.files("polar_proxy.traces") / "certificate.schema.json"
    found: Mapping[str, Any] = orjson.loads(file.read_bytes())
    return found


def violations(value: Any, schema: Mapping[str, Any], at: str = "certificate", root: Any = None) -> Iterator[str]:
    """One line for each place where the value is not as the schema says."""
    root = schema if root is None else root
    if "$ref" in schema:
        yield from violations(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], at, root)
        return
    for keyword, wanted in schema.items():
        if keyword == "anyOf":
            tried = [list(violations(value, one, at, root)) for one in wanted]
            if all(tried):
                yield min(tried, key=len)[0]
        elif keyword in _CHECKS:
            if (fault := _CHECKS[keyword](value, wanted)) is not None:
                yield f"{at} {fault}"
                return  # what comes after would only say it again
        elif keyword in ("properties", "items", "prefixItems"):
            for inner, part, name in _parts(value, keyword, wanted):
                yield from violations(inner, part, f"{at}{name}", root)
        elif keyword == "additionalProperties":
            if isinstance(value, dict) and (more := sorted(set(value) - set(schema["properties"]))):
                yield f"{at} has {', '.join(more)}, which it should not"
        elif keyword not in _ANNOTATIONS:
            raise NotImplementedError(f"the schema keyword {keyword}")


def _parts(value: Any, keyword: str, wanted: Any) -> Iterator[tuple[Any, Any, str]]:
    if keyword == "properties" and isinstance(value, dict):
        yield from ((value[name], part, f".{name}") for name, part in wanted.items() if name in value)
    elif keyword == "items" and isinstance(value, list):
        yield from ((inner, wanted, f"[{place}]") for place, inner in enumerate(value))
    elif keyword == "prefixItems" and isinstance(value, list):
        pairs = zip(value, wanted, strict=False)
        yield from ((inner, part, f"[{place}]") for place, (inner, part) in enumerate(pairs))


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and not (name == "integer" and isinstance(value, bool))


def _type(value: Any, wanted: Any) -> str | None:
    names = [wanted] if isinstance(wanted, str) else wanted
    return None if any(_is(value, name) for name in names) else f"is not of type {' or '.join(names)}"


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


_CHECKS: dict[str, Any] = {
    "type": _type,
    "const": lambda value, wanted: None if _same(value, wanted) else f"is not {wanted!r}",
    "enum": lambda value, wanted: None if any(_same(value, one) for one in wanted) else f"is none of {wanted}",
    "minimum": lambda value, wanted: f"is below {wanted}" if _is(value, "integer") and value < wanted else None,
    "pattern": lambda value, wanted: (
        f"is not of the form {wanted}" if isinstance(value, str) and not re.search(wanted, value) else None
    ),
    "minItems": lambda value, wanted: f"has fewer than {wanted} items" if _items(value) < wanted else None,
    "maxItems": lambda value, wanted: f"has more than {wanted} items" if _items(value, 0) > wanted else None,
    "required": lambda value, wanted: (
        f"lacks {', '.join(missing)}"
        if isinstance(value, dict) and (missing := [name for name in wanted if name not in value])
        else None
    ),
}


def _items(value: Any, otherwise: int = 1 << 30) -> int:
    return len(value) if isinstance(value, list) else otherwise
