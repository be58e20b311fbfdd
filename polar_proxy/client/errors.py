"""Errors of the API client: one class for each case that a caller would handle differently."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from polar_proxy.errors import ApiError, PolarError, StoreError, UsageError


class BadRequestError(ApiError, UsageError):
    """400 or 422: the request is invalid."""


class UnauthorisedError(ApiError, UsageError):
    """401: the key is missing or unknown."""


class ForbiddenError(ApiError, UsageError):
    """403: the role of the key does not allow this."""


class NotFoundError(ApiError, UsageError):
    """404: there is no such job, group, rollout, lease or route."""


class ConflictError(ApiError, UsageError):
    """409: the current state does not allow this. `code` names the cause, such as `pause_timed_out`."""


class LeaseLostError(ConflictError, StoreError):
    """409: the lease expired or never existed; another consumer may have its group."""


class UnavailableError(ApiError):
    """503: the server, or a part that it needs, cannot answer now."""


class UnreachableError(PolarError):
    """No response: the server is down or the connection broke, and retries did not help."""


_CLASSES: Mapping[int, type[ApiError]] = {
    400: BadRequestError,
    401: UnauthorisedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    422: BadRequestError,
    503: UnavailableError,
}


def error_from_response(status: int, body: bytes) -> ApiError:
    """Return the typed error of a response with status 400 or more, from Polar or from a proxy in front of it."""
    code, message, detail = f"http_{status}", "", None
    try:
        error = orjson.loads(body)["error"]
        code, message, detail = str(error["code"]), str(error["message"]), error.get("detail")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        message = f"The server answers {status}: {body[:300].decode(errors='replace')}"
    kind = LeaseLostError if code == "lease_lost" else _CLASSES.get(status, ApiError)
    return kind(message, status=status, code=code, detail=detail)
