"""Small files that are written as a whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file by way of a temporary file that only this user can read, so that `path` is never incomplete."""
    with _temporary_file(path.parent, data) as temporary:
        os.chmod(temporary, mode)
        os.replace(temporary, path)


def create_file(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, unless it exists. Of several processes, only the first writes it."""
    with _temporary_file(path.parent, data) as temporary, contextlib.suppress(FileExistsError):
        os.link(temporary, path)


@contextlib.contextmanager
def _temporary_file(folder: Path, data: bytes) -> Iterator[str]:
    """Yield the path of a file with this content, mode 600. After the block, remove the file if it is still there."""
    descriptor, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)
