"""Anthropic's errors. Source: https://docs.anthropic.com/en/api/errors

Claude Code acts on the text of two errors: it compacts the conversation when a 400 begins with `prompt is too long`,
and requests fewer tokens after `input length and max_tokens exceed context limit`. Engines use other texts, with the
code `context_length_exceeded` for both. Confusing the two would make an agent compact a conversation that fits.
"""

from __future__ import annotations

import re

import orjson

from polar_proxy.errors import RequestError
from polar_proxy.types import Json

_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_CONTEXT = re.compile(r"context length (?:is|of) (?:only )?(\d+)|longer than the maximum model length of (\d+)", re.I)
_INPUT = re.compile(r"(\d+) (?:input tokens|in the messages)|passed (\d+)|[Pp]rompt \(length (\d+)\)")
_OUTPUT = re.compile(r"too large: (\d+)|(\d+) (?:output tokens|in the completion)|requested (\d+) output")


def _error_type(status: int) -> str:
    return _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def error_body(error: RequestError) -> bytes:
    return orjson.dumps(error_object(str(error), error.status, error.code))


def error_object(message: str, status: int, code: str | None = None) -> Json:
    # Inside a stream that has begun there is no code, only the message.
    if code == "context_length_exceeded" or (status == 400 and _CONTEXT.search(message)):
        message = _context_message(message)
    return {
        "type": "error",
        "error": {"type": _error_type(status), "message": message},
        "request_id": None,
    }


def _context_message(message: str) -> str:
    """Return an engine's context-length error in the words that Anthropic's clients recognise."""
    limit, prompt, output = (_number(pattern, message) for pattern in (_CONTEXT, _INPUT, _OUTPUT))
    if limit is not None and prompt is not None:
        if output and prompt < limit:
            return (
                f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {limit}, "
                "decrease input length or `max_tokens` and try again"
            )
        return f"prompt is too long: {prompt} tokens > {limit} maximum"
    return f"prompt is too long: {message}"


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(group for group in found.groups() if group)) if found else None
