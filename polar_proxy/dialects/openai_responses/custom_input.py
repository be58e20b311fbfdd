"""The text inside the arguments of a custom tool's call, `{"input": "..."}`.

Arguments of another form are sent to the client unchanged, and are recognised when they come back: by the item's id if
they do not begin as expected (see `items`), or by `is_broken_input` if they do.
"""

from __future__ import annotations

import re

import orjson

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Characters and complete escapes; the first half of a surrogate pair waits for the second.
_COMPLETE = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)


def custom_input(arguments: str) -> str | None:
    """Return the text in the arguments of a custom tool's call; None for arguments of another form."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    if isinstance(value, dict) and list(value) == ["input"] and isinstance(value["input"], str):
        return value["input"]
    return None


def begins_as_input(arguments: str) -> bool:
    """Return whether the arguments begin as `{"input": "`, so that their text can be streamed."""
    return _HEAD.match(arguments) is not None


def is_broken_input(arguments: str) -> bool:
    """Return whether the arguments begin as expected and continue in another form."""
    return begins_as_input(arguments) and custom_input(arguments) is None


class CustomInputDecoder:
    """Takes the argument string in pieces and returns the decoded text as far as it is certain.

    The final form of the arguments is decided by `custom_input`: text after the string may still break the form.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._inside = False
        self.began = False
        """True once the arguments have begun as expected."""

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
