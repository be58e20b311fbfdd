"""`process`: ordinary processes with their own home. Works everywhere, isolates nothing.

`SupervisedSandbox` is also the base of `bubblewrap`. A supervisor (`sandboxes/supervisor`) starts, observes and ends
the programs; their output comes through pipes straight to this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import socket
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

from sandboxes import cgroups, disk, orphans
from sandboxes.base import (
    HTTPS_PORT,
    READ_LIMIT,
    SANDBOX_ID_VARIABLE,
    Command,
    ExecResult,
    FileTooLarge,
    ResourceLimits,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxSpec,
    uncancellable,
)
from sandboxes.control_link import ControlLink, OutputPipe, Reply
from sandboxes.tree import FolderTree, SandboxTree

DRAIN_SECONDS = 0.1
"""Maximum time in seconds to wait for the end of the output after the program ended. The program's own output is in the
pipe by then; the wait is for helpers that still flush (`> >(tee log)`). A command waits this long only if a background
process keeps the pipe open."""
END_SECONDS = 120.0
"""Time limit in seconds for ending a process. Even a process that waits for a slow disk needs far less. If a process
has not ended by then, it counts as unkillable, and the sandbox is closed."""

# Loads the supervisor package by itself, without `sandboxes/__init__` and its imports: it starts in half the time.
START = "import sys; sys.path.append(sys.argv[1]); from supervisor.server import main; sys.exit(main(sys.argv[2]))"

INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""Variables of the owner that a `process` sandbox passes on, because programs may not run without them. The owner's
keys, tokens, proxies and configuration are not passed on."""


