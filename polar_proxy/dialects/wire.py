"""Encodings shared by the dialects: JSON values to store, server-sent events, and text sealed in opaque strings.

Many clients drop an answer's reasoning and send back only the opaque string beside it (a signature, encrypted content).
So Polar puts the reasoning itself into that string, as base64 of a prefix and the compressed text.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import orjson

from polar_proxy.dialects.fields import invalid
from polar_proxy.types import Json

_SEAL_PREFIX = b"polar1."
MAX_SEALED_BYTES = 16 << 20
"""Maximum size of an unsealed text. The sealed string comes from the client, so it may be a zip bomb."""


def to_json(value: Any, param: str) -> bytes:
    """Return a value of a body as JSON bytes. Raises RequestError for a value that cannot be serialised."""
    # orjson reads deeper nesting than it writes. The eight lists leave room for the layers that later wrap the value.
    try:
        return orjson.dumps([[[[[[[[value]]]]]]]])[8:-8]
    except TypeError as error:
        problem = "nested too deeply, or it holds an integer of more than 64 bits or broken Unicode"
        raise invalid(param, problem) from error


def storable_params(body: Json, *separate: str) -> Json:
    """Return the fields of a body except `separate`, which are stored apart. Raises RequestError as `to_json` does."""
    params = {key: value for key, value in body.items() if key not in separate}
    to_json(params, "body")
    return params


def sse(payload: Any) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_sse(name: str, payload: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def is_json_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def seal(text: str) -> str:
    """Return text as an opaque string that clients send back unchanged. The text is encoded, not encrypted."""
    return base64.b64encode(_SEAL_PREFIX + zlib.compress(text.encode())).decode().rstrip("=")


def unseal(value: object) -> str | None:
    """Undo `seal`. Return None for any other value, such as another provider's signature or a damaged string.

    URL-safe base64 and padding are accepted, because SDKs encode the bytes again.
    """
    if not isinstance(value, str):
        return None
    plain = value.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        if not data.startswith(_SEAL_PREFIX):
            return None
        decompressor = zlib.decompressobj()
        content = decompressor.decompress(data[len(_SEAL_PREFIX) :], MAX_SEALED_BYTES)
        return content.decode() if decompressor.eof else None
    except (ValueError, zlib.error):  # binascii.Error and UnicodeDecodeError are kinds of ValueError
        return None
