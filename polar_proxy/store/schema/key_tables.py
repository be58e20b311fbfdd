"""Keys of the HTTP API."""

from __future__ import annotations

from sqlalchemy import Column, Double, LargeBinary, Table, Text

from polar_proxy.store.schema.base import metadata

api_keys = Table(
    "api_keys",  # keys of the HTTP API; agents use the keys of their sessions
    metadata,
    Column("key_hash", LargeBinary, primary_key=True),  # SHA-256 of the key, which is never stored
    Column("role", Text, nullable=False),  # admin, trainer
    Column("label", Text),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)
