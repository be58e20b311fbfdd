"""Temporary folders that name their process, so that the next start finds those of a process that was killed."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"polar-tmp-(\d+)-.*")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make an empty folder, and remove it with its contents at the end of the block."""
    with tempfile.TemporaryDirectory(prefix=f"polar-tmp-{os.getpid()}-") as name:
        yield Path(name)


def left_folders() -> list[Path]:
    """Return the temporary folders of this user's dead processes."""
    found = []
    with os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            named = _NAME.fullmatch(entry.name)
            if named is None or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and not _is_alive(int(named[1])):
                found.append(Path(entry.path))
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
