"""What a `thoughtSignature` of Polar holds: that which the visible part of an answer does not say.

Clients send signatures back untouched even where they drop thought text (Gemini CLI does), so the reasoning travels
in them. To a client they are opaque base64, as Google's are; they are no secret. `unpack(pack(x)) == x`, and whatever
else comes (a real Google signature, `skip_thought_signature_validator`, a cut or inflated value) unpacks to nothing.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass

import orjson

from polar_proxy.dialects.wire import inflate
from polar_proxy.types import ToolCall

_PREFIX = b"polar1."
_LONGEST = 16 << 20
"""Bytes that a signature may unpack to; nobody reasons that long, but a hostile value could inflate for ever."""


@dataclass(frozen=True, slots=True)
class SignedReasoning:
    """A stretch of the turn's reasoning that begins at character `at` of it, and the call that a text stands for."""

    at: int = 0
    reasoning: str = ""
    call: ToolCall | None = None


def pack(signed: SignedReasoning) -> str:
    call = None if signed.call is None else [signed.call.id, signed.call.name, signed.call.arguments]
    content = orjson.dumps([signed.at, signed.reasoning, call])
    return base64.b64encode(_PREFIX + zlib.compress(content)).decode()


def unpack(signature: str) -> SignedReasoning | None:
    """None for what `pack` did not write. The URL-safe alphabet and missing padding are read too: SDKs re-encode."""
    plain = signature.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        if not data.startswith(_PREFIX):
            return None
        content = orjson.loads(inflate(data[len(_PREFIX) :], _LONGEST))
    except ValueError:  # binascii.Error is one
        return None
    match content:
        case [int(at), str(reasoning), None] if at >= 0:
            return SignedReasoning(at, reasoning)
        case [int(at), str(reasoning), [str(call_id), str(name), str(arguments)]] if at >= 0:
            return SignedReasoning(at, reasoning, ToolCall(call_id, name, arguments))
    return None


def extend_reasoning(so_far: str, signed: SignedReasoning) -> str:
    """The reasoning with one more stretch; copies of a signature and gaps change nothing."""
    end = signed.at + len(signed.reasoning)
    if signed.at <= len(so_far) < end:
        return so_far[: signed.at] + signed.reasoning
    return so_far
