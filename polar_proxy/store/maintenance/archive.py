"""Archives: a selection of a database as one portable file (`polar db export`), and back (`polar db import`).

An archive is a zip file with `polar.db`, an SQLite database of the same schema that holds the selected rows and all
rows that they refer to, and the files of the artifacts under `artifacts/`. Archives of SQLite and PostgreSQL databases
have the same form.

Promises:

* An archive contains no keys, not even hashed.
* Importing an archive twice has the effect of importing it once.
* Existing rows are never overwritten. If one differs from the archive, nothing is imported.
* An archive of a newer schema is refused; one of an older schema is upgraded first.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sqlite3
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, false, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import schema
from polar_proxy.store.artifacts import artifact_path, write_artifact
from polar_proxy.store.database import Database, Repository
from polar_proxy.store.encoding.loader import chain_ids
from polar_proxy.store.filters import parse_where
from polar_proxy.store.migrate import open_database

_DATABASE = "polar.db"
_ARTIFACT = re.compile(r"artifacts/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_PAGE = 500

NOT_EXPORTED = frozenset({"jobs", "leases", "callbacks", "job_events", "api_keys", "open_calls", "fleet"})
"""Tables that concern one database only: its queue, deliveries, keys and calls in progress."""
CLEARED_COLUMNS: dict[str, dict[str, Any]] = {
    "sessions": {"key_hash": None},
    "groups": {"job_id": None, "delivery": None},
    "rollouts": {"job_id": None, "claimed_by": None, "lease_expires_at": None},
}
"""Columns that are cleared in archives and not compared by imports."""
_NOT_COMPARED: dict[str, frozenset[str]] = {"nodes": frozenset({"data"})}
"""Columns that imports do not compare: equal content may be packed differently."""


@dataclass(slots=True)
class ArchiveCounts:
    """Exported or imported rows by table, and files. `known`: rows that an import found already stored."""

    rows: dict[str, int] = field(default_factory=dict)
    known: int = 0
    files: int = 0

    def add(self, table: str, count: int) -> None:
        if count:
            self.rows[table] = self.rows.get(table, 0) + count


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
            made = Path(folder) / _DATABASE
            async with _opened(made) as target, self._database.reading() as source:
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

    async def import_archive(self, file: Path) -> ArchiveCounts:
        """Import a whole archive in one transaction.

        Raises StoreError, and imports nothing, if the file is not an archive, is damaged, has a newer schema, or
        contains a row that differs from the stored row with the same key.
        """
        moved = ArchiveCounts()
        with tempfile.TemporaryDirectory(prefix="polar-import-") as folder:
            contents = await asyncio.to_thread(_unpack, file, Path(folder))
            async with _opened(Path(folder) / _DATABASE) as source, source.reading() as rows:
                wanted = set(await rows.scalars(select(schema.artifacts.c.sha256)))
                if missing := wanted - contents.keys():
                    raise StoreError(f"{file} is damaged: the artifact {min(missing)} is missing from it")
                for sha256 in sorted(wanted):
                    moved.files += await asyncio.to_thread(write_artifact, self._artifacts, contents[sha256]) == sha256
                async with self._database.writing() as target:
                    for table in schema.metadata.sorted_tables:
                        if table.name not in NOT_EXPORTED:
                            await _import_table(rows, target, table, moved)
        return moved

    def _write_zip(self, file: Path, database: Path, files: Iterable[str]) -> int:
        written = 0
        handle, temporary = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.write(database, _DATABASE)
                for sha256 in files:
                    path = artifact_path(self._artifacts, sha256)
                    if not path.exists():
                        raise StoreError(
                            f"The artifact {path} is missing. `polar db verify` lists everything that is damaged"
                        )
                    archive.write(path, f"artifacts/{sha256[:2]}/{sha256}")
                    written += 1
            Path(temporary).replace(file)  # complete or not at all
        except OSError as error:
            raise StoreError(f"The archive {file} cannot be written: {error.strerror}") from error
        finally:
            Path(temporary).unlink(missing_ok=True)
        return written


def _unpack(file: Path, folder: Path) -> dict[str, bytes]:
    """Extract the database into `folder` and return the artifacts by their hash."""
    contents: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if _DATABASE not in names:
                raise StoreError(f"{file} is not a Polar archive: it contains no {_DATABASE}")
            archive.extract(_DATABASE, folder)
            for name in names:
                if match := _ARTIFACT.fullmatch(name):
                    content = archive.read(name)
                    if hashlib.sha256(content).hexdigest() != match[2]:
                        raise StoreError(f"{file} is damaged: the content of {name} does not match its name")
                    contents[match[2]] = content
    except FileNotFoundError:
        raise UsageError(f"There is no file {file}") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise StoreError(f"{file} cannot be read as an archive: {error}") from error
    return contents


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[Database]:
    """Open the database of an archive, created or upgraded to this schema."""
    async with open_database(str(path)) as database:
        yield database
    with closing(sqlite3.connect(path)) as connection:  # a single file without a write-ahead log
        connection.execute("PRAGMA journal_mode=DELETE")


async def _selection(source: AsyncConnection, where: str | None, sessions: Sequence[str]) -> dict[str, Select[Any]]:
    """Return, for each table, the query of the rows to export."""
    t = schema.metadata.tables
    if where is None and not sessions:
        return {name: select(table) for name, table in t.items()}
    r, s, c = schema.rollouts.c, schema.sessions.c, schema.calls.c
    if unknown := set(sessions) - set(await source.scalars(select(s.session_id).where(s.session_id.in_(sessions)))):
        raise UsageError(f"There is no session {min(unknown)}")
    chosen: list[ColumnElement[bool]] = [r.session_id.in_(sessions)] if sessions else []
    if where is not None:
        join = schema.rollouts.outerjoin(schema.sessions, s.session_id == r.session_id)
        found = await source.scalars(select(r.rollout_id).select_from(join).where(*parse_where(where)))
        chosen.append(r.rollout_id.in_(list(found)))
    rollouts = list(await source.scalars(select(r.rollout_id).where(or_(*chosen))))
    of_rollouts = select(r.session_id).where(r.rollout_id.in_(rollouts), r.session_id.is_not(None))
    mine = s.session_id.in_(sessions) | s.rollout_id.in_(rollouts) | s.session_id.in_(of_rollouts)
    session_ids = list(await source.scalars(select(s.session_id).where(mine)))
    groups = select(r.group_id).where(r.rollout_id.in_(rollouts))
    tasks = select(r.task_id).where(r.rollout_id.in_(rollouts))
    calls = select(c.call_id).where(c.session_id.in_(session_ids))
    x = schema.rescores.c
    traces = select(t["traces"].c.trace_id).where(t["traces"].c.session_id.in_(session_ids))

    def used(*columns: ColumnElement[Any]) -> Any:
        """Select the values of these columns of the selected calls or rescores."""
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
    for name in ("rollouts", "rewards", "rollout_events", "artifacts", "stages"):
        conditions[name] = t[name].c.rollout_id.in_(rollouts)
    return {name: select(t[name]).where(condition) for name, condition in conditions.items()}


def _order(table: Table) -> list[ColumnElement[Any]]:
    # A node after its parent. `chain_length` grows along a chain, except at empty nodes.
    return [table.c.chain_length, table.c.length.desc()] if table.name == "nodes" else list(table.primary_key.columns)


async def _copy(source: AsyncConnection, target: Database, table: Table, query: Select[Any]) -> int:
    blank = CLEARED_COLUMNS.get(table.name, {})
    count = 0
    result = await source.stream(query.order_by(*_order(table)))
    async for page in result.partitions(_PAGE):
        rows = [{**row._mapping, **blank} for row in page]
        async with target.writing() as connection:
            await connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
            await connection.execute(insert(table), rows)
        count += len(rows)
    return count


async def _import_table(rows: AsyncConnection, target: AsyncConnection, table: Table, moved: ArchiveCounts) -> None:
    if table.name == "rollout_events":
        await _import_events(rows, target, moved)
        return
    key = list(table.primary_key.columns)
    skip = {*CLEARED_COLUMNS.get(table.name, {}), *_NOT_COMPARED.get(table.name, ())}
    compared = [column.name for column in table.columns if column.name not in skip]
    waiting = await rows.stream(select(table).order_by(*_order(table)))
    async for page in waiting.partitions(_PAGE):
        given = {tuple(row._mapping[column.name] for column in key): dict(row._mapping) for row in page}
        here = select(table).where(key[0].in_([values[0] for values in given]))
        there = {tuple(row._mapping[c.name] for c in key): row._mapping for row in await target.execute(here)}
        new: list[dict[str, Any]] = []
        for values, row in given.items():
            if values not in there:
                new.append(row)
                continue
            for name in compared:
                if row[name] != there[values][name]:
                    shown = " ".join(value.hex() if isinstance(value, bytes) else str(value) for value in values)
                    raise StoreError(
                        f"Nothing was imported: {table.name} {shown} is stored already with another {name}, and "
                        "stored rows are never overwritten. Import into a separate database"
                    )
            moved.known += 1
        if table.name == "nodes":
            new = _parents_first(new)
        if new:
            await target.execute(insert(table), new)
        moved.add(table.name, len(new))


def _parents_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order parents before children. The query sorts by chain length, which leaves only empty nodes out of order."""
    waiting = {row["node_id"]: row for row in rows}
    ordered: list[dict[str, Any]] = []
    for row in rows:
        chain: list[dict[str, Any]] = []
        found: dict[str, Any] | None = row
        while found is not None and found["node_id"] in waiting:
            chain.append(waiting.pop(found["node_id"]))
            found = waiting.get(found["parent_id"])
        ordered += reversed(chain)
    return ordered


async def _import_events(rows: AsyncConnection, target: AsyncConnection, moved: ArchiveCounts) -> None:
    """Import the events of each rollout that are not stored yet. Every database assigns its own event numbers."""
    e = schema.rollout_events.c
    for rollout_id in list(await rows.scalars(select(e.rollout_id).distinct().order_by(e.rollout_id))):
        query = select(e.at, e.kind, e.data).where(e.rollout_id == rollout_id).order_by(e.event_id)
        here = [tuple(row) for row in await target.execute(query)]
        new = []
        for row in map(tuple, await rows.execute(query)):
            if row in here:
                here.remove(row)
                moved.known += 1
            else:
                new.append({"rollout_id": rollout_id, "at": row[0], "kind": row[1], "data": row[2]})
        if new:
            await target.execute(insert(schema.rollout_events), new)
        moved.add("rollout_events", len(new))
