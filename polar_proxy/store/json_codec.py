"""JSON for the database: orjson, with the standard library for the values that orjson refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    """Return compact JSON. Lone surrogates, which orjson refuses, become JSON escapes."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def dumps_object(fields: Mapping[str, Any]) -> bytes:
    """Return compact JSON of an object. A value that is an iterator is written as a list.

    The items of an iterator are encoded one at a time. So a long list is never in memory as a whole, and other threads
    of this process run between two items.
    """
    pairs = (dumps(name) + b":" + _dumps_value(value) for name, value in fields.items())
    return b"{" + b",".join(pairs) + b"}"


def _dumps_value(value: Any) -> bytes:
    return b"[" + b",".join(map(dumps, value)) + b"]" if isinstance(value, Iterator) else dumps(value)


def dumps_text(value: Any) -> str:
    return dumps(value).decode()


def loads(text: str | bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def clean_text(text: str | None) -> str | None:
    """Replace characters that the databases do not accept in text: NUL (PostgreSQL) and lone surrogates (UTF-8)."""
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
