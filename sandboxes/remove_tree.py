"""Remove a folder that a hostile program filled.

The program may have nested thousands of folders, taken away permissions, made files immutable (as root), or left links
to the host's files. So nothing here recurses, builds a long path or follows a link: every nested folder is first moved
directly into the folder to remove, and then opened by its name relative to that folder's file descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
from collections import deque
from pathlib import Path

_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_IMMUTABLE_OR_APPEND = 0x10 | 0x20


def remove_tree(path: Path) -> None:
    """Remove a folder and everything in it; do nothing if it does not exist. Blocking.

    Costs one pass over the entries, with two open descriptors. Raises OSError if the system refuses a step.
    """
    try:
        root = open_folder(str(path), None)
    except FileNotFoundError:
        return
    try:
        token = secrets.token_hex(8)  # the program inside cannot have made a folder of this name
        moved = 0
        pending = deque(_remove_files(root))
        while pending:
            name = pending.popleft()
            folder = open_folder(name, root)
            try:
                for inner in _remove_files(folder):
                    _allow_owner(inner, folder)
                    moved += 1
                    new_name = f"{token}-{moved}"
                    os.rename(inner, new_name, src_dir_fd=folder, dst_dir_fd=root)
                    pending.append(new_name)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=root)
    finally:
        os.close(root)
    os.rmdir(path)


def _remove_files(folder: int) -> list[str]:
    """Remove everything in an open folder except its subfolders. Return the names of the subfolders."""
    folders = []
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if is_folder:
            folders.append(name)
        else:
            with contextlib.suppress(FileNotFoundError):
                _unlink(name, folder)
    return folders


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except PermissionError:
        if os.geteuid() != 0:
            raise
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
        try:
            _clear_flags(file)
        finally:
            os.close(file)
        os.unlink(name, dir_fd=folder)


def open_folder(name: str, parent: int | None) -> int:
    """Open a folder, even one that its owner may not read. Raises OSError if `name` is a link."""
    _allow_owner(name, parent)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def _allow_owner(name: str, parent: int | None) -> None:
    """Give the owner of a folder all permissions for it. Raises OSError if `name` is a link, instead of following
    it."""
    if not hasattr(os, "O_PATH"):  # not Linux
        os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        return
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    path = f"/proc/self/fd/{handle}"
    try:
        os.chmod(path, 0o700)
    except PermissionError:
        if os.geteuid() != 0:
            raise
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _clear_flags(folder)
        finally:
            os.close(folder)
        os.chmod(path, 0o700)
    finally:
        os.close(handle)


def _clear_flags(file: int) -> None:
    """Make an open file or folder changeable again (`chattr -i -a`). Needs root."""
    flags = struct.unpack("l", fcntl.ioctl(file, _FS_IOC_GETFLAGS, bytes(struct.calcsize("l"))))[0]
    fcntl.ioctl(file, _FS_IOC_SETFLAGS, struct.pack("l", flags & ~_IMMUTABLE_OR_APPEND))
