"""The store: one open database and its repositories."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from polar_proxy.store import migrate
from polar_proxy.store.announce import CallAnnouncer
from polar_proxy.store.api_keys import ApiKeyRepository
from polar_proxy.store.artifacts import ArtifactRepository, RewardRepository
from polar_proxy.store.callbacks import CallbackRepository
from polar_proxy.store.calls import CallRepository
from polar_proxy.store.database import Database, Durability, make_file
from polar_proxy.store.feed import FeedRepository
from polar_proxy.store.fleet import FleetRepository
from polar_proxy.store.group_commit import GroupCommit
from polar_proxy.store.groups import GroupRepository
from polar_proxy.store.job_events import JobEventRepository
from polar_proxy.store.jobs import JobRepository
from polar_proxy.store.maintenance import MaintenanceRepository
from polar_proxy.store.open_calls import OpenCallRepository
from polar_proxy.store.queue import QueueRepository
from polar_proxy.store.rescores import RescoreRepository
from polar_proxy.store.rollouts import RolloutRepository, TaskRepository
from polar_proxy.store.sessions import SessionRepository
from polar_proxy.store.traces import TraceRepository
from polar_proxy.store.training import TrainingRepository
from polar_proxy.store.urls import display_url, normalise_url


class Store:
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
        self.database = Database(self.url, self._durability)
        try:
            if self._create:
                make_file(self.database)
                await migrate.ensure_newest(self.database)
            else:
                await migrate.require_newest(self.database)
        except BaseException:
            await self.database.close()
            raise
        here = self.database.path.parent if self.database.path else Path.cwd()
        artifacts = (self._artifacts_given or here / "artifacts").absolute()
        self._commits = GroupCommit(self.database)
        self._commits.start()
        self._announcer = CallAnnouncer(self.database)
        self._open_repositories(artifacts)
        return self

    def _open_repositories(self, artifacts: Path) -> None:
        database = self.database
        self.api_keys = ApiKeyRepository(database)
        self.artifacts = ArtifactRepository(database, artifacts)
        self.callbacks = CallbackRepository(database)
        self.calls = CallRepository(database, self._commits)
        self.feed = FeedRepository(database)
        self.fleet = FleetRepository(database)
        self.groups = GroupRepository(database)
        self.job_events = JobEventRepository(database)
        self.jobs = JobRepository(database)
        self.maintenance = MaintenanceRepository(database, artifacts)
        self.open_calls = OpenCallRepository(database, self._announcer, self._commits)
        self.queue = QueueRepository(database)
        self.rescores = RescoreRepository(database)
        self.rewards = RewardRepository(database)
        self.rollouts = RolloutRepository(database)
        self.sessions = SessionRepository(database)
        self.tasks = TaskRepository(database)
        self.traces = TraceRepository(database)
        self.training = TrainingRepository(database)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._announcer.stop()
            await self._commits.stop()
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
    """A store to enter. Creates the database and upgrades an older one, unless `create` or `upgrade` is false
    (readers): then a missing, empty or older database raises StoreError. A newer one always does.

    `artifacts`: the folder for artifacts; without it, `artifacts` beside the SQLite file (for PostgreSQL: in the
    current folder, so give one).
    """
    return Store(url, create=create and upgrade, durability=durability, artifacts=artifacts)
