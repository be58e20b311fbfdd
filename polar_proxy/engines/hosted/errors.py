"""Translate providers' errors to typed errors. Sources: https://platform.openai.com/docs/guides/error-codes,
https://docs.anthropic.com/en/api/errors, https://ai.google.dev/gemini-api/docs/troubleshooting"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from polar_proxy.errors import EngineError, PolarError, RequestError
from polar_proxy.types import Json

_TOO_LONG = re.compile(
    r"maximum context length|prompt is too long|exceed context limit|token count .*exceeds the maximum", re.IGNORECASE
)
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The HTTP status of each error type of Anthropic. Needed for an error inside a stream, which comes without a
status."""
_DELAY = re.compile(r"(\d+(?:\.\d+)?)s")


def hosted_error(body: Any, status: int, name: str) -> PolarError:
    """Return the typed error for an error body of any provider. `name`: the server's name in the error's text.

    A refused key (401, 403) and an unknown route (404 without an error object) are faults of the configuration, which
    the agent cannot fix: EngineError with status 502. Other 4xx statuses except 402, 408 and 429 are the request's
    fault: RequestError. All others are an EngineError with the provider's status.
    """
    error = _error_object(body)
    text = str(error.get("message") or error.get("detail") or "") or (body if isinstance(body, str) else "")
    text = text or f"HTTP {status}"
    param, code = error.get("param"), error.get("code")
    code = code if isinstance(code, str) else None
    if status in (401, 403):
        return EngineError(f"{name} refused the API key it was given ({status}): {text} Set the engine's API key.")
    if status == 404 and not error:
        return EngineError(f"{name} does not have this route (404 {text}). Is this the root of the provider's API?")
    if 400 <= status < 500 and status not in (402, 408, 429):
        code = "context_length_exceeded" if _TOO_LONG.search(text) else code
        return RequestError(text, status=status, param=param if isinstance(param, str) else None, code=code)
    failure = EngineError(f"{name} failed ({status}): {text}", status=status, code=code)
    failure.retry_after = _retry_delay(error)
    return failure


def stream_error(error: Json, name: str) -> PolarError:
    """Return the typed error for an error object inside a stream that has begun."""
    code, kind = error.get("code"), error.get("type")
    status = code if isinstance(code, int) and code >= 400 else _STATUS_OF_TYPE.get(str(kind), 500)
    failure = hosted_error({"error": error}, status, name)
    # The answer has begun, so the request was not at fault.
    return failure if isinstance(failure, EngineError) else EngineError(f"{name} failed: {failure}", status=502)


def _error_object(body: Any) -> Mapping[str, Any]:
    if isinstance(body, list) and body:  # Google's streamed routes send a list of one error
        body = body[0]
    error = body.get("error", body) if isinstance(body, Mapping) else {}
    return error if isinstance(error, Mapping) else {"message": str(error)}


def _retry_delay(error: Mapping[str, Any]) -> str | None:
    """Return the delay in Google's RetryInfo, rounded up to whole seconds; None if the error names no delay."""
    details = error.get("details")
    for detail in details if isinstance(details, list) else ():
        delay = detail.get("retryDelay") if isinstance(detail, Mapping) else None
        if isinstance(delay, str) and (found := _DELAY.fullmatch(delay)):
            return str(math.ceil(float(found[1])))
    return None
