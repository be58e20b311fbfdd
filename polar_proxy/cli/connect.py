"""One way to the API for all verbs: a server's, or that of this process over a database. Both times the same client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer

from polar_proxy.cli import common
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError

if TYPE_CHECKING:
    from polar_proxy.client import AsyncClient

T = TypeVar("T")

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", help="The server to talk to (or POLAR_URL). Default: the database, directly.", show_default=False
    ),
]


def load_settings(url: str | None, db: str | None, **sections: dict[str, Any]) -> Settings:
    """As `common.load_settings`, and where to talk to: a flag is nearer than the environment."""
    if url is not None and db is not None:
        raise UsageError("Give --url (a server) or --db (a database), not both.")
    settings = common.load_settings(db, **sections)
    if db is not None:
        settings.url = None
    elif url is not None:
        settings.url = url
    return settings


PATIENT_TRIES = 12
"""Tries with which a server that is started again is waited for about a minute."""


@contextlib.asynccontextmanager
async def connected(settings: Settings, *, create: bool = False, patient: bool = False) -> AsyncIterator[AsyncClient]:
    """`create`: a database that is not there yet is made. `patient`: a server that went away is waited for."""
    from polar_proxy.client import AsyncClient
    from polar_proxy.client.inprocess import InProcessTransport
    from polar_proxy.client.requests import MAX_TRIES

    if settings.url is not None:
        tries = PATIENT_TRIES if patient else MAX_TRIES
        async with AsyncClient(settings.url, key_for(settings), tries=tries) as client:
            yield client
        return
    from polar_proxy.api import allow_all, create_api

    async with common.writer(settings) if create else common.reader(settings) as store:
        application = create_api(store, settings=settings, auth=allow_all)
        async with AsyncClient("http://in-process", transport=InProcessTransport(application)) as client:
            yield client


def call(settings: Settings, ask: Callable[[AsyncClient], Coroutine[Any, Any, T]], **how: bool) -> T:
    """Connect, as `connected` says, ask, disconnect."""

    async def main() -> T:
        async with connected(settings, **how) as client:
            return await ask(client)

    return common.run_async(main())


def key_for(settings: Settings) -> str | None:
    """POLAR_API_KEY; without it, on this machine, the key that `polar serve` made for its user. Raises UsageError."""
    here = is_here(settings.url or "")
    if settings.api_key is not None:
        return settings.api_key
    file = settings.home / "api-key"
    return file.read_text().strip() if here and file.exists() else None


def is_here(url: str) -> bool:
    """Whether a server is on this machine. Raises UsageError for what is no address."""
    from polar_proxy.gateway import is_loopback

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no address of a server: write http://HOST:PORT.")
    return is_loopback(parts.hostname)
