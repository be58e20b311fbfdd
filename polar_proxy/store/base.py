"""The base class of the repositories."""

from __future__ import annotations

from polar_proxy.store.database import Database


class Repository:
    """The queries on one family of tables."""

    def __init__(self, database: Database) -> None:
        self._database = database
