"""Checkpoints of a SQLite file: a thread copies the write-ahead log into the file while commits go on.

A checkpoint waits for the disk (60 to 340 ms for 50 MB of log). SQLite's automatic checkpoint is part of the commit
that finds the log too long. This commit waits for the disk, and later commits wait for this commit. Here a thread
copies the log. The first commit after that copies only what was added meanwhile, and the next transaction starts the
log again from its beginning. If a reader still needs a part of the log, the log is not started again. Then a later
checkpoint copies what is left, again first in the thread and then in a commit. See
https://www.sqlite.org/wal.html#ckpt.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

_LOG_BYTES = 16 << 20
_PAUSE_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Checkpointer:
    """Copies the write-ahead log of a SQLite file into the file when the log has become long.

    The connections that write must not copy the log themselves (`wal_autocheckpoint=0`). When they start the log again
    from its beginning, they must truncate the log's file (`journal_size_limit=0`): the log is copied when this file is
    longer than `log_bytes`.
    """

    def __init__(self, path: Path, *, log_bytes: int = _LOG_BYTES, pause: float = _PAUSE_SECONDS) -> None:
        """`log_bytes`: length in bytes above which the log is copied. `pause`: minimum seconds between the beginnings
        of two checkpoints."""
        self._path = path
        self._limit, self._pause = log_bytes, pause
        self._log_path = f"{path}-wal"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polar-checkpoint")
        self._running: Future[None] | None = None
        self._next_at = 0.0
        """Time by the monotonic clock before which no checkpoint begins."""

    def after_commit(self) -> None:
        """Begin a checkpoint in the thread if the log is long. If the thread has finished a checkpoint, copy what was
        added to the log meanwhile.

        Call this method in the thread that commits.
        """
        if self._running is not None:
            if self._running.done():
                self._running = None
                self._checkpoint()
        elif time.monotonic() >= self._next_at and self._log_length() > self._limit:
            self._next_at = time.monotonic() + self._pause
            self._running = self._thread.submit(self._checkpoint)

    def _log_length(self) -> int:
        """Return the length of the write-ahead log in bytes; 0 on file systems without shared memory, where SQLite has
        no write-ahead log."""
        try:
            return os.stat(self._log_path).st_size
        except FileNotFoundError:
            return 0

    def _checkpoint(self) -> None:
        """Copy the log, as far as the oldest reader's snapshot allows. Do nothing while another connection makes a
        checkpoint."""
        try:
            with closing(sqlite3.connect(self._path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:  # the log keeps every commit, and the next checkpoint copies them
            _log.warning("the write-ahead log of %s was not copied into the file: %s", self._path, error)

    def close(self) -> None:
        self._thread.shutdown()
