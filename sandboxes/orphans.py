"""Orphaned sandboxes: find and remove the sandboxes of dead owners, and never touch those of a living owner.

Each sandbox has a record, a small JSON file in the folder of the registry. The record is written before any part of the
sandbox starts, and removed after all parts of the sandbox. It identifies the owner by machine, boot, process namespace,
pid and start time. So a process that reuses the pid is not mistaken for the owner. An owner on another machine (shared
disk) or in another process namespace is not mistaken for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from sandboxes.base import SANDBOX_ID_VARIABLE, SandboxError
from sandboxes.remove_tree import remove_tree
from sandboxes.supervisor.shim import descendants

log = logging.getLogger(__name__)

LABEL = "polar.sandbox"
OWNER_LABEL = "polar.owner"
LINUX = sys.platform == "linux"
KILL_SECONDS = 30.0


@dataclass(frozen=True)
class RemovedItem:
    """One thing that `sweep` removed. `what`: process, container, directory, cgroup or record."""

    sandbox: str
    what: str
    detail: str


@dataclass
class SweepReport:
    """The work of one `sweep`: the removed items, and the ids of sandboxes that were not removed completely."""

    removed: list[RemovedItem] = field(default_factory=list)
    remaining: set[str] = field(default_factory=set)

    def add(self, sandbox: str, what: str, detail: str) -> None:
        self.removed.append(RemovedItem(sandbox, what, detail))

    def add_failure(self, sandbox: str, problem: str) -> None:
        log.warning("An orphaned sandbox could not be removed, the next sweep tries again: %s", problem)
        self.remaining.add(sandbox)


@dataclass(frozen=True)
class OwnerProcess:
    machine: str
    boot: str
    pid_namespace: str
    pid: int
    started: str

    @classmethod
    def me(cls) -> OwnerProcess:
        machine, boot, namespace = _this_machine()
        return cls(machine, boot, namespace, os.getpid(), start_time(os.getpid()) or "")

    def dead(self) -> bool:
        """Return True if the owner is certainly dead, and False if the owner lives or this process cannot know."""
        machine, boot, namespace = _this_machine()
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
def _this_machine() -> tuple[str, str, str]:
    """Return the ids of this machine, its current boot and this process's pid namespace."""
    if not LINUX:
        import platform

        return platform.node(), "", ""
    machine = Path("/etc/machine-id")
    name = machine.read_text().strip() if machine.exists() else ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return name or os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")


def start_time(pid: int) -> str | None:
    """Return when a process started, in the system's own units, or None if it does not exist or is a zombie."""
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
    """The processes, folders, control groups and container of one sandbox. `processes`: (pid, start time)."""

    id: str
    kind: str
    owner: OwnerProcess
    processes: list[tuple[int, str]] = field(default_factory=list)
    dirs: list[str] = field(default_factory=list)
    cgroups: list[str] = field(default_factory=list)
    container: str | None = None
    version: int = 1

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Self:
        """Return the record from its JSON. Raises ValueError, KeyError or TypeError if it is malformed."""
        if data["version"] != 1:
            raise ValueError("it was written by a newer version of Polar; run the clean-up with that version")
        processes = [(int(pid), start) for pid, start in data["processes"]]
        return cls(**{**data, "owner": OwnerProcess.parse(data["owner"]), "processes": processes})

    def add_processes(self, pids: list[int]) -> None:
        self.processes += [(pid, start) for pid in pids if (start := start_time(pid)) is not None]


class SandboxRegistry:
    """The records of sandboxes below `state_dir`. Blocking: call it from a thread."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir.absolute()
        self.records = self.state_dir / "records"

    def new_record(self, kind: str) -> SandboxRecord:
        """Return a record for a new sandbox of this process, without writing it."""
        return SandboxRecord(f"polar-{uuid.uuid4().hex[:16]}", kind, OwnerProcess.me())

    def write(self, record: SandboxRecord) -> None:
        self.records.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.records / f"{record.id}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record)))
        temporary.replace(path)

    def remove(self, sandbox_id: str) -> None:
        for suffix in ("json", "tmp"):
            (self.records / f"{sandbox_id}.{suffix}").unlink(missing_ok=True)

    def dead(self) -> list[SandboxRecord]:
        """Return the records whose owner is certainly dead."""
        return [record for record in self.all() if record.owner.dead()]

    def all(self) -> list[SandboxRecord]:
        found = []
        for path in sorted(self.records.glob("*.json")):
            try:
                found.append(SandboxRecord.parse(json.loads(path.read_text())))
            except FileNotFoundError:
                continue  # its owner closed it meanwhile
            except (ValueError, KeyError, TypeError) as error:
                log.warning("The record %s of a sandbox cannot be read and is left as it is: %s", path, error)
        return found


def default_state_dir() -> Path:
    """Return a private folder of this user in the system's temporary directory."""
    path = Path(tempfile.gettempdir()) / f"polar-sandboxes-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.getuid() or not stat.S_ISDIR(path.lstat().st_mode):
        raise SandboxError(f"{path} belongs to another user: give another state_dir")
    return path


