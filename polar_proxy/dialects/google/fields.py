"""Reading Google's JSON: each field by its camelCase or its snake_case name, typed, with errors that name the path.

Proto JSON accepts both spellings of every field, numbers written as strings for 64-bit integers, and a single object
where a list of objects is meant; Google's own examples use all three.
Source: https://protobuf.dev/programming-guides/json/
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, TypeVar

from polar_proxy.dialects.openai_common import take
from polar_proxy.errors import RequestError
from polar_proxy.types import Json

T = TypeVar("T")

_UPPER = re.compile("[A-Z]")
_DIGITS = re.compile("-?[0-9]{1,18}")


@lru_cache(maxsize=256)
def snake(name: str) -> str:
    """`functionCall` as `function_call`."""
    return _UPPER.sub(lambda found: "_" + found[0].lower(), name)


def raw_field(value: Json, name: str) -> Any:
    """The field in either spelling; None when it is absent or null."""
    found = value.get(name)
    return value.get(snake(name)) if found is None else found


def field(
    value: Json,
    name: str,
    kind: type[T],
    where: str = "",
    *,
    low: float = -(2**63),
    high: float = 2**63 - 1,
) -> T | None:
    """The field if it is of this kind and within [low, high]; else a 400 naming `where.name`."""
    found = raw_field(value, name)
    if found is None:
        return None
    if kind is int and isinstance(found, str) and _DIGITS.fullmatch(found):
        found = int(found)
    path = f"{where}.{name}" if where else name
    return take({path: found}, path, kind, low=low, high=high)


def objects(value: Json, name: str, where: str = "") -> list[Json]:
    """A repeated field of objects; one object alone counts as a list of one."""
    found = raw_field(value, name)
    path = f"{where}.{name}" if where else name
    items = [found] if isinstance(found, dict) else take({path: found}, path, list) or []
    for position, item in enumerate(items):
        if not isinstance(item, dict):
            raise RequestError(
                f"Invalid type for '{path}[{position}]': expected an object.",
                param=f"{path}[{position}]",
                code="invalid_type",
            )
    return items


def without(value: Json, *names: str) -> Json:
    """The object without these fields, in whichever spelling they came."""
    gone = {*names, *map(snake, names)}
    return {key: item for key, item in value.items() if key not in gone}
