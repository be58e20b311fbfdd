"""Archives: `polar db export` writes a part of a database to one portable file, and `polar db import` reads it.

An archive is a zip file. Its `polar.db` is an SQLite database of the same schema, with the selected rows and all rows
that they refer to. Its folder `artifacts/` has the files of the artifacts. Archives of SQLite and PostgreSQL databases
have the same form. An archive contains no keys, not even hashed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, false, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import schema
from polar_proxy.store.database import Database, Repository
from polar_proxy.store.encoding.loader import chain_ids
from polar_proxy.store.filters import select_rollouts
from polar_proxy.store.maintenance.archive_file import DATABASE, artifact_member
from polar_proxy.store.maintenance.archive_import import (
    CLEARED_COLUMNS,
    MAX_BYTES,
    NOT_EXPORTED,
    PAGE,
    ArchiveCounts,
    import_archive,
    parents_first,
    single_file,
)
from polar_proxy.store.maintenance.archive_rows import ColumnChecks
from polar_proxy.store.maintenance.verify import ProgressCallback, no_progress
from polar_proxy.store.repositories.artifacts import artifact_path


class ArchiveRepository(Repository):
    """Exports a selection of one database to an archive, and imports archives."""

    def __init__(self, database: Database, artifacts: Path) -> None:
        super().__init__(database)
        self._artifacts = artifacts

    async def export_archive(
        self, file: Path, *, where: str | None = None, sessions: Sequence[str] = (), overwrite: bool = False
    ) -> ArchiveCounts:
        """Write the rollouts that meet `where`, and the sessions named in `sessions`, with all their rows and files.

        If neither is given, write all rollouts and sessions. The archive is a consistent snapshot even while others
        write.
        """
        if file.exists() and not overwrite:
            raise UsageError(f"{file} exists already. Name another file")
        moved = ArchiveCounts()
        with tempfile.TemporaryDirectory(prefix="polar-export-") as folder:
            made = Path(folder) / DATABASE
            async with single_file(made) as target, self._database.reading() as source:
                if self._database.dialect == "postgresql":
                    source = await source.execution_options(isolation_level="REPEATABLE READ")
                queries = await _selection(source, where, sessions)
                for table in schema.metadata.sorted_tables:
                    if table.name not in NOT_EXPORTED:
                        moved.add(table.name, await _copy(source, target, table, queries[table.name]))
                hashes = queries["artifacts"].with_only_columns(schema.artifacts.c.sha256)
                files = set(await source.scalars(hashes))
            moved.files = await asyncio.to_thread(self._write_zip, file, made, sorted(files))
        return moved

    async def import_archive(
        self,
        file: Path,
        *,
        max_bytes: int = MAX_BYTES,
        progress: ProgressCallback = no_progress,
        models: ColumnChecks = MappingProxyType({}),
    ) -> ArchiveCounts:
        """Import an archive completely, in one transaction (see `archive_import`). Raises StoreError if this fails.

        `models`: functions that check the values of some JSON columns. The caller gives these functions, because the
        store cannot import the models of the values.
        """
        return await import_archive(
            self._database, self._artifacts, file, max_bytes=max_bytes, progress=progress, models=models
        )

    def _write_zip(self, file: Path, database: Path, files: Iterable[str]) -> int:
        written = 0
        handle, temporary = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.write(database, DATABASE)
                for sha256 in files:
                    path = artifact_path(self._artifacts, sha256)
                    if not path.exists():
                        raise StoreError(
                            f"The artifact {path} is missing. `polar db verify` lists everything that is damaged"
                        )
                    archive.write(path, artifact_member(sha256))
                    written += 1
            Path(temporary).replace(file)  # complete or not at all
        except OSError as error:
            raise StoreError(f"The archive {file} cannot be written: {error.strerror}") from error
        finally:
            Path(temporary).unlink(missing_ok=True)
        return written


async def _selection(source: AsyncConnection, where: str | None, sessions: Sequence[str]) -> dict[str, Select[Any]]:
    """Return, for each table, the query of the rows to export."""
    t = schema.metadata.tables
    if where is None and not sessions:
        return {name: select(table) for name, table in t.items()}
    r, s, c = schema.rollouts.c, schema.sessions.c, schema.calls.c
    if unknown := set(sessions) - set(await source.scalars(select(s.session_id).where(s.session_id.in_(sessions)))):
        raise UsageError(f"There is no session {min(unknown)}")
    # Subqueries, because a list of ids could have more values than a statement accepts.
    chosen: ColumnElement[bool] = r.session_id.in_(sessions)
    if where is not None:
        chosen |= r.rollout_id.in_(select_rollouts(where))
    rollout_ids = select(r.rollout_id).where(chosen)
    of_rollouts = select(r.session_id).where(r.rollout_id.in_(rollout_ids), r.session_id.is_not(None))
    selected = s.session_id.in_(sessions) | s.rollout_id.in_(rollout_ids) | s.session_id.in_(of_rollouts)
    session_ids = select(s.session_id).where(selected)
    groups = select(r.group_id).where(r.rollout_id.in_(rollout_ids))
    tasks = select(r.task_id).where(r.rollout_id.in_(rollout_ids))
    calls = select(c.call_id).where(c.session_id.in_(session_ids))
    x = schema.rescores.c
    traces = select(t["traces"].c.trace_id).where(t["traces"].c.session_id.in_(session_ids))

    def used(*columns: ColumnElement[Any]) -> Any:
        """Select the values of these columns in rows of the selected calls. The values are ids or hashes."""
        parts = [select(column.label("key")).where(column.table.c.call_id.in_(calls)) for column in columns]
        return parts[0].union(*parts[1:])

    heads = used(c.messages_node, c.tools_node, c.prompt_node, x.prompt_node).subquery()
    chain = chain_ids(select(heads.c.key.label("node_id")).where(heads.c.key.is_not(None)))
    conditions: dict[str, ColumnElement[bool]] = {
        "tasks": t["tasks"].c.task_id.in_(tasks),
        "groups": t["groups"].c.group_id.in_(groups),
        "nodes": t["nodes"].c.node_id.in_(select(chain.c.node_id)),
        "settings": t["settings"].c.settings_hash.in_(used(c.params_hash, c.sampling_hash)),
        "engines": t["engines"].c.engine_hash.in_(used(c.engine_hash, x.engine_hash)),
        "trace_spans": t["trace_spans"].c.trace_id.in_(traces),
        "training_runs": false(),  # a selection of sessions has none
        "training_lines": false(),
    }
    for name in ("completions", "rescores"):
        conditions[name] = t[name].c.call_id.in_(calls)
    for name in ("sessions", "calls", "traces", "exclusions"):
        conditions[name] = t[name].c.session_id.in_(session_ids)
    for name in ("rollouts", "rollout_events", "artifacts", "stages"):
        conditions[name] = t[name].c.rollout_id.in_(rollout_ids)
    for name in ("rewards", "remarks"):
        conditions[name] = t[name].c.rollout_id.in_(rollout_ids) | t[name].c.session_id.in_(session_ids)
    return {name: select(t[name]).where(condition) for name, condition in conditions.items()}


async def _copy(source: AsyncConnection, target: Database, table: Table, query: Select[Any]) -> int:
    blank = CLEARED_COLUMNS.get(table.name, {})
    count = 0
    result = await source.stream(query.order_by(*parents_first(table)))
    async for page in result.partitions(PAGE):
        rows = [{**row._mapping, **blank} for row in page]
        async with target.writing() as connection:
            await connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
            await connection.execute(insert(table), rows)
        count += len(rows)
    return count
