"""Maintenance: statistics, the integrity check, deleting old rows, returning disk space, and archives.

`polar db prune` and `polar db vacuum` can run while gateways write. Foreign keys make this safe: the database refuses
a row that refers to a deleted one, and a gateway whose commit is refused inserts all rows of its call again
(`group_commit.GroupCommit`). A row is deleted only if nothing refers to it at the time of the deleting transaction.

For each deleted row, the database looks for rows that refer to it: where a foreign key has no index, it scans the whole
table. Permanent indices for these foreign keys would add a tenth to the stored bytes of every call. So the indices are
made when maintenance begins, and dropped when it ends.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, and_, delete, exists, false, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import migrate, schema
from polar_proxy.store.database import Database, Repository
from polar_proxy.store.filters import select_rollouts
from polar_proxy.store.maintenance.verify import IntegrityFault, ProgressCallback, no_progress, verify
from polar_proxy.store.repositories.artifacts import artifact_path
from polar_proxy.types import Json

_BATCH = 500
_ROLLOUTS_AT_ONCE = 20
_JUDGEMENTS = (schema.rewards, schema.remarks)
"""Tables whose rows belong to a rollout or session, and are removed with it."""
_YOUNG_FILE_SECONDS = 3600.0
"""Age in seconds below which a file is kept, because the row of its artifact may be about to be stored."""
_ATTEMPTS = 5
_PAGES_AT_ONCE = 2000

_c, _n, _r, _s = schema.calls.c, schema.nodes.c, schema.rollouts.c, schema.sessions.c
_TO_NODES = (_n.parent_id, _c.messages_node, _c.tools_node, _c.prompt_node, schema.rescores.c.prompt_node)
_TO_SETTINGS = (_c.params_hash, _c.sampling_hash)
_TO_ENGINES = (_c.engine_hash, schema.rescores.c.engine_hash)
_settings_hash, _engine_hash = schema.settings.c.settings_hash, schema.engines.c.engine_hash
_TO_CALLS = (schema.trace_spans.c.call_id, schema.exclusions.c.call_id)


@dataclass(slots=True)
class PruneResult:
    """Deleted rows and files. A dry run counts what would be deleted."""

    rollouts: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    """Ids of the sessions that were deleted, or emptied if their key is still valid."""
    calls: int = 0
    files: int = 0


@dataclass(slots=True)
class VacuumResult:
    nodes: int = 0
    settings: int = 0
    engines: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    free_bytes: int = 0
    """Number of unused bytes within the SQLite file. `full` returns them to the file system."""


class MaintenanceRepository(Repository):
    """Statistics, integrity checks, pruning and archives."""

    def __init__(self, database: Database, artifacts: Path) -> None:
        super().__init__(database)
        self._artifacts = artifacts

    async def stats(self) -> Json:
        """Return the number of rows of every table, the bytes on disk, the tokens by kind and the schema revision.

        `prompt_tokens` counts the prompts of all calls; `stored_prompt_tokens` counts shared prefixes once.
        """
        s, n = schema.sessions.c, schema.nodes.c
        async with self._database.reading() as connection:
            rows = {
                table.name: await connection.scalar(select(func.count()).select_from(table))
                for table in schema.metadata.sorted_tables
            }
            tokens = {
                "prompt_tokens": select(func.sum(s.prompt_tokens)),
                "completion_tokens": select(func.sum(s.completion_tokens)),
                "stored_prompt_tokens": select(func.sum(n.length)).where(n.kind == "tokens"),
            }
            counts = {name: int(await connection.scalar(query) or 0) for name, query in tokens.items()}
            revision = await migrate.revision(connection)
        return {
            "schema": revision,
            "database": self._database.dialect,
            "bytes": await self._size(),
            "rows": rows,
            "tokens": counts,
        }

    async def verify(self, progress: ProgressCallback = no_progress) -> list[IntegrityFault]:
        """Check every row; see `verify.verify`."""
        return await verify(self._database, self._artifacts, progress)

    async def prune(
        self,
        before: float,
        *,
        where: str | None = None,
        dry_run: bool = False,
        progress: ProgressCallback = no_progress,
    ) -> PruneResult:
        """Delete rollouts that ended before `before` (seconds since the epoch), with their sessions.

        Rollouts without a final status stay. Sessions without a rollout are deleted too if their last call was before
        `before`. If such a session is not closed yet, its calls, rewards and remarks are deleted, but the session stays
        so that its key remains valid. Nodes, settings and engines stay (see `vacuum`).

        With `where`, delete only rollouts that meet these conditions, and no session without a rollout.
        """
        rollouts = (select_rollouts(where) if where else select(_r.rollout_id)).where(*_old_rollout(before))
        sessions = select(_s.session_id).where(false() if where else and_(*_old_session(before)))
        if dry_run:
            return await self._preview(rollouts, sessions)
        async with self._database.reading() as connection:
            rollout_ids = list(await connection.scalars(rollouts))
            session_ids = list(await connection.scalars(sessions))
        pruned = PruneResult()
        done, total = 0, len(rollout_ids) + len(session_ids)
        if not total:
            return pruned
        async with self._indices(_TO_CALLS):
            for delete_some, ids in ((self._delete_rollouts, rollout_ids), (self._delete_sessions, session_ids)):
                for start in range(0, len(ids), _ROLLOUTS_AT_ONCE):
                    some = ids[start : start + _ROLLOUTS_AT_ONCE]
                    await delete_some(some, before, pruned)
                    done += len(some)
                    progress("rollouts and sessions", done, total)
        return pruned

    async def _preview(self, rollouts: Select[Any], sessions: Select[Any]) -> PruneResult:
        """Return what `prune` would delete. The queries select the rollouts, and the sessions without a rollout."""
        # Subqueries, because a list of ids could have more values than a statement accepts.
        a, of_rollouts = schema.artifacts.c, _sessions_of(rollouts)
        calls = select(func.count()).where(or_(_c.session_id.in_(of_rollouts), _c.session_id.in_(sessions)))
        needed = select(a.sha256).where(a.rollout_id.not_in(rollouts))
        files = select(a.sha256).where(a.rollout_id.in_(rollouts), a.sha256.not_in(needed)).distinct()
        async with self._database.reading() as connection:
            preview = PruneResult(
                rollouts=list(await connection.scalars(rollouts)),
                sessions=[*await connection.scalars(of_rollouts), *await connection.scalars(sessions)],
                calls=await connection.scalar(calls) or 0,
            )
            hashes = list(await connection.scalars(files))
        preview.files = len(await asyncio.to_thread(self._old_files, hashes))
        return preview

    async def _delete_rollouts(self, candidates: Sequence[str], before: float, pruned: PruneResult) -> None:
        a = schema.artifacts.c
        async with self._database.writing() as connection:
            query = select(_r.rollout_id).where(_r.rollout_id.in_(candidates), *_old_rollout(before)).with_for_update()
            rollouts = list(await connection.scalars(query))
            sessions = list(await connection.scalars(_sessions_of(rollouts)))
            files = set(await connection.scalars(select(a.sha256).where(a.rollout_id.in_(rollouts))))
            groups = list(await connection.scalars(select(_r.group_id).where(_r.rollout_id.in_(rollouts)).distinct()))
            pruned.calls += await _delete_calls(connection, sessions)
            for table in (*_JUDGEMENTS, schema.rollout_events, schema.artifacts, schema.stages, schema.rollouts):
                await connection.execute(delete(table).where(table.c.rollout_id.in_(rollouts)))
            await connection.execute(delete(schema.sessions).where(_s.session_id.in_(sessions)))
            await _delete_empty_groups(connection, groups)
            gone = files - set(await connection.scalars(select(a.sha256).where(a.sha256.in_(files))))
        pruned.rollouts += rollouts
        pruned.sessions += sessions
        pruned.files += await asyncio.to_thread(self._delete_files, gone)

    async def _delete_sessions(self, candidates: Sequence[str], before: float, pruned: PruneResult) -> None:
        async with self._database.writing() as connection:
            # Waits for gateways that are committing a call of one of these sessions, which lock its row.
            query = select(_s.session_id, _s.closed_at).where(_s.session_id.in_(candidates), *_old_session(before))
            rows = (await connection.execute(query.with_for_update())).all()
            sessions = [row.session_id for row in rows]
            pruned.calls += await _delete_calls(connection, sessions)
            for table in _JUDGEMENTS:
                await connection.execute(delete(table).where(table.c.session_id.in_(sessions)))
            closed = [row.session_id for row in rows if row.closed_at is not None]
            await connection.execute(delete(schema.sessions).where(_s.session_id.in_(closed)))
            values: dict[str, int | None] = dict.fromkeys(
                ("calls", "failed_calls", "prompt_tokens", "completion_tokens"), 0
            )
            values |= dict.fromkeys(("last_call_at", "reward", "rating", "price_usd"))
            await connection.execute(update(schema.sessions).where(_s.session_id.in_(sessions)).values(values))
        pruned.sessions += sessions

    def _delete_files(self, gone: Collection[str]) -> int:
        old = self._old_files(gone)
        for path in old:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"The artifact {path} cannot be deleted: {error.strerror}") from error
        return len(old)

    def _old_files(self, hashes: Collection[str]) -> list[Path]:
        """Return the files of these artifacts. Leave out young files, because the rows of their artifacts may be about
        to be stored."""
        old: list[Path] = []
        for path in (artifact_path(self._artifacts, sha256) for sha256 in hashes):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _YOUNG_FILE_SECONDS:
                    old.append(path)
        return old

    async def vacuum(self, *, full: bool = False, progress: ProgressCallback = no_progress) -> VacuumResult:
        """Delete nodes, settings and engines that nothing refers to, in small transactions, then free the disk space.

        SQLite: the file shrinks in small steps; `full` rewrites it while writers wait. PostgreSQL: VACUUM, or with
        `full` VACUUM FULL.
        """
        done = VacuumResult(bytes_before=await self._size())
        async with self._indices((*_TO_NODES, *_TO_SETTINGS, *_TO_ENGINES)):
            done.nodes = await self._delete_nodes(progress)
            done.settings = len(await self._delete_unused(_settings_hash, _TO_SETTINGS))
            done.engines = len(await self._delete_unused(_engine_hash, _TO_ENGINES))
        if self._database.dialect == "sqlite":
            done.free_bytes = await self._shrink_file(full, progress)
        else:
            await self._vacuum_server(full)
        done.bytes_after = await self._size()
        return done

    async def _delete_nodes(self, progress: ProgressCallback) -> int:
        removed, last = 0, b""
        async with self._database.reading() as connection:
            total = int(await connection.scalar(select(func.count()).select_from(schema.nodes)) or 0)
        while True:
            async with self._database.reading() as connection:
                query = select(_n.node_id).where(_n.node_id > last, *_unused(_n.node_id, _TO_NODES))
                leaves = list(await connection.scalars(query.order_by(_n.node_id).limit(_BATCH)))
            if not leaves:
                return removed
            last = leaves[-1]
            while leaves:  # deleting a leaf may turn its parent into one
                parents = await self._delete_unused(_n.node_id, _TO_NODES, leaves[:_BATCH])
                removed += len(parents)
                leaves = [*leaves[_BATCH:], *{parent for parent in parents if parent is not None}]
                progress("nodes deleted", removed, total)
                await asyncio.sleep(0)  # lets other writers of this process take their turn

    async def _delete_unused(
        self, key: Column[Any], users: Sequence[Column[Any]], keys: Sequence[bytes] | None = None
    ) -> list[bytes | None]:
        """Delete unused rows of the table of `key`: all, or only rows whose key is in `keys`. Return the deleted keys.

        For nodes, return the ids of the deleted nodes' parents instead.
        """
        statement = delete(key.table).where(*_unused(key, users))
        if keys is not None:
            statement = statement.where(key.in_(keys))
        returned = statement.returning(_n.parent_id if key is _n.node_id else key)
        for attempt in range(_ATTEMPTS):
            try:
                async with self._database.writing() as connection:
                    return list(await connection.scalars(returned))
            except StoreError:
                # PostgreSQL: a call that refers to one of them was committed between the check and the deletion.
                if attempt == _ATTEMPTS - 1 or self._database.dialect == "sqlite":
                    raise
        return []

    @asynccontextmanager
    async def _indices(self, columns: Sequence[Column[Any]]) -> AsyncIterator[None]:
        # Indices that a killed process left behind are used, and dropped at the end.
        names = [
            (f"maintenance_{column.table.name}_{column.name}", column.table.name, column.name) for column in columns
        ]
        try:
            for name, table, column in names:
                async with self._database.writing() as connection:
                    await connection.exec_driver_sql(f"CREATE INDEX IF NOT EXISTS {name} ON {table} ({column})")
            yield
        finally:
            for name, _, _ in names:
                async with self._database.writing() as connection:
                    await connection.exec_driver_sql(f"DROP INDEX IF EXISTS {name}")

    async def _size(self) -> int:
        async with self._database.reading() as connection:
            if self._database.dialect == "sqlite":
                query = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
            else:
                query = "SELECT pg_database_size(current_database())"
            return int((await connection.exec_driver_sql(query)).scalar_one())

    async def _shrink_file(self, full: bool, progress: ProgressCallback) -> int:
        """Shrink the SQLite file, and return the number of bytes in it that are still unused."""
        assert self._database.path is not None
        path = self._database.path

        def step() -> tuple[int, int]:
            with self._database.translated(), closing(sqlite3.connect(path, timeout=30)) as connection:
                connection.isolation_level = None
                if full:
                    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # for a file that Polar did not create
                    connection.execute("VACUUM")
                else:
                    connection.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})").fetchall()
                free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
                page = int(connection.execute("PRAGMA page_size").fetchone()[0])
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                return free, page

        before: int | None = None
        while True:
            free, page = await self._database.run_exclusive(step)
            returned = 0 if before is None else max(0, before - free)
            progress("bytes to return", returned * page, (before or free) * page)
            if full or free == 0 or (before is not None and free >= before):
                return free * page
            before = free

    async def _vacuum_server(self, full: bool) -> None:
        async with self._database.reading() as connection:
            plain = await connection.execution_options(isolation_level="AUTOCOMMIT")
            for table in schema.metadata.sorted_tables:
                await plain.exec_driver_sql(f"VACUUM {'(FULL, ANALYZE)' if full else '(ANALYZE)'} {table.name}")


def _old_rollout(before: float) -> list[ColumnElement[bool]]:
    return [schema.rollout_is_final, func.coalesce(_r.ended_at, _r.created_at) < before]


def _old_session(before: float) -> list[ColumnElement[bool]]:
    """Return conditions: the session has no rollout, had no call after `before`, and has something to delete."""
    rollout = exists().where(or_(_r.session_id == _s.session_id, _r.rollout_id == _s.rollout_id))
    return [
        func.coalesce(_s.last_call_at, _s.created_at) < before,
        or_(_s.calls > 0, _s.closed_at.is_not(None)),
        ~rollout,
    ]


def _sessions_of(rollouts: Sequence[str] | Select[Any]) -> Select[Any]:
    """Select the sessions that belong to these rollouts and to no other rollout."""
    own = select(_r.session_id.label("session_id")).where(_r.rollout_id.in_(rollouts), _r.session_id.is_not(None))
    other = exists().where(_r.session_id == _s.session_id, _r.rollout_id.not_in(rollouts))
    return select(_s.session_id).where(or_(_s.session_id.in_(own), _s.rollout_id.in_(rollouts)), ~other)


async def _delete_calls(connection: AsyncConnection, sessions: Sequence[str]) -> int:
    if not sessions:
        return 0
    t = schema.traces.c
    mine = select(_c.call_id).where(_c.session_id.in_(sessions)).scalar_subquery()
    traces = select(t.trace_id).where(t.session_id.in_(sessions)).scalar_subquery()
    await connection.execute(delete(schema.trace_spans).where(schema.trace_spans.c.trace_id.in_(traces)))
    await connection.execute(delete(schema.traces).where(t.session_id.in_(sessions)))
    await connection.execute(delete(schema.exclusions).where(schema.exclusions.c.session_id.in_(sessions)))
    for table in (schema.rescores, schema.completions):
        await connection.execute(delete(table).where(table.c.call_id.in_(mine)))
    # The items of a conversation are deleted with it.
    await connection.execute(delete(schema.conversations).where(schema.conversations.c.session_id.in_(sessions)))
    return (await connection.execute(delete(schema.calls).where(_c.session_id.in_(sessions)))).rowcount


async def _delete_empty_groups(connection: AsyncConnection, groups: Sequence[str]) -> None:
    """Delete each of these groups that has no rollout, unless its job is still open or paused."""
    g, j = schema.groups.c, schema.jobs.c
    job_open = exists().where(j.job_id == g.job_id, j.status.not_in(("done", "cancelled")))
    empty = ~exists().where(_r.group_id == g.group_id)
    gone = list(await connection.scalars(select(g.group_id).where(g.group_id.in_(groups), empty, ~job_open)))
    for table in (schema.leases, schema.callbacks, schema.job_events, schema.groups):
        await connection.execute(delete(table).where(table.c.group_id.in_(gone)))


def _unused(key: Column[Any], users: Sequence[Column[Any]]) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    for column in users:
        user = column.table.alias("user_of")
        found.append(~exists(select(1).select_from(user).where(user.c[column.name] == key).correlate(key.table)))
    return found
