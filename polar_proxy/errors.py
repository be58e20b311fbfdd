"""Typed errors. They are raised once and translated once: to the dialect's shape at the gateway's edge, to one
clear line at the command line's edge."""

from __future__ import annotations

from typing import Any


class PolarError(Exception):
    """What went wrong, and what to do about it, in one or two sentences. Base of all that a user may see."""

    exit_code = 1
    retry_after: str | None = None
    """The header of that name with which an engine refused, to be passed on."""


class UsageError(PolarError):
    """The caller asked for something that cannot be (a bad flag, an unknown id)."""

    exit_code = 2


class BadTaskError(UsageError):
    """A task cannot be used; the text says why, and the caller adds which task it is."""


class StoreError(PolarError):
    """The database cannot be used: newer schema, not a Polar database, locked, full."""


class RequestError(PolarError):
    """A request that cannot be served as asked; becomes a 4xx in the dialect's own shape.

    `param` names the offending field, `code` is the provider's machine-readable code.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class EngineError(PolarError):
    """The engine failed, could not be reached, or cannot do what recording needs. `status` is told to the agent."""

    def __init__(self, message: str, *, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class ApiError(PolarError):
    """The HTTP API refused a request.

    `status` is the HTTP status, `code` the machine-readable code (`api_models.ErrorCode`), `detail` any JSON value.
    """

    def __init__(self, message: str, *, status: int, code: str, detail: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.detail = detail


class TrainingError(PolarError):
    """Training cannot continue. The message says what happened, what it means and what to do."""
