"""Keys of the HTTP API: stored as hashes, listed by name, revoked for good."""

from __future__ import annotations

import hashlib

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import Store


async def test_add_list_and_revoke(store: Store) -> None:
    hashes = [hashlib.sha256(name.encode()).digest() for name in ("one", "two")]
    admin = await store.api_keys.add(hashes[0], "admin", "laptop")
    trainer = await store.api_keys.add(hashes[1], "trainer")
    assert (admin.role, admin.label, admin.name) == ("admin", "laptop", hashes[0].hex()[:12])
    assert await store.api_keys.all() == [admin, trainer]
    assert await store.api_keys.get(b"\0" * 32) is None
    gone = await store.api_keys.revoke(admin.name)
    assert gone is not None
    assert gone.revoked_at is not None
    assert await store.api_keys.revoke(admin.name) == gone
    assert await store.api_keys.add(hashes[0], "admin") == gone  # adding it again does not restore it
    for wrong in ("", "zz", "00" * 6):
        assert await store.api_keys.revoke(wrong) is None
    with pytest.raises(UsageError, match="admin or trainer"):
        await store.api_keys.add(b"\1" * 32, "boss")  # type: ignore[arg-type]
