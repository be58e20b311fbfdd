"""Marks of sessions that lost a call while the database could not be written. A file keeps the marks until the database
has them.

Promises:

* A mark survives `kill -9` of its process. (It does not wait for the disk, so it may not survive a loss of power.)
* A mark needs no free space on the disk: each process reserves its file when it starts.
* A process that opens the database begins by writing the marks of dead processes into the database.

A living process holds a lock on its file. Processes on other machines see a mark once the database has it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polar_proxy.errors import StoreError
from polar_proxy.types import new_id

_RESERVED_BYTES = 1 << 18
"""Size of the reserved file, which is enough for about 3,000 sessions. Marks of further sessions need free space on the
disk."""


@dataclass(frozen=True, slots=True)
class OutageMark:
    """A session that lost a call.

    `key_hash`: None if the session is known to be stored, else the hash of its key. With this hash, a session that is
    still missing from the database is stored together with the mark.
    """

    session_id: str
    key_hash: bytes | None


class OutageMarks:
    """The file with this process's marks, and the files of dead processes. Each method blocks for microseconds."""

    def __init__(self, folder: Path, database: str) -> None:
        """`database`: the URL of the database. `folder` may also have the marks of other processes and databases."""
        self._folder = folder
        self._prefix = f"{hashlib.sha256(database.encode()).hexdigest()[:16]}-"
        self._file: Path | None = None
        self._fd = -1
        self._end = 0
        self._marked: set[OutageMark] = set()

    def reserve(self) -> None:
        """Create this process's file with disk space for its marks, if it does not exist yet.

        Raises StoreError if the file cannot be made."""
        if self._file is not None:
            return
        name = new_id("marks")
        new, final = self._folder / f".{name}", self._folder / f"{self._prefix}{name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                os.posix_fallocate(self._fd, 0, _RESERVED_BYTES)
                new.rename(final)
            except OSError:
                os.close(self._fd)
                new.unlink()
                raise
        except OSError as error:
            raise StoreError(
                f"Polar cannot make the file {final}, in which it marks sessions that lose calls: {error.strerror}"
            ) from error
        self._file = final

    def add(self, mark: OutageMark) -> None:
        """Write a mark into this process's file, unless it is there already. Raises StoreError if this fails."""
        if mark in self._marked:
            return
        self.reserve()
        key = "-" if mark.key_hash is None else mark.key_hash.hex()
        line = f"{mark.session_id} {key}\n".encode()
        try:
            os.pwrite(self._fd, line, self._end)
        except OSError as error:
            raise StoreError(
                f"Session {mark.session_id} lost a call, and this cannot be noted in {self._file}: {error.strerror}"
            ) from error
        self._end += len(line)
        self._marked.add(mark)

    def clear(self) -> None:
        """Remove all marks of this process, because the database has them."""
        if self._end:
            os.pwrite(self._fd, bytes(self._end), 0)
        self._end = 0
        self._marked.clear()

    def close(self) -> None:
        """Remove the file of this process, unless it still has marks: then it is left for the next start."""
        if self._file is not None:
            if not self._end:
                self._file.unlink()
            os.close(self._fd)
            self._file, self._end = None, 0
            self._marked.clear()

    def of_dead_processes(self) -> Iterator[tuple[OutageMark, ...]]:
        """Yield the marks of one dead process after another. The file of a process is removed when the caller asks for
        the next marks.

        So the caller must write the marks into the database first.
        """
        for file in sorted(self._folder.glob(f"{self._prefix}*")):
            try:
                fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:  # another process that just started has removed it
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield _read_marks(file)
                file.unlink(missing_ok=True)
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    raise
            finally:
                os.close(fd)


def _read_marks(file: Path) -> tuple[OutageMark, ...]:
    lines = (line.split() for line in file.read_bytes().rstrip(b"\0").decode().splitlines())
    return tuple(OutageMark(name, None if key == "-" else bytes.fromhex(key)) for name, key in lines)
