"""One SQLite file: set up its connections, test that it can be written, and find the process that has its lock."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from polar_proxy.store.schema import VERSION_TABLE

BUSY_MS = 30_000
_WRITER_CACHE_KB = 32_768
_READER_CACHE_KB = 4_096
"""Size of the cache of each connection that reads. The cache is small, because there are many such connections and the
operating system caches the file as well."""
_PROBE_SECONDS = 1.2
PROBE = f"UPDATE {VERSION_TABLE} SET version_num = version_num"
_RESERVE_BYTES = 1 << 20
"""Free space in bytes below which the disk of a SQLite file counts as full. A probe that writes one row (`probe_file`)
may succeed on a disk that has no room for the rows of a call."""
_WRITE_LOCK = 120
"""The byte of the file `-shm` that a writer locks: https://www.sqlite.org/walformat.html#wal_locks"""


class RollbackOnClose(sqlite3.Connection):
    """A connection that rolls back its transaction when it is closed.

    Without the rollback, a closed connection would keep its transaction and locks while Python still refers to one of
    its statements. The traceback of a cancelled task refers to a statement until the garbage collector runs.

    The connection may be closed more than once, because a close that was cancelled is repeated.
    """

    _closed = False

    def close(self) -> None:
        if not self._closed and self.in_transaction:
            self.rollback()
        super().close()
        self._closed = True


def set_up_connections(engine: Engine, *, writes: bool) -> None:
    """Set up the SQLite connections of an engine when they are opened and when a transaction begins."""
    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    def on_connect(connection: Any, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # the driver must not begin transactions; `on_begin` does
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        if writes:
            cursor.execute("PRAGMA journal_mode=WAL")
            # A commit survives the end of this process. To survive a power failure, it would have to wait for the disk.
            cursor.execute("PRAGMA synchronous=NORMAL")
            cursor.execute("PRAGMA wal_autocheckpoint=0")  # see `Checkpointer`
            cursor.execute("PRAGMA journal_size_limit=0")
            cursor.execute("PRAGMA foreign_keys=ON")
        else:
            cursor.execute("PRAGMA query_only=ON")
        cursor.execute(f"PRAGMA cache_size=-{_WRITER_CACHE_KB if writes else _READER_CACHE_KB}")
        cursor.close()

    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


def check_free_space(path: Path) -> None:
    """Raise OSError if the disk has less than `_RESERVE_BYTES` of free space."""
    disk = os.statvfs(path.parent)
    if disk.f_bavail * disk.f_frsize < _RESERVE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def probe_file(path: Path) -> None:
    """Write a row and commit, on a separate connection."""
    check_free_space(path)
    with closing(
        sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_PROBE_SECONDS, factory=RollbackOnClose)
    ) as connection:
        connection.execute("PRAGMA synchronous=NORMAL")
        with connection:
            connection.execute(PROBE)


def is_locked(error: Exception) -> bool:
    """Return whether SQLite reports that another connection has the lock."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, sqlite3.OperationalError) and "database is locked" in str(cause)


def name_lock_holder(path: Path) -> str:
    """Return a text for error messages that names the process with the lock of a database, by pid and name if known."""
    holders = [pid for pid in write_lock_holders(path) if pid > 0]
    if not holders:
        return "Another process"
    names = []
    for pid in holders:
        with suppress(OSError):
            names.append(f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})")
    which = "Another connection of this process," if holders == [os.getpid()] else "Process"
    return f"{which} {', '.join(names) or holders[0]}"


def write_lock_holders(path: Path) -> list[int]:
    """Return the pids that hold the write lock of a database in WAL mode; empty on systems that do not report them.

    The list comes from /proc/locks. Asking the file (F_GETLK) would need a descriptor of the file, and closing this
    descriptor would release all locks of this process on the file.
    """
    try:
        inode = os.stat(f"{path}-shm").st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    holders = set()
    for line in lines:
        # 1: POSIX  ADVISORY  WRITE 5276 fe:00:2765317 120 120, and "-> " before the kind where a process waits.
        fields = line.split()
        if len(fields) != 8 or fields[3] != "WRITE" or not fields[5].endswith(f":{inode}"):
            continue
        if int(fields[6]) <= _WRITE_LOCK and (fields[7] == "EOF" or int(fields[7]) >= _WRITE_LOCK):
            holders.add(int(fields[4]))
    return sorted(holders)
