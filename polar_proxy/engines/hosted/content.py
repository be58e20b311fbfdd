"""Helpers to write requests for Anthropic and Google: turns, data URLs, files, tool arguments."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from polar_proxy.errors import RequestError
from polar_proxy.types import Json, Message

_DATA_URL = re.compile(r"data:(?P<mime>[^;,]*)(?:;[^;,]+)*;base64,", re.IGNORECASE)
SYSTEM = frozenset({"system", "developer"})
"""Roles of system messages."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


class Media(NamedTuple):
    """An image, sound, video or file in a message: base64 `data` of the MIME type `mime`, or a `url`."""

    kind: str
    """image, audio, video or file."""
    mime: str
    data: str = ""
    url: str = ""
    name: str | None = None

    def text(self) -> str:
        """Return the content of a text file. Raises RequestError if it is not UTF-8."""
        try:
            return b64decode(self.data).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise unsupported_part("a text file that is not UTF-8") from error


def split_system(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Return the system messages at the beginning, and all messages after them."""
    leading = next((at for at, message in enumerate(messages) if message.role not in SYSTEM), len(messages))
    return messages[:leading], messages[leading:]


def add_to_turn(turns: list[Json], role: str, field: str, content: list[Json]) -> None:
    """Add content of a role to the turns.

    If the last turn has this role, append the content to its `field`; otherwise append a new turn. Empty content is
    left out, because the APIs refuse empty turns.
    """
    if content and turns and turns[-1]["role"] == role:
        turns[-1][field] += content
    elif content:
        turns.append({"role": role, field: content})


def parts_of(message: Message) -> list[Json]:
    """Return the message's content as a list of parts, which is empty for empty content."""
    if isinstance(message.content, list):
        return message.content
    return [{"type": "text", "text": message.content}] if message.content else []


def part_text(part: Json) -> str:
    return str(part.get("text", part.get("refusal", "")))


def read_media(part: Json) -> Media:
    """Return the media in a part that is not text. Raises RequestError for an unknown or malformed part."""
    kind = str(part.get("type"))
    value: Any = part.get(kind)
    if kind in ("image_url", "audio_url", "video_url"):
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str):
            return _from_url(kind.removesuffix("_url"), url)
    elif kind == "input_audio" and isinstance(value, dict) and isinstance(value.get("data"), str):
        return Media("audio", f"audio/{value.get('format', 'wav')}", value["data"])
    elif kind == "file" and isinstance(value, dict):
        url = value.get("file_data") or value.get("file_url")
        if isinstance(url, str):
            name = value.get("filename")
            return _from_url("file", url)._replace(name=name if isinstance(name, str) else None)
    raise unsupported_part(f"a part of type {kind!r:.80}")


def _from_url(kind: str, url: str) -> Media:
    found = _DATA_URL.match(url)
    if found is not None:
        return Media(kind, found["mime"] or "application/octet-stream", data=url[found.end() :])
    if url.startswith(("http://", "https://", "gs://")):
        return Media(kind, "", url=url)
    raise unsupported_part(f"a {kind} that is neither base64 data nor a URL")


def unsupported_part(what: str) -> RequestError:
    return RequestError(f"This provider does not accept {what}.", param="messages", code="unsupported_value")


def arguments_object(arguments: str) -> Json:
    """Return the arguments of a tool call as a JSON object.

    A model may write text that is not a JSON object. Such text becomes `{"arguments": text}`, empty text `{}`.
    """
    if not arguments.strip():
        return {}
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def forced_tool(tool_choice: object) -> str | None:
    """Return the name of the tool that the model must call; None if `tool_choice` names no tool."""
    if isinstance(tool_choice, dict) and isinstance(function := tool_choice.get("function"), dict):
        return str(function.get("name"))
    return None


def schema_of(response_format: Json) -> Json | None:
    """Return the JSON schema of a response format; None if the format has none."""
    schema = (response_format.get("json_schema") or {}).get("schema")
    return schema if isinstance(schema, dict) else None
