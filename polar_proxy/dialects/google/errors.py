"""Google's error shape. Source: https://cloud.google.com/apis/design/errors (google.rpc.Status and its details)."""

from __future__ import annotations

from polar_proxy.types import Json

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    529: "UNAVAILABLE",
}

_TYPE = "type.googleapis.com/google.rpc."


def google_error(message: str, status: int, param: str | None = None) -> Json:
    """Return the body of an error.

    A BadRequest detail names the wrong field. 429 and 503 carry a RetryInfo, because Gemini CLI reads the delay there
    and not in the `retry-after` header.
    """
    error: Json = {
        "code": status,
        "message": message,
        "status": _STATUS.get(status) or ("INVALID_ARGUMENT" if status < 500 else "INTERNAL"),
    }
    if status == 401:
        error["details"] = [
            {"@type": _TYPE + "ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com", "metadata": {}}
        ]
    elif status in (429, 503):
        error["details"] = [{"@type": _TYPE + "RetryInfo", "retryDelay": "1s"}]
    elif param is not None:
        violation = {"field": param, "description": message}
        error["details"] = [{"@type": _TYPE + "BadRequest", "fieldViolations": [violation]}]
    return {"error": error}
