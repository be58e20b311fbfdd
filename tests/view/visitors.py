"""Clients of the pages, with and without a login."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from polar_proxy.api import new_api_key
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store

HOST = "polar.example.com"
Connect = Callable[..., httpx.AsyncClient]


async def add_key(store: Store, role: str = "trainer") -> str:
    key = new_api_key(role)  # type: ignore[arg-type]
    await store.api_keys.add(hash_key(key), role)  # type: ignore[arg-type]
    return key


async def log_in(http: httpx.AsyncClient, key: str, **fields: str) -> httpx.Response:
    origin = {"origin": str(http.base_url).rstrip("/")}
    return await http.post("/view/login", data={"key": key, **fields}, headers=origin)
