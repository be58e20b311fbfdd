"""What a dead owner left behind: found and removed; what belongs to a living owner is never touched.

Every sandbox is registered in a folder of small JSON files before anything of it starts, and unregistered after all
of it is gone. A record names its owner so that a reused pid, a reboot, another machine on a shared disk, or another
process namespace cannot be mistaken for the owner's death: (machine, boot, process namespace, pid, start time).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from sandboxes.base import SANDBOX_ID_VARIABLE, SandboxError

from .supervisor.shim import descendants

LABEL = "polar.sandbox"
OWNER_LABEL = "polar.owner"
LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class RemovedItem:
    """One thing that `sweep` removed: what = process | container | directory | cgroup | record."""

    sandbox: str
    what: str
    detail: str


@dataclass(frozen=True)
class OwnerProcess:
    """A process, told apart from every other one."""

    machine: str
    boot: str
    pid_namespace: str
    pid: int
    started: str

    @classmethod
    def me(cls) -> OwnerProcess:
        machine, boot, namespace = _here()
        return cls(machine, boot, namespace, os.getpid(), start_time(os.getpid()) or "")

    def dead(self) -> bool:
        """True only if that is certain. False also for owners that cannot be judged from here."""
        machine, boot, namespace = _here()
        if self.machine != machine:
            return False
        if self.boot != boot:
            return True
        if self.pid_namespace != namespace:
            return False
        return start_time(self.pid) != self.started

    @classmethod
    def parse(cls, data: dict[str, Any]) -> OwnerProcess:
        return cls(data["machine"], data["boot"], data["pid_namespace"], int(data["pid"]), data["started"])


@cache
def _here() -> tuple[str, str, str]:
    if not LINUX:
        import platform

        return platform.node(), "", ""
    machine = Path("/etc/machine-id")
    name = machine.read_text().strip() if machine.exists() else ""
    return name or os.uname().nodename, _boot(), os.readlink("/proc/self/ns/pid")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> str | None:
    """When a process started, in the system's own units; None if there is no such process (a zombie is none)."""
    if not LINUX:
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


@dataclass
class SandboxRecord:
    """All that exists of one sandbox outside this process. `processes`: [pid, start time] of what the owner started."""

    id: str
    kind: str
    owner: OwnerProcess
    processes: list[tuple[int, str]] = field(default_factory=list)
    dirs: list[str] = field(default_factory=list)
    cgroups: list[str] = field(default_factory=list)
    container: str | None = None
    version: int = 1

    @classmethod
    def mine(cls, ident: str, kind: str) -> Self:
        return cls(ident, kind, OwnerProcess.me())

    def add_processes(self, pids: list[int]) -> None:
        self.processes += [(pid, start) for pid in pids if (start := start_time(pid)) is not None]


class SandboxRegistry:
    """The records below `state_dir`. Blocking: call it from a thread."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir.absolute()
        self.records = self.state_dir / "records"

    def write(self, record: SandboxRecord) -> None:
        self.records.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.records / f"{record.id}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record)))
        temporary.replace(path)

    def remove(self, ident: str) -> None:
        for suffix in ("json", "tmp"):
            (self.records / f"{ident}.{suffix}").unlink(missing_ok=True)

    def dead(self) -> list[SandboxRecord]:
        """The records whose owner is certainly dead."""
        return [record for record in self.all() if record.owner.dead()]

    def all(self) -> list[SandboxRecord]:
        found = []
        for path in sorted(self.records.glob("*.json")):
            try:
                data = json.loads(path.read_text())
            except FileNotFoundError:
                continue  # its owner closed it just now
            if data.get("version") != 1:
                raise SandboxError(f"{path} was written by a newer version; sweep with that one")
            data["owner"] = OwnerProcess.parse(data["owner"])
            data["processes"] = [(int(pid), start) for pid, start in data["processes"]]
            found.append(SandboxRecord(**data))
        return found


def default_state_dir() -> Path:
    """A private folder of this user in the system's temporary directory."""
    path = Path(tempfile.gettempdir()) / f"polar-sandboxes-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.getuid() or not stat.S_ISDIR(path.lstat().st_mode):
        raise SandboxError(f"{path} belongs to somebody else; give a state_dir of your own")
    return path