class SupervisedSandbox(Sandbox):
    """Life cycle, commands and files of a supervised sandbox. A subclass prepares its folders and namespaces."""

    uid: int | None = None
    """The user that commands run as; None: the user that runs Polar."""
    system_call_filter: bytes = b""
    _disk_image: tuple[str, str] | None = None
    """The sandbox's own file system, whose size is the disk quota: the path of its image file, and the folder at which
    the supervisor mounts it. None if the sandbox has no file system of its own."""
    _disk_folder: int | None = None
    """File descriptor of the folder at which `_disk_image` is mounted. The file system is mounted for the supervisor
    alone, so no path leads to it."""

    def __init__(self, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> None:
        super().__init__(spec, registry)
        self._link: ControlLink | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: set[OutputPipe] = set()
        self._cgroup: cgroups.ControlGroup | None = None
        self._early_sockets: dict[int, int] = {}
        """Sockets that the supervisor bound at its start: port -> file descriptor. Later the supervisor has no right to
        bind these ports."""

    # ------------------------------------------------------------ life cycle

    @abstractmethod
    def _prepare(self) -> list[str] | None:
        """Make the sandbox's folders. Return the command line of bwrap; None for a sandbox that does not use bwrap.

        Called in a thread.
        """

    @property
    def _files(self) -> Path:
        """The folder of this machine that holds the sandbox's own folders."""
        return self.host_folder

    @property
    def _own_folders(self) -> dict[str, str]:
        """The sandbox's own folders: name below `_files` -> path inside."""
        further = {f"folder-{number}": folder for number, folder in enumerate(self.spec.folders)}
        return {"home": self.home, "workspace": self.workdir, **further}

    @property
    @abstractmethod
    def _watched_folders(self) -> list[Path]:
        """The folders that are measured for the disk quota, if the sandbox has no file system of its own."""

    @abstractmethod
    def _rlimits(self) -> dict[str, int]:
        """Return the limits of each process of a command: name in `resource` -> value."""

    async def _start(self) -> None:
        bwrap = await uncancellable(asyncio.to_thread(self._make))
        mine, theirs = socket.socketpair()
        try:
            self._link = ControlLink(mine)
            await uncancellable(asyncio.to_thread(self._spawn, theirs))
        finally:
            theirs.close()
        procs = self._cgroup.procs if self._cgroup else []
        ready, future = self._link.expect()
        identity = {"uid": self.uid, "filter": self.system_call_filter.hex()}
        ports = [HTTPS_PORT] if self.spec.hosts else []
        await self._link.send(
            {"id": ready, "bwrap": bwrap, "cgroup_procs": procs, "disk": self._disk_image, "ports": ports, **identity}
        )
        try:
            reply, fds = await future
        except SandboxEnded:
            log = await asyncio.to_thread((self.host_folder / "supervisor.log").read_text, errors="replace")
            raise SandboxError(f"the {self.kind} sandbox did not start: {log.strip()[-2000:]}") from None
        assert self._process is not None
        pids = [self._process.pid] + ([reply["bwrap_pid"]] if reply["bwrap_pid"] else [])
        self._record.add_processes(pids)
        await uncancellable(asyncio.to_thread(self._registry.write, self._record))
        self._disk_folder = fds[0] if reply["disk"] else None
        self._early_sockets = dict(zip(ports, fds[1:] if reply["disk"] else fds, strict=True))
        if self._disk_folder is None:
            watching = disk.watch(self.id, self._disk_usage, self.spec.limits, self._stop_programs)
            self._disk_watch = asyncio.create_task(watching)

    async def _disk_usage(self) -> disk.DiskUsage:
        return await asyncio.to_thread(disk.measure, self._watched_folders, self.spec.limits)

    def _make(self) -> list[str] | None:
        self._registry.write(self._record)
        self.host_folder.mkdir(mode=0o700)
        return self._prepare()

    def _spawn(self, control: socket.socket) -> None:
        folder = str(Path(__file__).parent)
        with (self.host_folder / "supervisor.log").open("wb") as log:
            # Assigned here and not returned, because a cancelled caller would lose the process.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", START, folder, str(control.fileno())],
                pass_fds=[control.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env={"PATH": os.defpath, SANDBOX_ID_VARIABLE: self.id},
                start_new_session=True,
            )

    async def _end(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            await asyncio.to_thread(_end_process, self._process)
        for pipe in tuple(self._pipes):
            pipe.close()
        while self._early_sockets:
            os.close(self._early_sockets.popitem()[1])
        if self._disk_folder is not None:
            os.close(self._disk_folder)
            self._disk_folder = None
        await asyncio.to_thread(self._end_remains)

    def _end_remains(self) -> None:
        # Processes that outlived the supervisor, for example because it had to be killed, are found by the sandbox id.
        orphans.kill_marked(self.id)
        if self._cgroup is not None:
            self._cgroup.remove()

    # ------------------------------------------------------------ commands

    async def _exec(self, command: Command) -> ExecResult:
        link = self._require_open(self._link)
        message = {
            "op": "exec",
            "argv": command.argv,
            "env": command.env,
            "cwd": command.cwd,
            "rlimits": self._rlimits(),
        }
        source = await _stdin_file(command.stdin)
        command_id, done = link.expect()
        callback_failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        out, err = (OutputPipe(command.output_limit, callback_failed, command.on_output) for _ in range(2))
        self._pipes |= {out, err}
        start = time.monotonic()
        try:
            # Sent even if cancelled meanwhile, so that the id of a started command is known and it can be killed.
            await uncancellable(link.send({"id": command_id, **message}, [source, out.writer, err.writer]))
            for pipe in (out, err):
                pipe.close_writer()
            either: set[asyncio.Future[Any]] = {done, callback_failed}
            await asyncio.wait(either, timeout=command.timeout, return_when=asyncio.FIRST_COMPLETED)
            if callback_failed.done():
                callback_failed.result()  # raises the callback's error; the command is killed below
            timed_out = not done.done()
            if timed_out:
                await uncancellable(self._kill(link, command_id, done))
            reply, _ = done.result()
            seconds = time.monotonic() - start
            await _wait_for_output(out, err)
            if callback_failed.done():
                callback_failed.result()
            if reply.get("note"):
                err.tail.add(f"{reply['note']}\n".encode())
            truncated = out.tail.truncated or err.tail.truncated
            return ExecResult(reply.get("exit", 137), out.tail.value(), err.tail.value(), timed_out, seconds, truncated)
        except BaseException as error:
            if not done.done() and not link.ended.is_set():
                try:
                    await uncancellable(self._kill(link, command_id, done))
                except SandboxError as failed:
                    error.add_note(f"and the command could not be ended: {failed}")
            raise
        finally:
            os.close(source)
            done.cancel()
            callback_failed.cancel()
            for pipe in (out, err):
                pipe.close_writer()
                pipe.discard()
            self._pipes = {pipe for pipe in self._pipes if not pipe.ended.is_set()}

    async def _kill(self, link: ControlLink, command_id: int, done: asyncio.Future[Reply]) -> None:
        """End a command's process tree and wait for its end. End the sandbox if a process resists."""
        await link.call(op="kill", target=command_id)
        await asyncio.wait({done}, timeout=END_SECONDS)
        if not done.done():
            await self._end_unkillable(link, "a command")

    async def kill_all(self) -> None:
        link = self._require_open(self._link)
        try:
            await link.call(op="kill", target=None)
            deadline = time.monotonic() + END_SECONDS
            while (await self._require_open(self._link).call(op="running"))[0]["running"]:
                if time.monotonic() > deadline:
                    return await self._end_unkillable(link, "a process")
                await asyncio.sleep(0.005)
        except SandboxEnded:
            if not link.ended_by_programs:  # in that case no process is left
                raise

    async def _end_unkillable(self, link: ControlLink, what: str) -> None:
        """End the processes of a sandbox in which a process could not be killed.

        In bubblewrap without root, programs can stop the processes that should kill them. Such a sandbox counts as
        ended by its programs, and stays open, so that its files can still be read. Any other sandbox is closed, and
        SandboxEnded is raised with the names of the processes that are left.
        """
        if (await link.call(op="end"))[0]["ended"]:
            return
        left = await asyncio.to_thread(orphans.describe_marked, self.id)
        await self.close()
        raise SandboxEnded(f"{what} could not be killed, so the sandbox was closed (processes left: {left})")

    # ------------------------------------------------------------ files

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        _, fds = await self._require_open(self._link).call(op="open", path=self.path(path), write=True, mode=mode)
        await uncancellable(asyncio.to_thread(_write_fd, fds[0], data))

    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        _, fds = await self._require_open(self._link).call(op="open", path=self.path(path), write=False)
        return await uncancellable(asyncio.to_thread(_read_fd, fds[0], limit, path))

    async def read_tree(self, path: str | None = None) -> SandboxTree:
        await self.kill_all()
        return await asyncio.to_thread(FolderTree, self._folder_on_host(path or self.workdir))

    def _folder_on_host(self, path: str) -> Path:
        """Return the folder of this machine that is visible inside at `path`."""
        # Of two folders at the same path, the later one is visible.
        names = {posixpath.normpath(inside): name for name, inside in self._own_folders.items()}
        name = names.get(posixpath.normpath(path))
        if name is None:
            raise SandboxError(f"{path} is not one of the sandbox's own folders, so it cannot be read from outside")
        files = self._files if self._disk_folder is None else Path(f"/proc/self/fd/{self._disk_folder}")
        return files / name


class ProcessSandbox(SupervisedSandbox):
    kind = "process"

    def __init__(self, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> None:
        super().__init__(spec, registry)
        self.home = str(self.host_folder / "home")
        self.workdir = str(self.host_folder / "workspace")
        inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        self.base_env = {"PATH": os.defpath, "TERM": "dumb", "TMPDIR": str(self.host_folder / "tmp"), **inherited}
        limits = spec.limits
        if limits.cpus is not None:
            self.unenforced += ("cpus: the limit needs control groups; use bubblewrap or docker",)
        if limits.pids is not None:
            self.unenforced += ("pids: the system counts a user's processes, not a sandbox's",)
        if limits.memory_mb is not None:
            self.unenforced += ("memory_mb: the limit holds for each process, not for the sum of all",)

    def _prepare(self) -> None:
        if own := (*self.spec.folders, *([self.spec.workdir] if self.spec.workdir else [])):
            raise SandboxError(
                f"a process sandbox has no file system of its own, so it cannot have its own {own[-1]}; "
                "use bubblewrap or docker"
            )
        if self.spec.hosts:
            raise SandboxError(
                f"a process sandbox uses the host's name resolution, so {self.spec.hosts[0]} cannot be given another "
                "address; use bubblewrap or docker"
            )
        for mount in self.spec.mounts:
            if posixpath.normpath(mount.target) != str(mount.source.absolute()):
                raise SandboxError(
                    f"a process sandbox has no file system of its own: {mount.source} cannot appear at {mount.target}; "
                    "mount it at its own path, or use bubblewrap or docker"
                )
        if self.spec.mounts:
            self.unenforced += ("read-only mounts: files are as writable as they are for this user",)
        for name in ("home", "workspace", "tmp"):
            (self.host_folder / name).mkdir(mode=0o700)

    @property
    def _watched_folders(self) -> list[Path]:
        return [self.host_folder / name for name in ("home", "workspace", "tmp")]

    def _rlimits(self) -> dict[str, int]:
        return process_limits(self.spec.limits)

    async def listen(self, port: int = 0) -> socket.socket | None:
        self._require_open(self._link)
        return None


def process_limits(limits: ResourceLimits) -> dict[str, int]:
    """Return the limits of each process: memory, file size, open files. No file may be larger than the disk quota.

    Memory is limited by RLIMIT_DATA and not by RLIMIT_AS, because Node and Go reserve far more addresses than they ever
    touch.
    """
    found = {"RLIMIT_CORE": 0}
    if limits.memory_mb is not None:
        found["RLIMIT_DATA"] = limits.memory_mb << 20
    sizes = [size for size in (limits.file_mb, limits.disk_mb) if size is not None]
    if sizes:
        found["RLIMIT_FSIZE"] = min(sizes) << 20
    if limits.open_files is not None:
        found["RLIMIT_NOFILE"] = limits.open_files
    return found


async def _wait_for_output(*pipes: OutputPipe) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            for pipe in pipes:
                await pipe.ended.wait()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _stdin_file(data: bytes) -> int:
    """Return the program's stdin as an unlinked file, which the program reads to its end without help from this
    process."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY)
    with tempfile.TemporaryFile() as file:
        await uncancellable(asyncio.to_thread(file.write, data))
        file.seek(0)
        return os.dup(file.fileno())


def _write_fd(fd: int, data: bytes) -> None:
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def _read_fd(fd: int, limit: int, path: str) -> bytes:
    with os.fdopen(fd, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise FileTooLarge(f"{path} is larger than {limit} bytes")
    return data
