"""Typed errors. Each is raised once and translated once: by the gateway to the dialect's own format, by the command
line to one line.

PolarError
    UsageError          a bad flag, an unknown id
        BadTaskError    an unusable task
    StoreError          the database
    RequestError        a model request
    EngineError         the inference engine
        EngineDroppedError  it dropped a request
        ProviderError       a provider's own answer to a request that was passed on
    ApiError            a request to the HTTP API
    TrainingError       a training run
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class PolarError(Exception):
    """Base of all errors that a user may see. The message says what happened, what it means and what to do."""

    exit_code = 1
    retry_after: str | None = None
    """Value of the `retry-after` header that the agent gets, such as the value that the engine sent with a refusal."""


class UsageError(PolarError):
    """The caller asked for something impossible, such as a bad flag or an unknown id."""

    exit_code = 2


class BadTaskError(UsageError):
    """A task cannot be used. The message says why; the caller adds which task it is."""


class StoreError(PolarError):
    """The database cannot be used: for example, it has a newer schema, is not a Polar database, is locked or is
    full."""


class RequestError(PolarError):
    """A model request that cannot be served; the agent gets an error in the dialect's own format.

    `status` is the HTTP status, `param` names the faulty field, `code` is the provider's machine-readable code.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class EngineError(PolarError):
    """The engine failed, could not be reached, or cannot do what recording needs. The agent gets the HTTP `status`.

    `code` is a hosted provider's machine-readable code.
    """

    def __init__(self, message: str, *, status: int = 502, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class EngineDroppedError(EngineError):
    """The engine closed the connection before it began to answer. The engine may have sampled an answer
    nevertheless."""


class ProviderError(EngineError):
    """A request was passed on to a provider, which refused it or failed. If `body` is given, the agent gets the
    provider's response: this body with `status` and `headers`."""

    def __init__(
        self, message: str, *, status: int, headers: tuple[tuple[bytes, bytes], ...] = (), body: bytes | None = None
    ) -> None:
        super().__init__(message, status=status)
        self.headers = headers
        self.body = body


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


def first_problem(error: ValidationError, parent: str = "") -> str:
    """Return the first problem in pydantic's error, in the form `field.name: problem`. `parent`: prefix of the field's
    name."""
    first = error.errors(include_url=False)[0]
    path = ".".join(filter(None, (parent, *map(str, first["loc"]))))
    return f"{path}: {first['msg'].lower()}"
