"""The client of the HTTP API: `Client`, and `AsyncClient` for asyncio."""

from polar_proxy.client.callbacks import BadCallbackError, verify_callback
from polar_proxy.client.client import AsyncClient, Client
from polar_proxy.client.errors import (
    ApiError,
    BadRequestError,
    ConflictError,
    ForbiddenError,
    LeaseLostError,
    NotFoundError,
    UnauthorisedError,
    UnavailableError,
    UnreachableError,
)

__all__ = [
    "ApiError",
    "AsyncClient",
    "BadCallbackError",
    "BadRequestError",
    "Client",
    "ConflictError",
    "ForbiddenError",
    "LeaseLostError",
    "NotFoundError",
    "UnauthorisedError",
    "UnavailableError",
    "UnreachableError",
    "verify_callback",
]
