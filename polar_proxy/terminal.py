"""Text from agents and models for a terminal: control characters are shown, not obeyed.

A terminal obeys what it is sent: escape sequences set its title, write the clipboard, make links and erase lines, and
Unicode's direction and tag characters make a line look other than it is. Everything that is printed or logged passes
through here. `configure_logging` is the only place that configures the log.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
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
"""Maximum number of characters of a value in one line, and of a message. The rest is cut off."""
_LOG_LINE, _LOG_TIME = "%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"
_OWN_PACKAGES = ("polar_proxy", "harness_adapters", "sandboxes")


def escape_controls(text: str) -> str:
    """Return the text with control characters as escapes such as `\\x1b`. Tabs and newlines stay."""
    return _CONTROL.sub(_escaped, text)


def escape_json_controls(document: str) -> str:
    """Return a JSON document with the control characters in its strings as `\\u` escapes. Its value stays the same."""
    return _CONTROL.sub(_json_escaped, document)


class JsonOutput(io.RawIOBase):
    """Standard output for JSON lines. Control characters are written as JSON escapes."""

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


_log_ids: ContextVar[Mapping[str, str]] = ContextVar("polar_log_ids", default=MappingProxyType({}))


class LogContext:
    """Ids that are added to every line that is logged in the `with` block, or in a task that was started in the
    block."""

    def __init__(self, **ids: str | None) -> None:
        """An id that is None is left out."""
        self._ids = {name: value for name, value in ids.items() if value is not None}

    def __enter__(self) -> None:
        self._token = _log_ids.set({**_log_ids.get(), **self._ids})

    def __exit__(self, *error: object) -> None:
        _log_ids.reset(self._token)


class SafeLogFormatter(logging.Formatter):
    """Formats a record, with its traceback, as one message. If the message lacks an id of `LogContext`, the id is
    appended."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        rest = [f"{name}={one_line(value)}" for name, value in _log_ids.get().items() if value not in line]
        return f"{line} ({' '.join(rest)})" if rest else line

    def format(self, record: logging.LogRecord) -> str:
        return message_lines(super().format(record), 4 * _LONGEST_MESSAGE)


class JsonLogFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, the ids of `LogContext`, the items of the
    dict that was logged as `fields`, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        document = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_LONGEST_MESSAGE],
            **_log_ids.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)[-4 * _LONGEST_MESSAGE :]
        return escape_json_controls(json.dumps(document, default=str))


class LogHandler(logging.Handler):
    """Writes Polar's log records, and the warnings and errors of libraries, to standard error.

    `sys.stderr` is looked up for each record, because a live table replaces `sys.stderr` while the table is shown. Log
    lines then appear above the table.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.partition(".")[0] not in _OWN_PACKAGES:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every logging handler does: a log line must not end what logs it
            self.handleError(record)


def configure_logging(level: str = "warning", form: str = "text") -> None:
    """Send log records, and the traceback of an exception that ends this process, to standard error as safe text.

    `form` is `text` or `json`. A later call replaces the level and the form of an earlier one.
    """
    handler = LogHandler()
    handler.setFormatter(JsonLogFormatter() if form == "json" else SafeLogFormatter(_LOG_LINE, _LOG_TIME))
    root = logging.getLogger()
    root.handlers = [*(one for one in root.handlers if not isinstance(one, LogHandler)), handler]
    root.setLevel(level.upper())
    sys.excepthook = _print_exception


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(escape_controls("".join(traceback.format_exception(kind, error, trace))))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _json_escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))