async def sweep(state_dir: Path | None = None) -> list[RemovedItem]:
    """Remove what dead owners of this state directory left, and containers of dead owners whoever registered them.

    Returns what was removed. Raises `SandboxError` when something could not be; everything else is removed before.
    Containers of an engine that does not answer now stay registered for the next sweep, with a warning in the log.
    """
    if state_dir is None:
        state_dir = await asyncio.to_thread(default_state_dir)
    registry = SandboxRegistry(state_dir)
    records = await asyncio.to_thread(registry.dead)
    removed: list[RemovedItem] = []
    problems: list[str] = []
    await asyncio.to_thread(_sweep_local, records, removed, problems)
    from . import docker_engine  # it imports this module

    waiting = await docker_engine.sweep_containers(records, removed, problems)
    for record in records:
        if record.id not in waiting and not any(problem.startswith(record.id) for problem in problems):
            await asyncio.to_thread(registry.remove, record.id)
            removed.append(RemovedItem(record.id, "record", f"owner {record.owner.pid}"))
    if problems:
        raise SandboxError("left-over sandboxes could not be removed: " + "; ".join(problems))
    return removed


def _sweep_local(records: list[SandboxRecord], removed: list[RemovedItem], problems: list[str]) -> None:
    for record in records:
        # The marked trees first: without its supervisor a tree would be harder to find.
        for ident, pid in kill_marked({record.id}):
            removed.append(RemovedItem(ident, "process", str(pid)))
        for pid, start in record.processes:
            if _signal(pid, start, signal.SIGKILL):
                removed.append(RemovedItem(record.id, "process", str(pid)))
    for record in records:
        try:
            _remove_folders(record, removed)
        except (OSError, SandboxError) as error:
            problems.append(f"{record.id}: {error}")


def _remove_folders(record: SandboxRecord, removed: list[RemovedItem]) -> None:
    from . import cgroups

    for name in record.cgroups:
        if Path(name).is_dir():
            cgroups.remove(Path(name))
            removed.append(RemovedItem(record.id, "cgroup", name))
    for name in record.dirs:
        if Path(name).exists():
            remove_dir(Path(name))
            removed.append(RemovedItem(record.id, "directory", name))


def marked_processes(idents: set[str]) -> Iterator[tuple[str, int]]:
    """(sandbox id, pid) of the processes that carry the marker of one of these sandboxes. Zombies carry none."""
    if not LINUX:
        return
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (ident := _marker(int(entry))) in idents:
            yield ident, int(entry)


def _marker(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""  # gone, or another user's
    prefix = SANDBOX_ID_VARIABLE.encode() + b"="
    return next((v[len(prefix) :].decode(errors="replace") for v in variables if v.startswith(prefix)), "")


def kill_marked(idents: set[str], seconds: float = 30.0) -> list[tuple[str, int]]:
    """End every process with one of these markers and all below them, repeated until none is left.

    Stopped first, killed then: a killed parent would let go of children whose environment shows no marker.
    """
    killed: dict[tuple[int, str], str] = {}
    deadline = time.monotonic() + seconds
    while list(marked_processes(idents)):
        stopped: dict[tuple[int, str], str] = {}
        while fresh := _trees(idents).items() - stopped.items():
            for process, _ident in fresh:
                _signal(*process, signal.SIGSTOP)
            stopped.update(fresh)
        for process, ident in stopped.items():
            if _signal(*process, signal.SIGKILL):
                killed[process] = ident
        if time.monotonic() > deadline:
            raise SandboxError(f"processes of {sorted(set(stopped.values()))} do not end: {sorted(stopped)}")
        time.sleep(0.005)
    return [(ident, pid) for (pid, _start), ident in killed.items()]


def _trees(idents: set[str]) -> dict[tuple[int, str], str]:
    """(pid, start) -> sandbox of the processes with a marker and of all below them; never this process."""
    found: dict[tuple[int, str], str] = {}
    for ident, pid in list(marked_processes(idents)):
        for member in {pid, *descendants(pid)} - {os.getpid()}:
            if (start := start_time(member)) is not None:
                found[member, start] = ident
    return found


def _signal(pid: int, start: str, number: signal.Signals) -> bool:
    """Signal a process through a handle on it, so that a reused pid is never hit; False if it is gone."""
    if not LINUX:
        if start_time(pid) == start:
            os.kill(pid, number)
            return True
        return False
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if start_time(pid) != start:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def remove_dir(path: Path) -> None:
    """Remove a tree, also where a program inside took the owner's own permissions from a folder."""
    try:
        shutil.rmtree(path, onerror=_gone_is_fine)
    except PermissionError:
        os.chmod(path, 0o700)
        for folder, folders, _files in os.walk(path):
            for name in folders:
                inner = os.path.join(folder, name)
                if not os.path.islink(inner):
                    os.chmod(inner, 0o700)
        shutil.rmtree(path, onerror=_gone_is_fine)


def _gone_is_fine(_function: object, _name: str, error: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def owner_labels(record: SandboxRecord) -> dict[str, str]:
    """Container labels that say whose it is, should the record be lost."""
    return {LABEL: record.id, OWNER_LABEL: json.dumps(asdict(record.owner))}
