"""Imports archives, which may come from anyone.

Promises:

* An archive is imported completely, in one transaction, or not at all. Importing it again changes nothing.
* Stored rows do not change. Nothing is imported if a row of the archive differs from the stored row with the same key,
  or if a new row would belong to a stored session, rollout or training run, or to a group of this database's own jobs.
* Nothing that was imported can be run, opened or delivered. Rollouts that had not ended arrive as cancelled; keys,
  claims and deliveries are left out; holding groups (see `service/groups.py`) become ordinary groups; jobs,
  leases and callbacks are not read at all.
* Everything that is named by its hash is hashed again. Each value has the type of its column, and each reference leads
  to a row of the archive.
* Tasks and certificates are checked by their models, if the caller gives these models (`export.archives` does).
* Time, memory and disk are bounded by the size of the file (see `archive_file` and `archive_rows`).
* An archive of a newer schema is refused; one of an older schema is upgraded first.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Row, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.database import Database
from polar_proxy.store.maintenance.archive_file import unpack
from polar_proxy.store.maintenance.archive_rows import ColumnChecks, copy_rows, refuse_programs
from polar_proxy.store.maintenance.verify import ProgressCallback, verify
from polar_proxy.store.migrate import open_database
from polar_proxy.store.repositories.artifacts import artifact_path
from polar_proxy.store.service.groups import HOLDING_FOR

MAX_BYTES = 64 << 30
PAGE = 500

NOT_EXPORTED = frozenset(
    {
        *("jobs", "leases", "callbacks", "job_events", "api_keys", "open_calls", "fleet"),
        *("conversations", "conversation_items", "provider_ids"),
    }
)
"""Tables that concern one database only: its queue, deliveries, keys and calls in progress, and the tables from which
clients continue stored conversations and responses. (A client needs the session's key for this, and an archive contains
no keys.) An archive is complete without these tables, because its calls have whole messages."""
CLEARED_COLUMNS: dict[str, dict[str, Any]] = {
    "sessions": {"key_hash": None},
    "groups": {"job_id": None, "delivery": None},
    "rollouts": {
        "job_id": None,
        "claimed_by": None,
        "lease_expires_at": None,
        "owner_host": None,
        "owner_pid": None,
    },
}
"""table -> column -> a value that replaces the column's stored values, both when an archive is written and when it is
imported."""
_NOT_COMPARED: dict[str, frozenset[str]] = {"nodes": frozenset({"data"}), "tasks": frozenset({"created_at"})}
"""Columns that imports do not compare: equal content may be packed differently, and equal tasks may have been stored at
different times."""
_OWNERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "calls": (("sessions", "session_id"),),
    "completions": (("calls", "call_id"),),
    "rescores": (("calls", "call_id"),),
    "traces": (("sessions", "session_id"), ("rollouts", "rollout_id")),
    "trace_spans": (("traces", "trace_id"),),
    "exclusions": (("sessions", "session_id"),),
    "rewards": (("rollouts", "rollout_id"), ("sessions", "session_id")),
    "remarks": (("rollouts", "rollout_id"), ("sessions", "session_id")),
    "stages": (("rollouts", "rollout_id"),),
    "rollout_events": (("rollouts", "rollout_id"),),
    "artifacts": (("rollouts", "rollout_id"),),
    "training_lines": (("training_runs", "run_id"),),
}
"""Table -> its owners, each as (owner's table, column with the owner's id). A new row is imported only together with
its owners."""


@dataclass(slots=True)
class ArchiveCounts:
    """Numbers of exported or imported rows (by table) and files. `known`: number of rows of the archive that were
    already stored before the import."""

    rows: dict[str, int] = field(default_factory=dict)
    known: int = 0
    files: int = 0

    def add(self, table: str, count: int) -> None:
        if count:
            self.rows[table] = self.rows.get(table, 0) + count


async def import_archive(
    database: Database, artifacts: Path, file: Path, *, max_bytes: int, progress: ProgressCallback, models: ColumnChecks
) -> ArchiveCounts:
    """Import a whole archive, or nothing if an error is raised.

    Raises UsageError if there is no file. Raises StoreError if the archive is damaged or forged, exceeds a limit, has
    a newer schema, or conflicts with stored rows (see the docstring of this module).
    """
    parent = artifacts.parent
    await asyncio.to_thread(parent.mkdir, mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="polar-import-") as name:
        folder = Path(name)
        unpacked = await asyncio.to_thread(unpack, file, folder, max_bytes)
        await asyncio.to_thread(refuse_programs, unpacked.database)
        async with single_file(unpacked.database):
            pass  # upgraded to this version's schema
        own = folder / "own.db"
        async with single_file(own):
            pass
        tables = [table for table in schema.metadata.sorted_tables if table.name not in NOT_EXPORTED]
        await asyncio.to_thread(copy_rows, unpacked.database, own, tables, unpacked.unpacked_limit, progress, models)
        await asyncio.to_thread(unpacked.database.unlink)
        async with open_database(str(own)) as checked:
            async with checked.reading() as source:
                used = set(await source.scalars(select(schema.artifacts.c.sha256)))
            if missing := used - unpacked.artifacts:
                raise StoreError(f"{file} is damaged: the artifact {min(missing)[:80]!r} is missing from it")
            if faults := await verify(checked, folder / "artifacts", progress):
                raise StoreError(
                    f"Nothing was imported: {file} is damaged or forged, {faults[0].what}: {faults[0].problem}"
                    + (f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else "")
                )
            async with checked.reading() as source, database.writing() as target:
                transfer = _Transfer(source, target, progress)
                for table in tables:
                    await transfer.copy(table)
                await transfer.check_sessions()
                transfer.counts.files = await asyncio.to_thread(_move_files, folder / "artifacts", artifacts, used)
    return transfer.counts


@asynccontextmanager
async def single_file(path: Path) -> AsyncIterator[Database]:
    """Open an SQLite database, created or upgraded to this schema. Afterwards it is one file without a write-ahead
    log."""
    async with open_database(str(path)) as database:
        yield database
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def parents_first(table: Table) -> list[ColumnElement[Any]]:
    """Return the columns that order a table's rows. For `nodes`, every node with content comes after its parent. For
    other tables, the columns are the primary key."""
    # `chain_length` grows along a chain, except at empty nodes.
    return [table.c.chain_length, table.c.length.desc()] if table.name == "nodes" else list(table.primary_key.columns)


class _Transfer:
    """Copies the checked rows of an archive into the database: each row after the rows that it refers to."""

    def __init__(self, source: AsyncConnection, target: AsyncConnection, progress: ProgressCallback) -> None:
        self.counts = ArchiveCounts()
        self._source = source
        self._target = target
        self._progress = progress
        self._new: dict[str, set[str]] = {owner: set() for owners in _OWNERS.values() for owner, _ in owners}
        """table -> ids of the owners that this import has added"""

    async def copy(self, table: Table) -> None:
        if table.name == "rollout_events":
            await self._copy_events()
            return
        pages = await self._source.stream(select(table).order_by(*parents_first(table)))
        async for page in pages.partitions(PAGE):
            new = await self._select_new(table, page)
            await self._check_owners(table, new)
            if table.name == "nodes":
                new = _order_nodes(new)
            if new:
                await self._target.execute(insert(table), new)
            if table.name in self._new:
                key = next(iter(table.primary_key.columns)).name
                self._new[table.name].update(row[key] for row in new)
            self.counts.add(table.name, len(new))
            self._progress(f"{table.name} (import)", self.counts.rows.get(table.name, 0), 0)

    async def _select_new(self, table: Table, page: Sequence[Row[Any]]) -> list[dict[str, Any]]:
        """Return the rows that are not stored yet. Raises StoreError for a row that is stored with other values."""
        key = list(table.primary_key.columns)
        skip = _NOT_COMPARED.get(table.name, frozenset())
        compared = [column.name for column in table.columns if column.name not in skip]

        def by_key(rows: Iterable[Row[Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
            return {tuple(row._mapping[c.name] for c in key): _as_imported(table, row._mapping) for row in rows}

        given = by_key(page)
        same_keys = select(table).where(key[0].in_([values[0] for values in given]))
        stored = by_key(await self._target.execute(same_keys))
        new: list[dict[str, Any]] = []
        for values, row in given.items():
            if values not in stored:
                new.append(row)
                continue
            if different := next((name for name in compared if row[name] != stored[values][name]), None):
                raise _conflict(table, values, f"is stored already with another {different}")
            self.counts.known += 1
        return new

    async def _check_owners(self, table: Table, new: list[dict[str, Any]]) -> None:
        for owner, column in _OWNERS.get(table.name, ()):
            for row in new:
                if row[column] is not None and row[column] not in self._new[owner]:
                    # A new event has no number yet.
                    values = tuple(row.get(c.name) for c in table.primary_key.columns)
                    raise _conflict(table, values, f"would be added to {row[column]}, which is stored already")
        if table.name == "rollouts" and new:
            g = schema.groups.c
            ids = {row["group_id"] for row in new}
            queued_here = select(g.group_id).where(
                g.group_id.in_(ids), (g.job_id.is_not(None) | g.delivery.is_not(None))
            )
            if group_id := await self._target.scalar(queued_here.limit(1)):
                raise _conflict(
                    table, (new[0]["rollout_id"],), f"would be added to {group_id}, a group of this database"
                )

    async def check_sessions(self) -> None:
        """Refuse the archive if a new session belongs to a rollout that was stored before the import.

        Call this after the import of the rollouts. `_check_owners` cannot check sessions, because they are imported
        before the rollouts.
        """
        s, r = schema.sessions.c, schema.rollouts.c
        new = sorted(self._new["sessions"])
        for start in range(0, len(new), PAGE):
            query = select(s.session_id, s.rollout_id).join(schema.rollouts, r.rollout_id == s.rollout_id)
            for session_id, rollout_id in await self._target.execute(
                query.where(s.session_id.in_(new[start : start + PAGE]))
            ):
                if rollout_id not in self._new["rollouts"]:
                    raise _conflict(
                        schema.sessions, (session_id,), f"would be added to the stored rollout {rollout_id}"
                    )

    async def _copy_events(self) -> None:
        """Import the events that are not stored yet. Raises StoreError if such an event belongs to a rollout that was
        stored before the import.

        Events are compared without their numbers, because every database assigns its own.
        """
        e = schema.rollout_events.c
        for rollout_id in list(await self._source.scalars(select(e.rollout_id).distinct().order_by(e.rollout_id))):
            query = select(e.at, e.kind, e.data).where(e.rollout_id == rollout_id).order_by(e.event_id)
            here = [tuple(row) for row in await self._target.execute(query)]
            new = []
            for event in map(tuple, await self._source.execute(query)):
                if event in here:
                    here.remove(event)
                    self.counts.known += 1
                else:
                    at, kind, data = event
                    new.append({"rollout_id": rollout_id, "at": at, "kind": kind, "data": data})
            await self._check_owners(schema.rollout_events, new)
            if new:
                await self._target.execute(insert(schema.rollout_events), new)
            self.counts.add("rollout_events", len(new))


def _conflict(table: Table, key: tuple[Any, ...], problem: str) -> StoreError:
    shown = " ".join(value.hex() if isinstance(value, bytes) else str(value) for value in key if value is not None)
    return StoreError(
        f"Nothing was imported: {table.name} {shown} {problem}, and an import never changes what is stored. "
        "Import into a separate database"
    )


def _as_imported(table: Table, row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row as an import stores it: without anything that could be run, opened or delivered."""
    values = {**row, **CLEARED_COLUMNS.get(table.name, {})}
    if table.name == "groups":
        values["config"] = {name: value for name, value in values["config"].items() if name != HOLDING_FOR}
    if table.name == "rollouts" and values["status"] not in schema.FINAL_STATUSES:
        ended_at = values["started_at"] or values["created_at"]
        error = "It had not ended when its archive was written"
        values |= {"status": "cancelled", "cause": "imported", "error": error, "ended_at": ended_at}
    return values


def _order_nodes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with each parent before its children.

    The rows come in this order already (see `parents_first`), except nodes without content."""
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


def _move_files(source: Path, target: Path, hashes: set[str]) -> int:
    """Move the checked files into the store, unless they are there. Return how many were moved.

    If the rows of a file are rolled back afterwards, the file does no harm, because its name is the hash of its
    content."""
    moved = 0
    try:
        for sha256 in sorted(hashes):
            path = artifact_path(target, sha256)
            try:
                os.utime(path)  # makes the file young: `polar db prune` does not remove young files
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                artifact_path(source, sha256).replace(path)
                moved += 1
    except OSError as error:
        raise StoreError(f"An artifact cannot be written below {target}: {error.strerror}") from error
    return moved
