"""Limits on a whole sandbox by Linux control groups, version 1 and 2, for users who may make them (root).

In version 1 each controller is mounted by itself, and the new group is made below the group of this process. In version
2 the new group is made below the root of the mounted hierarchy, if the root delegates the controllers. The group of
this process cannot be the parent there, because a group with processes cannot delegate controllers to its children.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from sandboxes.base import ResourceLimits, SandboxError

ROOT = Path("/sys/fs/cgroup")
PERIOD = 100_000


@dataclass
class ControlGroup:
    """The folders of one control group: one in version 2, one for each controller in version 1."""

    dirs: list[Path]

    @property
    def procs(self) -> list[str]:
        return [str(d / "cgroup.procs") for d in self.dirs]

    def remove(self) -> None:
        for folder in self.dirs:
            remove(folder)


def remove(folder: Path, seconds: float = 30.0) -> None:
    """Remove a group whose processes have ended. Try for `seconds`, because the kernel may need a moment."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SandboxError(f"control group {folder} still holds processes: {error}") from error
            time.sleep(0.005)
        else:
            return


def settings(limits: ResourceLimits, version: int) -> dict[str, list[tuple[str, str, bool]]]:
    """Return controller -> [(file, value, required)]. The swap files exist only if swap accounting is on."""
    found: dict[str, list[tuple[str, str, bool]]] = {}
    if limits.memory_mb is not None:
        size = str(limits.memory_mb << 20)
        found["memory"] = (
            [("memory.max", size, True), ("memory.swap.max", "0", False)]
            if version == 2
            else [("memory.limit_in_bytes", size, True), ("memory.memsw.limit_in_bytes", size, False)]
        )
    if limits.pids is not None:
        found["pids"] = [("pids.max", str(limits.pids), True)]
    if limits.cpus is not None:
        quota = max(1000, int(limits.cpus * PERIOD))
        found["cpu"] = (
            [("cpu.max", f"{quota} {PERIOD}", True)]
            if version == 2
            else [("cpu.cfs_period_us", str(PERIOD), True), ("cpu.cfs_quota_us", str(quota), True)]
        )
    return found


def parents(controllers: set[str], root: Path = ROOT, own: str | None = None) -> dict[str, Path] | None:
    """Return controller -> folder in which a group can be made; None if there is a controller without such a folder."""
    unified = root / "cgroup.subtree_control"
    if unified.exists():
        return dict.fromkeys(controllers, root) if controllers <= set(unified.read_text().split()) else None
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    found: dict[str, Path] = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            # Inside a container the path may be the host's, while the mount shows the container's own group as root.
            for folder in (root / name / path.lstrip("/"), root / name):
                if name in controllers and name not in found and os.access(folder, os.W_OK) and folder.is_dir():
                    found[name] = folder
    return found if set(found) == controllers else None


def group_folders(
    sandbox_id: str, limits: ResourceLimits, root: Path = ROOT, own: str | None = None
) -> list[Path] | None:
    """Return the folders that `create` will make, so that they can be registered before they exist. Return None if the
    sandbox needs no control group, or none can be made."""
    controllers = set(settings(limits, 1))
    folders = parents(controllers, root, own) if controllers and root.is_dir() else None
    return None if folders is None else sorted({folder / sandbox_id for folder in folders.values()})


def create(folders: list[Path], limits: ResourceLimits) -> ControlGroup | None:
    """Make the group and set its limits. Return None if this fails, for example because the hierarchy is read-only or
    belongs to another user."""
    group = ControlGroup([])
    try:
        for folder in folders:
            folder.mkdir()
            group.dirs.append(folder)
            version = 2 if (folder / "cgroup.controllers").exists() else 1
            for entries in settings(limits, version).values():
                for name, value, required in entries:
                    if (folder / name).exists():
                        (folder / name).write_text(value)
                    elif required and version == 2:
                        raise PermissionError(f"{folder / name} is missing")
    except OSError:
        group.remove()
        return None
    return group
