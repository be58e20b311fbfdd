"""Reads the files of a task's folder.

The folder may come from anyone, so links that leave it, special files and very large files are refused.
"""

from __future__ import annotations

from pathlib import Path

from polar_proxy.errors import BadTaskError

_TEXT_LIMIT = 16 << 20


def check_inside(folder: Path, path: Path) -> None:
    """Raise `BadTaskError` if `path`, which is below `folder`, leads out of `folder` through links."""
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a circle of links
        inside = False
    if not inside:
        raise BadTaskError(f"{path.relative_to(folder)}: is a link that leaves the task's folder")


def read_text(folder: Path, name: str) -> str:
    """Return the text of a file below `folder`. Raises `BadTaskError`."""
    path = folder / name
    check_inside(folder, path)
    if not path.exists():
        raise BadTaskError(f"{name}: there is no such file")
    if not path.is_file():
        raise BadTaskError(f"{name}: is not a file")
    try:
        if path.stat().st_size > _TEXT_LIMIT:
            raise BadTaskError(f"{name}: is larger than {_TEXT_LIMIT >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTaskError(f"{name}: cannot be read: {error}") from None
