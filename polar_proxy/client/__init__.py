"""The client of the HTTP API: `Client`, and `AsyncClient` for asyncio."""

from polar_proxy.client.client import AsyncClient, Client
from polar_proxy.client.requests import (
    BadRequestError,
    ConflictError,
    ForbiddenError,
    LeaseLostError,
    NotFoundError,
    UnauthorisedError,
    UnavailableError,
    UnreachableError,
)
from polar_proxy.errors import ApiError
from polar_proxy.webhooks import BadCallbackError, verify_callback

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
