"""The store: opening and closing, and its parts put together."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from polar_proxy.store import migrate
from polar_proxy.store.announce import Announcer
from polar_proxy.store.archive import Archive
from polar_proxy.store.callbacks import Callbacks
from polar_proxy.store.calls import Calls
from polar_proxy.store.commit import GroupCommit
from polar_proxy.store.database import Database, Durability, make_file
from polar_proxy.store.evidence import Evidence
from polar_proxy.store.feed import Feed
from polar_proxy.store.fleet import Fleet
from polar_proxy.store.jobs import Jobs
from polar_proxy.store.keys import Keys
from polar_proxy.store.open_calls import OpenCalls
from polar_proxy.store.progress import Progress
from polar_proxy.store.prune import Prune
from polar_proxy.store.rescores import Rescores
from polar_proxy.store.rollouts import Rollouts
from polar_proxy.store.sessions import Sessions
from polar_proxy.store.statistics import Statistics
from polar_proxy.store.surplus import Surplus
from polar_proxy.store.traces import Traces
from polar_proxy.store.training import Training
from polar_proxy.store.urls import display_url, normalise_url
from polar_proxy.store.verify import Verify


class Store(
    Sessions,
    Keys,
    Calls,
    OpenCalls,
    Rollouts,
    Jobs,
    Fleet,
    Surplus,
    Feed,
    Callbacks,
    Progress,
    Evidence,
    Traces,
    Rescores,
    Training,
    Statistics,
    Verify,
    Prune,
    Archive,
):
    """One open database: `async with open_store(url) as store`. Every method raises StoreError for what the database
    refuses. Several processes may have the same database open."""

    def __init__(self, url: str, *, create: bool, durability: Durability, artifacts: Path | None) -> None:
        self.url = normalise_url(url)
        """With its password, if it has one: print `display_url` instead."""
        self.display_url = display_url(self.url)
        self._create = create
        self._durability = durability
        self._artifacts_given = artifacts

    async def __aenter__(self) -> Self:
        self._database = Database(self.url, self._durability)
        try:
            if self._create:
                make_file(self._database)
                await migrate.ensure_newest(self._database)
            else:
                await migrate.require_newest(self._database)
        except BaseException:
            await self._database.close()
            raise
        here = self._database.path.parent if self._database.path else Path.cwd()
        self._artifacts = (self._artifacts_given or here / "artifacts").absolute()
        self._commits = GroupCommit(self._database)
        self._commits.start()
        self._announcer = Announcer(self._database)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._announcer.stop()
            await self._commits.stop()
        finally:
            await self._database.close()

    async def schema_revision(self) -> str:
        async with self._database.reading() as connection:
            return await migrate.revision(connection) or ""


def open_store(
    url: str,
    *,
    create: bool = True,
    upgrade: bool = True,
    durability: Durability = "process",
    artifacts: Path | None = None,
) -> Store:
    """A store to enter. Creates the database and upgrades an older one, unless `create` or `upgrade` is false
    (readers): then a missing, empty or older database raises StoreError. A newer one always does.

    `artifacts`: the folder for artifacts; without it, `artifacts` beside the SQLite file (for PostgreSQL: in the
    current folder, so give one).
    """
    return Store(url, create=create and upgrade, durability=durability, artifacts=artifacts)
