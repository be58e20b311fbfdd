"""Disk quota: limits on the total size and the number of files of one sandbox.

A bubblewrap sandbox gets its own file system in a sparse file if Polar runs as root, with mkfs.ext4 and loop devices. A
program that fills the file system gets ENOSPC. In all other cases a watcher measures the sandbox's folders again and
again, and stops everything inside when they hold too much. Between two measurements, only the kernel's limit on the
size of each file holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxes.base import ResourceLimits, SandboxEnded, SandboxError
from sandboxes.remove_tree import open_folder

log = logging.getLogger(__name__)

MKFS_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
PAUSE_SECONDS = 1.0
WALK_SHARE = 20
"""The watcher measures the folders, then pauses. The pause lasts at least this many times as long as the measuring."""


@dataclass
class DiskUsage:
    size: int = 0
    files: int = 0


def make_image(image: Path, content: Path, limits: ResourceLimits) -> bool:
    """Make a file system as large as the disk quota in a sparse image file, and copy the folder `content` into it.

    The copied files keep their owners. Return False if there is no disk quota, or if this user or machine cannot make
    the image. Blocking; about 10 ms.
    """
    program = shutil.which("mkfs.ext4", path=MKFS_PATH)
    if os.geteuid() != 0 or program is None or limits.disk_mb is None:
        return False
    options = ["-q", "-F", "-m", "0", "-b", "4096", "-I", "256", "-O", "^has_journal,^resize_inode"]
    options += ["-E", "lazy_itable_init=1,nodiscard", "-d", str(content)]
    if limits.files is not None:
        options += ["-N", str(limits.files)]
    command = [program, *options, str(image), f"{limits.disk_mb}M"]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        image.unlink(missing_ok=True)
    return done.returncode == 0


def measure(folders: Sequence[Path], limits: ResourceLimits) -> DiskUsage:
    """Return the total usage of the folders. Follows no link, and stops as soon as the quota is exceeded. Blocking.

    A folder that its owner may not read is made readable, because a program could hide files in it.
    """
    usage = DiskUsage()
    linked: set[tuple[int, int]] = set()
    for found in itertools.chain.from_iterable(_walk(folder) for folder in folders):
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
            if (found.st_dev, found.st_ino) in linked:
                continue
            linked.add((found.st_dev, found.st_ino))
        usage.size += found.st_blocks * 512
        usage.files += 1
        if describe_excess(usage, limits) is not None:
            break
    return usage


def describe_excess(usage: DiskUsage, limits: ResourceLimits) -> str | None:
    """Return which limit the usage exceeds, as text; None if it exceeds none."""
    if limits.disk_mb is not None and usage.size > limits.disk_mb << 20:
        return f"its files take more than the {limits.disk_mb} MiB that it may use"
    if limits.files is not None and usage.files > limits.files:
        return f"it holds more than the {limits.files} files and folders that it may make"
    return None


def _walk(root: Path) -> Iterator[os.stat_result]:
    """Yield the status of everything below a folder. Programs inside may change the tree meanwhile.

    Folders may be nested thousands deep, so only the current folder is open, and `..` leads back to the one above. If a
    program moved the current folder, `..` leads to another folder: the walk ends, and the next walk finds the moved
    folder.
    """
    try:
        current = _open_readable(str(root), None)
    except (FileNotFoundError, NotADirectoryError):
        return
    levels: list[tuple[tuple[int, int], list[str]]] = [(_identity(current), [])]
    try:
        yield from _entries(current, levels[-1][1])
        while levels:
            identity, names = levels[-1]
            if _identity(current) != identity:
                return
            if names:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed or replaced meanwhile
                    inner = _open_readable(names.pop(), current)
                    os.close(current)
                    current = inner
                    levels.append((_identity(current), []))
                    yield from _entries(current, levels[-1][1])
            elif levels.pop() and levels:
                outer = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=current)
                os.close(current)
                current = outer
    finally:
        os.close(current)


def _identity(folder: int) -> tuple[int, int]:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino


def _entries(folder: int, subfolders: list[str]) -> Iterator[os.stat_result]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                yield entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    subfolders.append(entry.name)


def _open_readable(name: str, parent: int | None) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except PermissionError:
        return open_folder(name, parent)


async def watch(
    name: str,
    usage: Callable[[], Awaitable[DiskUsage]],
    limits: ResourceLimits,
    stop: Callable[[str], Awaitable[None]],
) -> None:
    """Measure repeatedly until the quota is exceeded, then call `stop` with the reason and return. Also return when the
    sandbox has ended. `name` is for the log."""
    while True:
        began = time.monotonic()
        try:
            excess = describe_excess(await usage(), limits)
            if excess is not None:
                await stop(excess)
                return
        except SandboxEnded:
            return
        except (SandboxError, OSError) as error:
            log.warning("The files of sandbox %s cannot be measured now: %s", name, error)
        await asyncio.sleep(max(PAUSE_SECONDS, WALK_SHARE * (time.monotonic() - began)))
