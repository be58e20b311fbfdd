"""JSON for the database: orjson, with the standard library for the values that orjson refuses."""

from __future__ import annotations

import json
from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    """Return compact JSON. Lone surrogates, which orjson refuses, become JSON escapes."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


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
