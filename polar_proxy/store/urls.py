"""Database addresses: what a user types (a path, `sqlite:///...`, `postgresql://...`) and what the drivers need."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from polar_proxy.errors import UsageError

_SQLITE = "sqlite+aiosqlite"
_POSTGRES = "postgresql+asyncpg"


def default_url(home: Path) -> str:
    """The SQLite file `polar.db` in Polar's home folder."""
    return normalise_url(str(home / "polar.db"))


def normalise_url(text: str) -> str:
    """A path or a database URL as the URL of an async driver. Raises UsageError for anything that is neither."""
    text = text.strip()
    if not text:
        raise UsageError("An empty database address: give a file path, sqlite:///FILE or postgresql://...")
    if "://" not in text:
        return _sqlite_url(text)
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise UsageError("This is not a database URL: give a file path or postgresql://USER@HOST/NAME") from error
    if url.drivername in {"sqlite", _SQLITE}:
        return _sqlite_url(url.database or "")
    if url.drivername in {"postgres", "postgresql", _POSTGRES}:
        return _postgres_url(url).render_as_string(hide_password=False)
    raise UsageError(f"Polar stores in SQLite or PostgreSQL, not in {url.drivername!r}")


def display_url(url: str) -> str:
    """The address without its password and without the driver's name: what people write, and may give back."""
    parsed = make_url(normalise_url(url))
    return parsed.set(drivername=parsed.get_backend_name()).render_as_string(hide_password=True)


def sqlite_path(url: str) -> Path | None:
    """The file behind a normalised URL, or None for PostgreSQL."""
    parsed = make_url(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def _sqlite_url(path: str) -> str:
    if path in {"", ":memory:"}:
        raise UsageError("Polar needs a database file: an in-memory SQLite database is gone after the run")
    file = Path(path).expanduser().absolute()
    return URL.create(_SQLITE, database=str(file)).render_as_string(hide_password=False)


def _postgres_url(url: URL) -> URL:
    # libpq's name for the setting, which most people copy from their provider, is another one in asyncpg.
    query = dict(url.query)
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    return url.set(drivername=_POSTGRES, query=query)
