"""What a call of the API can end with, typed: one class for each thing that a caller would do something else about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from polar_proxy.errors import PolarError, StoreError, UsageError


class ApiError(PolarError):
    """The server refused. `status` is HTTP's, `code` the server's machine-readable one, `detail` what it adds."""

    def __init__(self, message: str, *, status: int, code: str, detail: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.detail = detail


class BadRequestError(ApiError, UsageError):
    """400 or 422: what was asked for cannot be."""


class UnauthorisedError(ApiError, UsageError):
    """401: no key, or one that the server does not know."""


class ForbiddenError(ApiError, UsageError):
    """403: the key is known, and its role may not do this."""


class NotFoundError(ApiError, UsageError):
    """404: there is no such job, group, rollout, lease or route."""


class ConflictError(ApiError, UsageError):
    """409: not in the state that things are in. `code` says which: a pause that timed out, a used idempotency key."""


class LeaseLostError(ConflictError, StoreError):
    """409: the lease ran out or never was; its group may be with another consumer."""


class UnavailableError(ApiError):
    """503: the server, or what it needs, cannot answer now."""


class UnreachableError(PolarError):
    """No answer came: the server is not there, or the connection broke, and trying again did not help."""


_BY_STATUS: Mapping[int, type[ApiError]] = {
    400: BadRequestError,
    401: UnauthorisedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    422: BadRequestError,
    503: UnavailableError,
}


def error_from_response(status: int, body: bytes) -> ApiError:
    """The error that an answer of 400 and more stands for, whoever wrote it (a proxy writes no JSON of ours)."""
    code, message, detail = f"http_{status}", "", None
    try:
        told = orjson.loads(body)["error"]
        code, message, detail = str(told["code"]), str(told["message"]), told.get("detail")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        message = f"The server answers {status}: {body[:300].decode(errors='replace')}"
    kind = LeaseLostError if code == "lease_lost" else _BY_STATUS.get(status, ApiError)
    return kind(message, status=status, code=code, detail=detail)
