"""Addresses of databases as users type them: a path, `sqlite:///...` or `postgresql://...`."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from polar_proxy.errors import UsageError

_SQLITE_DRIVER = "sqlite+aiosqlite"
_POSTGRES_DRIVER = "postgresql+asyncpg"


def default_url(home: Path) -> str:
    """Return the URL of the SQLite file `polar.db` in Polar's home folder."""
    return normalise_url(str(home / "polar.db"))


def normalise_url(address: str) -> str:
    """Return a file path or a database URL as the URL of the async driver. Raises UsageError for anything else."""
    address = address.strip()
    if not address:
        raise UsageError("The database address is empty: give a file path, sqlite:///FILE or postgresql://...")
    if "://" not in address:
        return _sqlite_url(address)
    try:
        url = make_url(address)
    except ArgumentError as error:
        raise UsageError("This is not a database URL: give a file path or postgresql://USER@HOST/NAME") from error
    if url.drivername in {"sqlite", _SQLITE_DRIVER}:
        return _sqlite_url(url.database or "")
    if url.drivername in {"postgres", "postgresql", _POSTGRES_DRIVER}:
        return _postgres_url(url).render_as_string(hide_password=False)
    raise UsageError(f"Polar stores in SQLite or PostgreSQL, not in {url.drivername!r}")


def display_url(url: str) -> str:
    """Return the address without password and driver name, as users write it."""
    parsed = make_url(normalise_url(url))
    return parsed.set(drivername=parsed.get_backend_name()).render_as_string(hide_password=True)


def database_location(url: str) -> str:
    """Return the address without user, password and options, for error messages of the server."""
    parsed = make_url(normalise_url(url))
    plain = URL.create(parsed.get_backend_name(), host=parsed.host, port=parsed.port, database=parsed.database)
    return plain.render_as_string()


def sqlite_path(url: str) -> Path | None:
    """Return the file of a normalised URL, None for PostgreSQL."""
    parsed = make_url(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def _sqlite_url(path: str) -> str:
    if path in {"", ":memory:"}:
        raise UsageError("Polar needs a database file: an in-memory SQLite database is lost when the process ends")
    file = Path(path).expanduser().absolute()
    return URL.create(_SQLITE_DRIVER, database=str(file)).render_as_string(hide_password=False)


def _postgres_url(url: URL) -> URL:
    # asyncpg has another name for libpq's `sslmode`, which providers print in their addresses.
    query = dict(url.query)
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    return url.set(drivername=_POSTGRES_DRIVER, query=query)
