"""The files that a program left in a sandbox, read from outside the sandbox and treated as data.

The processes in the sandbox have ended, so the files do not change while they are read. Nothing that the program left
is run, and no link is followed: the content of a link is the path of its target. Devices, sockets, pipes and everything
named `.git` are left out. A tree with more entries, longer paths or more bytes than the limits is refused with
`TreeTooLarge`.
"""

from __future__ import annotations

import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ENTRIES = 300_000
PATH_BYTES = 3_000
ALL_PATHS_BYTES = 64 << 20
"""Limit of the total length of all paths, in bytes. A disk quota does not count names."""
ARCHIVE_BYTES = 2 << 30
FILE, EXECUTABLE, LINK = 0o100644, 0o100755, 0o120000
"""Modes of entries, as git writes them."""


class TreeTooLarge(OSError):
    """A program left files that exceed a limit on what Polar reads. The message names the limit."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A regular file or a symbolic link. The content of a link is the path to which it points."""

    mode: int
    size: int


class SandboxTree(ABC):
    """The files below one folder of a sandbox, by relative path."""

    entries: dict[bytes, TreeEntry]
    top_names: Collection[bytes] | None = None
    """Names directly below the folder. Only entries with these names, and everything below them, were read. The rest is
    the same as in the sandbox's image. None: everything was read."""

    @abstractmethod
    def read(self, path: bytes) -> bytes:
        """Return the content of an entry. Blocking."""

    @abstractmethod
    def close(self) -> None: ...

    def covers(self, path: bytes) -> bool:
        """Return whether this path was read. Paths that were not read are the same as in the sandbox's image."""
        return self.top_names is None or path.partition(b"/")[0] in self.top_names

    def _add(self, path: bytes, mode: int, size: int) -> None:
        self.entries[path] = TreeEntry(mode, size)


class EntryCounter:
    """Checks the number of entries and the lengths of their paths against the limits. Folders count as well."""

    def __init__(self) -> None:
        self._count = 0
        self._path_bytes = 0

    def add(self, path: bytes) -> None:
        self._count += 1
        if self._count > ENTRIES:
            raise TreeTooLarge(f"there are more than {ENTRIES} files and folders")
        if len(path) > PATH_BYTES:
            raise TreeTooLarge(f"a path is longer than {PATH_BYTES} bytes: {os.fsdecode(path[:60])!r}...")
        self._path_bytes += len(path)
        if self._path_bytes > ALL_PATHS_BYTES:
            raise TreeTooLarge(
                f"the paths of all files and folders together are longer than {ALL_PATHS_BYTES >> 20} MiB"
            )


class FolderTree(SandboxTree):
    """A tree in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        """List the folder. Blocking. Raises `TreeTooLarge`."""
        self._root = os.fsencode(folder)
        self.entries = {}
        if os.path.islink(self._root) or not os.path.isdir(self._root):
            return  # the program removed or replaced the folder, so none of its files is left
        counter = EntryCounter()
        pending = [b""]
        while pending:
            for path, entry in self._list(pending.pop()):
                counter.add(path)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif entry.is_symlink():
                    self._add(path, LINK, len(os.readlink(entry.path)))
                elif entry.is_file(follow_symlinks=False):
                    found = entry.stat(follow_symlinks=False)
                    self._add(path, EXECUTABLE if found.st_mode & 0o100 else FILE, found.st_size)

    def _list(self, folder: bytes) -> Iterator[tuple[bytes, os.DirEntry[bytes]]]:
        """Yield the entries of a folder one by one, because there may be millions."""
        path = os.path.join(self._root, folder)
        try:
            entries = os.scandir(path)
        except PermissionError:
            os.chmod(path, 0o700)  # the folder belongs to the user that runs Polar
            entries = os.scandir(path)
        with entries:
            yield from ((os.path.join(folder, entry.name), entry) for entry in entries if entry.name != b".git")

    def read(self, path: bytes) -> bytes:
        full = os.path.join(self._root, path)
        if self.entries[path].mode == LINK:
            return os.readlink(full)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(full, flags)
        except PermissionError:
            os.chmod(full, 0o600)
            file = os.open(full, flags)
        with os.fdopen(file, "rb") as opened:
            return opened.read(self.entries[path].size)

    def close(self) -> None:
        return


class ArchiveTree(SandboxTree):
    """A tree in tar archives. A container engine wrote the archives into one file, one after the other."""

    def __init__(self, file: BinaryIO, starts: Mapping[int, bytes], top_names: Collection[bytes] | None) -> None:
        """`starts`: the offset of each archive in `file` -> the path of the file or folder that the archive contains.

        The path `b""` is the folder of the tree itself. Blocking. Raises `TreeTooLarge`.
        """
        self._file = file
        self.entries = {}
        self.top_names = top_names
        self._contents: dict[bytes, tuple[tarfile.TarFile, tarfile.TarInfo]] = {}
        counter = EntryCounter()
        for start, top in starts.items():
            file.seek(start)
            archive = tarfile.open(fileobj=file, mode="r:", errors="surrogateescape")  # noqa: SIM115 - closes nothing
            by_name: dict[str, tarfile.TarInfo] = {}
            for member in archive:
                # The archive begins each name with the name of what it holds.
                _, _, below = os.fsencode(member.name).partition(b"/")
                path = b"/".join(part for part in (top, below) if part)
                counter.add(path)
                # A hard link names an earlier member, which has the content.
                found = by_name.get(member.linkname) if member.islnk() else member
                if found is None or not path or b".git" in path.split(b"/"):
                    continue
                by_name[member.name] = found
                self._contents[path] = (archive, found)
                if found.issym():
                    self._add(path, LINK, len(os.fsencode(found.linkname)))
                elif found.isreg():
                    self._add(path, EXECUTABLE if found.mode & 0o100 else FILE, found.size)

    def read(self, path: bytes) -> bytes:
        archive, member = self._contents[path]
        if member.issym():
            return os.fsencode(member.linkname)
        opened = archive.extractfile(member)
        assert opened is not None
        return opened.read()

    def close(self) -> None:
        self._file.close()
