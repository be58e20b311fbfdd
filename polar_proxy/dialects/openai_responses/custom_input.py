"""The text inside the arguments of a custom tool's call, `{"input": "..."}`.

Arguments of another form are handed to the client as they are, and are known again when they come back: by the item's
id where they do not even begin as they should (see `openai_responses_items`), by `broken` where they do.
"""

from __future__ import annotations

import re

import orjson

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Characters and whole escapes; half of a surrogate pair waits for the other half.
_WHOLE = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)


def custom_input(arguments: str) -> str | None:
    """The text in the arguments of a custom tool's call; None when they are not of the form `{"input": text}`."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    if isinstance(value, dict) and list(value) == ["input"] and isinstance(value["input"], str):
        return value["input"]
    return None


def begins(arguments: str) -> bool:
    """The arguments begin as they should, so that their text can be told while it comes."""
    return _HEAD.match(arguments) is not None


def broken(arguments: str) -> bool:
    """They begin as they should, but what follows is of another form."""
    return begins(arguments) and custom_input(arguments) is None


class CustomInputDecoder:
    """Feed it the argument string in pieces, get the decoded text in pieces, as far as it is certain.

    `began` says that the arguments begin as they should. What they turn out to be in the end is for `custom_input` to
    say: behind a text that was told here something may follow that makes the whole another form.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._inside = False
        self.began = False

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
        whole = _WHOLE.match(self._buffer)
        if whole is None:
            self._inside = not self._buffer.startswith('"')
            return ""
        self._buffer = self._buffer[whole.end() :]
        self._inside = not self._buffer.startswith('"')
        return str(orjson.loads(f'"{whole[0]}"'))
