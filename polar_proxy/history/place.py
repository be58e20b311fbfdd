"""Where a call stands in its session.

Messages are compared by meaning: role, text, tool calls by name and canonical arguments. Two histories with the same
meaning have the same chain of keys, whatever their bytes. A call `continues` an earlier one when its messages begin
with that call's messages and its answer; everything else is a `root` for now (rewinds, compactions, sub-agents and
side calls are named in `history/` too as they come).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import orjson

from polar_proxy.types import Edge, Json, Message, ToolCall

_EMPTY = b"\0" * 16


@dataclass(frozen=True, slots=True)
class Place:
    """The edge to an earlier call of the session, and the key of this call's own conversation."""

    edge: Edge
    parent_call_id: str | None
    key: bytes


@dataclass(slots=True)
class SessionHistory:
    """The conversations of one session by meaning: key of (messages + answer) -> the call that ended there."""

    ends: dict[bytes, str] = field(default_factory=dict)

    def place(self, messages: tuple[Message, ...]) -> Place:
        key = _EMPTY
        parent: str | None = None
        for message in messages:
            key = extend(key, message)
            parent = self.ends.get(key, parent)
        return Place("continues" if parent else "root", parent, key)

    def answered(self, place: Place, answer: Json, call_id: str) -> None:
        """Remember where this call ended, so that the next one can be found to continue it."""
        self.ends[extend(place.key, _from_json(answer))] = call_id


def extend(key: bytes, message: Message) -> bytes:
    """16-byte key of a conversation one message longer."""
    digest = hashlib.blake2b(key, digest_size=16)
    digest.update(meaning(message))
    return digest.digest()


def meaning(message: Message) -> bytes:
    """A message without what says nothing to the model: ids, cache marks, JSON spacing, string against list form."""
    role = "system" if message.role == "developer" else message.role
    calls = [(call.name, _canonical(call.arguments)) for call in message.tool_calls]
    return orjson.dumps([role, _text(message.content), calls])


def _text(content: str | list[Json] | None) -> object:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if all(part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return [{key: value for key, value in part.items() if key != "cache_control"} for part in content]


def _canonical(arguments: str) -> object:
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # no JSON, or nested deeper than can be written
        return arguments


def _from_json(message: Json) -> Message:
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return Message(message["role"], message.get("content"), tool_calls=calls)