async def sweep(state_dir: Path | None = None) -> list[RemovedItem]:
    """Remove the sandboxes of dead owners in this state directory, and all containers of dead owners.

    Return what was removed. If a sandbox cannot be removed, or its container engine does not answer, no error is
    raised. A warning in the log names the sandbox, and the sandbox stays registered for the next sweep.
    """
    if state_dir is None:
        state_dir = await asyncio.to_thread(default_state_dir)
    registry = SandboxRegistry(state_dir)
    records = await asyncio.to_thread(registry.dead)
    report = SweepReport()
    await asyncio.to_thread(_sweep_local, records, report)
    from sandboxes import docker_engine  # imported here, because it imports this module

    await docker_engine.sweep_containers(records, report)
    for record in records:
        if record.id not in report.remaining:
            await asyncio.to_thread(registry.remove, record.id)
            report.add(record.id, "record", f"owner {record.owner.pid}")
    return report.removed


def _sweep_local(records: list[SandboxRecord], report: SweepReport) -> None:
    for clean_up in (_kill_processes, _remove_folders):  # no process of any sandbox may still write into a folder
        for record in records:
            try:
                clean_up(record, report)
            except (OSError, SandboxError) as error:
                report.add_failure(record.id, f"{record.id}: {error}")


def _kill_processes(record: SandboxRecord, report: SweepReport) -> None:
    # The processes with the sandbox id first: without its supervisor a process tree is harder to find.
    for pid in kill_marked(record.id):
        report.add(record.id, "process", str(pid))
    for pid, start in record.processes:
        if _signal(pid, start, signal.SIGKILL):
            report.add(record.id, "process", str(pid))


def _remove_folders(record: SandboxRecord, report: SweepReport) -> None:
    from sandboxes import cgroups

    for name in record.cgroups:
        if Path(name).is_dir():
            cgroups.remove(Path(name))
            report.add(record.id, "cgroup", name)
    for name in record.dirs:
        if Path(name).exists():
            remove_tree(Path(name))
            report.add(record.id, "directory", name)


def marked_processes(sandbox_ids: set[str]) -> Iterator[tuple[str, int]]:
    """Yield (sandbox id, pid) of each process that has one of these ids in its environment. Zombies are left out."""
    if not LINUX:
        return
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (sandbox_id := _marker(int(entry))) in sandbox_ids:
            yield sandbox_id, int(entry)


def _marker(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""  # the process ended, or is another user's
    prefix = SANDBOX_ID_VARIABLE.encode() + b"="
    return next((v[len(prefix) :].decode(errors="replace") for v in variables if v.startswith(prefix)), "")


def describe_marked(sandbox_id: str) -> str:
    """Return pid, name and state of each process of this sandbox, such as `71 node (D)`, for an error message.

    State D: the process waits for the disk, and cannot be killed meanwhile.
    """
    described = []
    for _, pid in marked_processes({sandbox_id}):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
            described.append(f"{before.replace('(', '', 1)} ({after.split()[0]})")
    return ", ".join(described) or "none"


def kill_marked(sandbox_id: str) -> set[int]:
    """Kill every process with this sandbox id and all its descendants, until none is left. Return their pids.

    All are stopped before any is killed, because the children of a killed process are no longer its descendants, and
    their own environment may lack the id.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while any(marked_processes({sandbox_id})):
        stopped: set[tuple[int, str]] = set()
        while fresh := _tree(sandbox_id) - stopped:
            for pid, start in fresh:
                _signal(pid, start, signal.SIGSTOP)
            stopped |= fresh
        killed |= {pid for pid, start in stopped if _signal(pid, start, signal.SIGKILL)}
        if time.monotonic() > deadline:
            raise SandboxError(f"processes of {sandbox_id} could not be killed: {sorted(stopped)}")
        time.sleep(0.005)
    return killed


def _tree(sandbox_id: str) -> set[tuple[int, str]]:
    """Return (pid, start time) of the marked processes and their descendants, except this process."""
    marked = [pid for _, pid in marked_processes({sandbox_id})]
    members = {*marked, *descendants(*marked)} - {os.getpid()}
    return {(pid, start) for pid in members if (start := start_time(pid)) is not None}


def _signal(pid: int, start: str, number: signal.Signals) -> bool:
    """Signal a process through a handle, so that a reused pid is never signalled. Return False if the process has
    ended."""
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


def owner_labels(record: SandboxRecord) -> dict[str, str]:
    """Return container labels that identify the owner in case the record is lost."""
    return {LABEL: record.id, OWNER_LABEL: json.dumps(asdict(record.owner))}
