"""Polar's `thoughtSignature`: the part of an answer that is not in the visible parts.

Clients send signatures back unchanged even when they drop the thought text (Gemini CLI does), so the reasoning travels
in them. To a client they are opaque base64, as Google's are; they hold no secret. `unpack(pack(x)) == x`, and any other
string (a real Google signature, `skip_thought_signature_validator`, a truncated or inflated value) unpacks to None.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass

import orjson

from polar_proxy.dialects.wire import decompress
from polar_proxy.types import ToolCall

_PREFIX = b"polar1."
_MAX_BYTES = 16 << 20
"""Limit of an unpacked signature. No reasoning is that long, but a hostile value could inflate without end."""


@dataclass(frozen=True, slots=True)
class SignedReasoning:
    """A piece of a turn's reasoning, from character `start` on, and the call that was sent as text, if any."""

    start: int = 0
    reasoning: str = ""
    call: ToolCall | None = None


def pack(signed: SignedReasoning) -> str:
    call = None if signed.call is None else [signed.call.id, signed.call.name, signed.call.arguments]
    content = orjson.dumps([signed.start, signed.reasoning, call])
    return base64.b64encode(_PREFIX + zlib.compress(content)).decode()


def unpack(signature: str) -> SignedReasoning | None:
    """Undo `pack`; None for any other string.

    The URL-safe alphabet and missing padding are accepted, because SDKs encode the bytes again.
    """
    plain = signature.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        if not data.startswith(_PREFIX):
            return None
        content = orjson.loads(decompress(data[len(_PREFIX) :], _MAX_BYTES))
    except ValueError:  # binascii.Error is a subclass
        return None
    match content:
        case [int(start), str(reasoning), None] if start >= 0:
            return SignedReasoning(start, reasoning)
        case [int(start), str(reasoning), [str(call_id), str(name), str(arguments)]] if start >= 0:
            return SignedReasoning(start, reasoning, ToolCall(call_id, name, arguments))
    return None


def extend_reasoning(known: str, signed: SignedReasoning) -> str:
    """Return the reasoning with one more piece. A repeated signature, or one after a gap, changes nothing."""
    end = signed.start + len(signed.reasoning)
    if signed.start <= len(known) < end:
        return known[: signed.start] + signed.reasoning
    return known
