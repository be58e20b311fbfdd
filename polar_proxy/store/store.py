"""The store: one open database and its repositories."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from polar_proxy.store import migrate
from polar_proxy.store.database import Database
from polar_proxy.store.repositories.activity import ActivityRepository
from polar_proxy.store.repositories.artifacts import ArtifactRepository, RewardRepository
from polar_proxy.store.repositories.names import NameRepository
from polar_proxy.store.repositories.outage_marks import OutageMarks
from polar_proxy.store.repositories.remarks import RemarkRepository
from polar_proxy.store.repositories.rollouts import RolloutRepository, TaskRepository
from polar_proxy.store.repositories.sessions import ApiKeyRepository, SessionRepository
from polar_proxy.store.urls import database_location, display_url

if TYPE_CHECKING:
    from polar_proxy.store.group_commit import GroupCommit
    from polar_proxy.store.maintenance.archive import ArchiveRepository
    from polar_proxy.store.maintenance.repository import MaintenanceRepository
    from polar_proxy.store.repositories.calls import CallRepository, OpenCallRepository
    from polar_proxy.store.repositories.changes import ChangeRepository
    from polar_proxy.store.repositories.conversations import ConversationRepository
    from polar_proxy.store.repositories.rescores import RescoreRepository
    from polar_proxy.store.repositories.traces import TraceRepository
    from polar_proxy.store.repositories.training import TrainingRepository
    from polar_proxy.store.service.feed import FeedRepository
    from polar_proxy.store.service.groups import GroupRepository
    from polar_proxy.store.service.job_events import CallbackRepository, JobEventRepository
    from polar_proxy.store.service.jobs import JobRepository
    from polar_proxy.store.service.queue import FleetRepository, QueueRepository


class Store:
    """One open database. Several processes may open the same database.

    Each attribute is a repository with the queries on a few related tables. Every repository raises StoreError if the
    database reports an error. Most repositories are imported when they are first used, because importing all of them
    would take most of the time of a command that lists sessions.
    """

    def __init__(self, database: Database, artifacts: Path) -> None:
        self.database = database
        self.display_url = display_url(database.url)
        self.location = database_location(database.url)
        self._artifacts_folder = artifacts
        self._marks_folder = artifacts.parent / "unrecorded"
        self._flushing = AsyncExitStack()
        """When this stack is closed, the repositories that write in batches write their waiting rows and stop, in
        reverse order of their creation."""
        # One conversation (calls, open_calls, conversations, traces, rescores: below)
        self.sessions = SessionRepository(database)
        self._flushing.push_async_callback(self.sessions.stop)
        # One rollout
        self.tasks = TaskRepository(database)
        self.rollouts = RolloutRepository(database)
        self.rewards = RewardRepository(database)
        self.remarks = RemarkRepository(database)
        self.artifacts = ArtifactRepository(database, artifacts)
        # The whole database (the rollout service, training, maintenance, archive: below)
        self.api_keys = ApiKeyRepository(database)
        self.names = NameRepository(database)
        self.activity = ActivityRepository(database)

    @cached_property
    def _writer(self) -> GroupCommit:
        from polar_proxy.store.group_commit import GroupCommit

        writer = GroupCommit(self.database)
        self._flushing.push_async_callback(writer.stop)
        return writer

    @cached_property
    def calls(self) -> CallRepository:
        from polar_proxy.store.repositories.calls import CallRepository

        return CallRepository(self.database, self._writer)

    @cached_property
    def open_calls(self) -> OpenCallRepository:
        from polar_proxy.store.repositories.calls import OpenCallRepository

        open_calls = OpenCallRepository(self.database, self._writer)
        self._flushing.push_async_callback(open_calls.stop)
        return open_calls

    @cached_property
    def conversations(self) -> ConversationRepository:
        from polar_proxy.store.repositories.conversations import ConversationRepository

        return ConversationRepository(self.database)

    @cached_property
    def traces(self) -> TraceRepository:
        from polar_proxy.store.repositories.traces import TraceRepository

        return TraceRepository(self.database)

    @cached_property
    def rescores(self) -> RescoreRepository:
        from polar_proxy.store.repositories.rescores import RescoreRepository

        return RescoreRepository(self.database)

    @cached_property
    def jobs(self) -> JobRepository:
        from polar_proxy.store.service.jobs import JobRepository

        return JobRepository(self.database)

    @cached_property
    def groups(self) -> GroupRepository:
        from polar_proxy.store.service.groups import GroupRepository

        return GroupRepository(self.database)

    @cached_property
    def queue(self) -> QueueRepository:
        from polar_proxy.store.service.queue import QueueRepository

        return QueueRepository(self.database)

    @cached_property
    def fleet(self) -> FleetRepository:
        from polar_proxy.store.service.queue import FleetRepository

        return FleetRepository(self.database)

    @cached_property
    def job_events(self) -> JobEventRepository:
        from polar_proxy.store.service.job_events import JobEventRepository

        return JobEventRepository(self.database)

    @cached_property
    def callbacks(self) -> CallbackRepository:
        from polar_proxy.store.service.job_events import CallbackRepository

        return CallbackRepository(self.database)

    @cached_property
    def feed(self) -> FeedRepository:
        from polar_proxy.store.service.feed import FeedRepository

        return FeedRepository(self.database)

    @cached_property
    def training(self) -> TrainingRepository:
        from polar_proxy.store.repositories.training import TrainingRepository

        return TrainingRepository(self.database)

    @cached_property
    def changes(self) -> ChangeRepository:
        from polar_proxy.store.repositories.changes import ChangeRepository

        return ChangeRepository(self.database)

    @cached_property
    def maintenance(self) -> MaintenanceRepository:
        from polar_proxy.store.maintenance.repository import MaintenanceRepository

        return MaintenanceRepository(self.database, self._artifacts_folder)

    @cached_property
    def archive(self) -> ArchiveRepository:
        from polar_proxy.store.maintenance.archive import ArchiveRepository

        return ArchiveRepository(self.database, self._artifacts_folder)

    async def schema_revision(self) -> str:
        async with self.database.reading() as connection:
            return await migrate.revision(connection) or ""

    def outage_marks(self) -> OutageMarks:
        """Return the marks (kept in files) of sessions that lost a call while the database could not be written."""
        return OutageMarks(self._marks_folder, self.display_url)

    async def write_outage_marks(self) -> None:
        """Store the outage marks that dead processes of this machine have left in files."""
        for marks in self.outage_marks().of_dead_processes():
            for mark in marks:
                await self.sessions.mark_unrecorded(mark)

    async def flush(self) -> None:
        """Write all calls, announcements and sessions that still wait in memory. Later calls are not recorded."""
        await self._flushing.aclose()


@asynccontextmanager
async def open_store(url: str, *, create: bool = True, artifacts: Path | None = None) -> AsyncIterator[Store]:
    """Open a database (see `migrate.open_database`) and its repositories.

    `artifacts`: the folder of the artifacts. Default: `artifacts` next to the SQLite file; for PostgreSQL, in the
    current folder.
    """
    async with migrate.open_database(url, create=create) as database:
        home = database.path.parent if database.path else Path.cwd()
        store = Store(database, (artifacts or home / "artifacts").absolute())
        try:
            await store.write_outage_marks()
            yield store
        finally:
            await store.flush()
