"""Remove a folder that a hostile program filled.

The program may have nested thousands of folders, taken away permissions, or left links to the host's files. So nothing
here recurses, builds a long path or follows a link: every nested folder is first moved up to the root of the
removal, where its name and one file descriptor reach it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import deque
from pathlib import Path


def remove_tree(path: Path) -> None:
    """Remove a folder and everything in it; do nothing if it does not exist. Blocking.

    Costs one pass over the entries, with two open descriptors. Raises OSError if the system refuses a step.
    """
    try:
        root = _open_folder(str(path), None)
    except FileNotFoundError:
        return
    try:
        token = secrets.token_hex(8)  # the program inside cannot have made a folder of this name
        moved = 0
        pending = deque(_remove_files(root))
        while pending:
            name = pending.popleft()
            folder = _open_folder(name, root)
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
                os.unlink(name, dir_fd=folder)
    return folders


def _open_folder(name: str, parent: int | None) -> int:
    _allow_owner(name, parent)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def _allow_owner(name: str, parent: int | None) -> None:
    """Give the owner of a folder all permissions for it. A link of that name is not followed: it raises OSError."""
    if not hasattr(os, "O_PATH"):  # not Linux
        os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        return
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
