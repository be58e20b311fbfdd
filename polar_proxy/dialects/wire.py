"""Bytes shared by the dialects: JSON values to store, server-sent events, and compressed text in opaque strings."""

from __future__ import annotations

import zlib
from typing import Any

import orjson

from polar_proxy.errors import RequestError
from polar_proxy.types import Json


def to_json(value: Any, param: str) -> bytes:
    """Return a value of a body as JSON bytes. Raises RequestError for a value that cannot be serialised."""
    # orjson reads deeper nesting than it writes. The eight lists leave room for the layers that later wrap the value.
    try:
        return orjson.dumps([[[[[[[[value]]]]]]]])[8:-8]
    except TypeError as error:
        raise RequestError(
            f"Invalid '{param}': nested too deeply, or it holds an integer of more than 64 bits or broken Unicode.",
            param=param,
            code="invalid_value",
        ) from error


def storable_params(body: Json, *separate: str) -> Json:
    """Return the fields of a body except `separate`, which are stored apart. Raises RequestError as `to_json` does."""
    params = {key: value for key, value in body.items() if key not in separate}
    to_json(params, "body")
    return params


def stored_tools(tools: bytes | None) -> Json:
    """Return the field `tools` of a body from its stored bytes."""
    return {} if tools is None else {"tools": orjson.loads(tools)}


def sse(payload: Any) -> bytes:
    """Return an unnamed server-sent event with a JSON payload."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_sse(name: str, payload: Any) -> bytes:
    """Return a server-sent event called `name` with a JSON payload."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def is_json_object(text: str) -> bool:
    """Return whether `text` is a complete JSON object."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def decompress(packed: bytes, max_bytes: int) -> bytes:
    """Undo `zlib.compress`.

    Raises ValueError for data that is broken, truncated, or larger than `max_bytes`: it comes from a client that may
    want to exhaust the memory.
    """
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(packed, max_bytes)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not decompressor.eof:
        raise ValueError("truncated, or too long")
    return data
