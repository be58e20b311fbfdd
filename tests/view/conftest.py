"""A client of the pages over the test's store, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from polar_proxy.config import Settings
from polar_proxy.store import Store
from polar_proxy.view.server import create_pages


@pytest.fixture
async def pages(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_pages(store, Settings(home=tmp_path / "home"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8123") as client:
        yield client
