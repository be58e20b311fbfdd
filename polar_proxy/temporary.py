"""Temporary folders. The name of a folder contains the id of the process that made it, so that another process finds
the folders of a killed process."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandboxes.remove_tree import remove_tree

_NAME = re.compile(r"polar-tmp-(\d+)-.*")


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make an empty folder that only this user can read, and remove it with its contents at the end of the block.

    The folder is made in `parent`, by default the system's folder for temporary files. Blocking. The removal is safe
    even if a hostile program has filled the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"polar-tmp-{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        remove_tree(folder)


def abandoned_folders(parent: Path | None = None) -> list[Path]:
    """Return this user's temporary folders in `parent` whose process has ended."""
    found = []
    with os.scandir(parent or tempfile.gettempdir()) as entries:
        for entry in entries:
            named = _NAME.fullmatch(entry.name)
            if named is None or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and not process_exists(int(named[1])):
                found.append(Path(entry.path))
    return found


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
