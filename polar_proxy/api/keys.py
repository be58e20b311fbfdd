"""Routes that create, list and revoke the keys of the HTTP API."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from polar_proxy import api_models as m
from polar_proxy.api.context import ApiStore, make_routers, new_api_key, require
from polar_proxy.records import convert, list_keys
from polar_proxy.sessions.identity import hash_key

routers = make_routers()
admin = routers.admin


@admin.post("/keys", status_code=201, tags=["keys"])
async def new_api_key_route(store: ApiStore, body: m.KeyRequest) -> m.CreatedKey:
    """Create a key of the HTTP API. The key is shown once; only its hash is stored."""
    key = new_api_key(body.role)
    return convert(m.CreatedKey, await store.api_keys.add(hash_key(key), body.role, body.label), key=key)


@admin.get("/keys", tags=["keys"])
async def list_api_keys(store: ApiStore) -> m.KeyList:
    """List the name, role and label of each key of the HTTP API, including revoked keys. The keys are not shown."""
    return await list_keys(store)


@admin.post("/keys/{key_name}/revoke", tags=["keys"])
async def revoke_api_key(store: ApiStore, key_name: Annotated[str, Path(description="Name of the key.")]) -> m.ApiKey:
    """Revoke a key of the HTTP API. Requests with this key are refused from now on."""
    return convert(m.ApiKey, await require("API key", key_name, store.api_keys.revoke(key_name)))
