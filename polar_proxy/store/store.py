"""The store: one open database and its repositories."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from polar_proxy.store import migrate
from polar_proxy.store.artifacts import ArtifactRepository, RewardRepository
from polar_proxy.store.calls import CallRepository
from polar_proxy.store.database import Database, Durability, create_file, display_url, normalise_url
from polar_proxy.store.group_commit import GroupCommit
from polar_proxy.store.maintenance.archive import ArchiveRepository
from polar_proxy.store.maintenance.repository import MaintenanceRepository
from polar_proxy.store.open_calls import OpenCallRepository
from polar_proxy.store.rescores import RescoreRepository
from polar_proxy.store.rollouts import RolloutRepository, TaskRepository
from polar_proxy.store.service.feed import FeedRepository
from polar_proxy.store.service.groups import GroupRepository
from polar_proxy.store.service.job_events import CallbackRepository, JobEventRepository
from polar_proxy.store.service.jobs import JobRepository
from polar_proxy.store.service.queue import FleetRepository, QueueRepository
from polar_proxy.store.sessions import ApiKeyRepository, SessionRepository
from polar_proxy.store.traces import TraceRepository
from polar_proxy.store.training import TrainingRepository


class Store:
    """One open database: `async with open_store(url) as store`. Several processes may open the same database.

    Each attribute is a repository with the queries on one family of tables. All of them raise StoreError if the
    database refuses.
    """

    def __init__(self, url: str, *, create: bool, durability: Durability, artifacts: Path | None) -> None:
        self.url = normalise_url(url)
        """May contain a password: print `display_url` instead."""
        self.display_url = display_url(self.url)
        self._create = create
        self._durability = durability
        self._artifacts = artifacts

    async def __aenter__(self) -> Self:
        self.database = Database(self.url, self._durability)
        try:
            if self._create:
                create_file(self.database)
                await migrate.ensure_newest(self.database)
            else:
                await migrate.require_newest(self.database)
        except BaseException:
            await self.database.close()
            raise
        self._writer = GroupCommit(self.database)
        self._open_repositories()
        return self

    def _open_repositories(self) -> None:
        database = self.database
        home = database.path.parent if database.path else Path.cwd()
        artifacts = (self._artifacts or home / "artifacts").absolute()
        # One conversation
        self.sessions = SessionRepository(database)
        self.calls = CallRepository(database, self._writer)
        self.open_calls = OpenCallRepository(database, self._writer)
        self.traces = TraceRepository(database)
        self.rescores = RescoreRepository(database)
        # One rollout
        self.tasks = TaskRepository(database)
        self.rollouts = RolloutRepository(database)
        self.rewards = RewardRepository(database)
        self.artifacts = ArtifactRepository(database, artifacts)
        # The rollout service
        self.jobs = JobRepository(database)
        self.groups = GroupRepository(database)
        self.queue = QueueRepository(database)
        self.fleet = FleetRepository(database)
        self.job_events = JobEventRepository(database)
        self.callbacks = CallbackRepository(database)
        self.api_keys = ApiKeyRepository(database)
        # Training
        self.feed = FeedRepository(database)
        self.training = TrainingRepository(database)
        # The whole database
        self.maintenance = MaintenanceRepository(database, artifacts)
        self.archive = ArchiveRepository(database, artifacts)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.open_calls.stop()
            await self._writer.stop()
        finally:
            await self.database.close()

    async def schema_revision(self) -> str:
        async with self.database.reading() as connection:
            return await migrate.revision(connection) or ""


def open_store(
    url: str,
    *,
    create: bool = True,
    upgrade: bool = True,
    durability: Durability = "process",
    artifacts: Path | None = None,
) -> Store:
    """Return a store to enter with `async with`.

    Entering creates the database or upgrades an older one. If `create` or `upgrade` is false (readers), a missing,
    empty or older database raises StoreError instead. A newer database always raises it.

    `artifacts`: the folder of the artifacts. Default: `artifacts` next to the SQLite file; for PostgreSQL, in the
    current folder.
    """
    return Store(url, create=create and upgrade, durability=durability, artifacts=artifacts)
