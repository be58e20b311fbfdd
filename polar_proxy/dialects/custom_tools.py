"""Custom tools, whose input is free text.

Engines know only functions, so a custom tool becomes a function with one string parameter `input`. The function's
description contains the tool's grammar, which is not enforced.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from polar_proxy.dialects.fields import object_schema
from polar_proxy.dialects.wire import to_json
from polar_proxy.types import Json

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Characters and complete escapes; the first half of a surrogate pair waits for the second.
_COMPLETE = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)


def custom_parameters(description: Any, form: Any) -> Json:
    """Return description and parameters of the function that replaces a custom tool.

    `form`: the object that may hold the tool's grammar, in the fields `definition` and `syntax`.
    """
    lines = [description] if isinstance(description, str) and description else []
    lines.append("Give the whole text as the string `input`.")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        lines.append(f"The text must follow this {form.get('syntax') or ''} grammar:\n{form['definition']}")
    return {"description": "\n\n".join(lines), "parameters": object_schema(["input"], input={"type": "string"})}


def custom_input(arguments: str) -> str | None:
    """Return the text in the arguments of a custom tool's call; None if they are not of the form `{"input": text}`."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    if isinstance(value, dict) and list(value) == ["input"] and isinstance(value["input"], str):
        return value["input"]
    return None


def begins_as_input(arguments: str) -> bool:
    """Return whether a custom tool's arguments begin with `{"input": "`. If so, the tool's input can be streamed."""
    return _HEAD.match(arguments) is not None


def custom_arguments(text: str, path: str) -> str:
    """Return the arguments of a custom tool's call from the text that the client sends back. Raises RequestError.

    The arguments are `{"input": text}`, with one exception. If the text begins with `{"input": "` but as a whole
    does not have this form, the client was sent the arguments unchanged. Then return the text. `path`: the text's path
    in the body, for errors.
    """
    if begins_as_input(text) and custom_input(text) is None:
        return text
    return to_json({"input": text}, path).decode()


class CustomInputDecoder:
    """Decodes the text of a custom tool's call while its arguments arrive in pieces.

    Other arguments may follow the text. Check the complete arguments with `custom_input` to see whether they have the
    expected form.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._inside = False
        self.began = False
        """True once the arguments have begun with `{"input": "`."""

    def feed(self, piece: str) -> str:
        self._buffer += piece
        if not self.began:
            head = _HEAD.match(self._buffer)
            if head is None:
                return ""
            self.began = self._inside = True
            self._buffer = self._buffer[head.end() :]
        if not self._inside:
            return ""
        complete = _COMPLETE.match(self._buffer)
        if complete is None:
            self._inside = not self._buffer.startswith('"')
            return ""
        self._buffer = self._buffer[complete.end() :]
        self._inside = not self._buffer.startswith('"')
        return str(orjson.loads(f'"{complete[0]}"'))
