"""Database addresses as users type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import default_url, display_url, normalise_url


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    here = f"sqlite+aiosqlite:///{tmp_path}/runs.db"
    assert normalise_url("runs.db") == here
    assert normalise_url(f"{tmp_path}/runs.db") == here
    assert normalise_url("sqlite:///runs.db") == here
    assert normalise_url(here) == here
    assert normalise_url("~/runs.db") == "sqlite+aiosqlite:////home/me/runs.db"
    assert default_url(Path("/data/polar")) == "sqlite+aiosqlite:////data/polar/polar.db"


def test_postgres() -> None:
    url = "postgresql+asyncpg://me:secret@db:5432/polar"
    for typed in ("postgresql://me:secret@db:5432/polar", "postgres://me:secret@db:5432/polar", url):
        assert normalise_url(typed) == url
    assert normalise_url("postgresql://db/polar?sslmode=require") == "postgresql+asyncpg://db/polar?ssl=require"
    assert display_url(url) == "postgresql://me:***@db:5432/polar"


@pytest.mark.parametrize("typed", ["", "  ", "mysql://db/x", "sqlite://", "sqlite:///:memory:", "http://[bad"])
def test_refuses_other_addresses(typed: str) -> None:
    with pytest.raises(UsageError):
        normalise_url(typed)
