"""Text from agents and models for a terminal: control characters are shown, not obeyed.

A terminal obeys what it is sent: escape sequences set its title, write the clipboard, make links and erase lines, and
Unicode's direction and tag characters make a line look other than it is. Everything that is printed or logged passes
through here.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import traceback
from types import TracebackType
from typing import Any

_COMMANDS = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and newline, DEL, C1
    r"\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, invisible
    r"\U000e0000-\U000e007f"  # tags
    r"\ud800-\udfff"  # lone surrogates, which no output encodes
)
_CONTROL = re.compile(f"[{_COMMANDS}]")
_CONTROL_OR_BREAK = re.compile(f"[\\t\\n{_COMMANDS}]")
_LONGEST_LINE, _LONGEST_MESSAGE = 500, 8000
"""Characters."""


def escape_controls(text: str) -> str:
    """Return the text with control characters as escapes such as `\\x1b`. Tabs and newlines stay."""
    return _CONTROL.sub(_escaped, text)


def escape_json_controls(document: str) -> str:
    """Return a JSON document with the control characters in its strings as `\\u` escapes, which keeps its value."""
    return _CONTROL.sub(_json_escaped, document)


class JsonOutput(io.RawIOBase):
    """Standard output for JSON lines, without control characters in them."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        sys.stdout.write(escape_json_controls(bytes(data).decode()))
        return len(data)


def one_line(value: object, limit: int = _LONGEST_LINE) -> str:
    """Return a value as one line for a field or a table: line breaks and tabs are escaped too, a long text is cut."""
    text = str(value)
    return _CONTROL_OR_BREAK.sub(_escaped, text[:limit]) + (" ..." if len(text) > limit else "")


def message_lines(text: str, limit: int = _LONGEST_MESSAGE) -> str:
    """Return a message with its further lines indented, so that none of them looks like a separate message."""
    cut = text if len(text) <= limit else f"{text[:limit]} ..."
    return escape_controls(cut).replace("\n", "\n  ")


class SafeLogFormatter(logging.Formatter):
    """Formats a record, with its traceback, as one message."""

    def format(self, record: logging.LogRecord) -> str:
        return message_lines(super().format(record), 4 * _LONGEST_MESSAGE)


def configure_logging(level: int = logging.WARNING) -> None:
    """Send log records, and the traceback of an exception that ends this process, to standard error as safe text."""
    handler = logging.StreamHandler()
    handler.setFormatter(SafeLogFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    sys.excepthook = _print_exception


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(escape_controls("".join(traceback.format_exception(kind, error, trace))))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
