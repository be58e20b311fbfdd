"""A client of the pages over the test's store, which is SQLite and in `full` runs also PostgreSQL, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from polar_proxy.api import ApiContext
from polar_proxy.config import Settings
from polar_proxy.gateway.http.routes import add_router
from polar_proxy.store import Store
from polar_proxy.view.router import create_view_router
from polar_proxy.view.server import create_pages
from tests.store.conftest import postgres, postgres_template, store, url
from tests.view.visitors import HOST, Connect

__all__ = ["postgres", "postgres_template", "store", "url"]  # fixtures


@pytest.fixture
async def pages(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_pages(store, Settings(home=tmp_path / "home"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8123") as client:
        yield client


@pytest.fixture
def connect(store: Store, tmp_path: Path) -> Connect:
    """`connect(open_on_loopback=False, client="10.0.0.9")`: a client of pages that need a login from elsewhere."""

    def make(*, open_on_loopback: bool = False, client: str = "10.0.0.9", host: str = HOST) -> httpx.AsyncClient:
        app = FastAPI()
        add_router(
            app, create_view_router(ApiContext(store, Settings(home=tmp_path)), open_on_loopback=open_on_loopback)
        )
        transport = httpx.ASGITransport(app, client=(client, 4000))
        return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")

    return make
