"""The contract of a sandbox: an empty environment in which a program is run, observed and ended.

The owner of a sandbox is the process that opened it. Every kind of sandbox keeps these promises, which
`tests/sandboxes/test_sandbox_contract.py` checks:

* `home` and `workdir` are empty, writable and belong to this sandbox alone. In docker, a `workdir` that the
  specification names is a folder of the image, with its files.
* No environment variable of the owner is visible inside, except those that the specification gives and, in a `process`
  sandbox, a few that every program needs, such as PATH.
* All commands of one sandbox see the same files and the same network.
* The exit status is the program's own, or `128 + n` after signal n. It is 127 if the program was not found, and 126 if
  the program could not be started for another reason. In both cases stderr has the reason.
* A command that times out, or whose task is cancelled, is ended at once together with all processes that it started;
  the sandbox runs no other command before they have ended. Processes that a command leaves running after a normal end
  stay until `kill_all` or `close`, as with `docker exec`.
* Output is limited. If it is longer, only its tail is kept, and `truncated` is set.
* `close` removes everything. If the owner was killed (`kill -9`), `orphans.sweep` removes everything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import posixpath
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from sandboxes.remove_tree import remove_tree
from sandboxes.tree import SandboxTree

if TYPE_CHECKING:
    from sandboxes.orphans import SandboxRegistry

log = logging.getLogger(__name__)

SandboxKind = Literal["docker", "bubblewrap", "process"]
DockerRuntime = Literal["auto", "runc", "runsc"]
OutputCallback = Callable[[bytes], None]

HTTPS_PORT = 443
OUTPUT_LIMIT = 4 << 20
READ_LIMIT = 64 << 20
SANDBOX_ID_VARIABLE = "POLAR_SANDBOX_ID"
"""Environment variable that every process of a sandbox is started with. `orphans` finds stray processes by it."""

T = TypeVar("T")


class SandboxError(Exception):
    """A sandbox operation failed. The text gives the reason and the remedy."""


class SandboxUnavailable(SandboxError):
    """This kind of sandbox is not available on this machine now."""


class SandboxEnded(SandboxError):
    """The sandbox has ended: it was closed, killed, or ended by programs inside it."""


class FileTooLarge(SandboxError):
    """A file in the sandbox is larger than the limit that `read` was given."""


@dataclass(frozen=True)
class Mount:
    """A host file or folder that appears inside, read-only, at `target` (absolute)."""

    source: Path
    target: str


@dataclass(frozen=True)
class ResourceLimits:
    """Upper bounds of one sandbox; None means no bound. `Sandbox.unenforced` lists the bounds that a kind cannot
    enforce.

    `file_mb` bounds the size of each file, and `open_files` the number of open descriptors of each process. `disk_mb`
    and `files` bound the total size and the number of the files in the home, the working folder and all further folders
    together (see `disk`). Memory includes files in /tmp if /tmp is in memory (bubblewrap).
    """

    memory_mb: int | None = 4096
    cpus: float | None = None
    pids: int | None = 1024
    file_mb: int | None = None
    disk_mb: int | None = 8192
    files: int | None = 500_000
    open_files: int | None = 16_384


@dataclass(frozen=True)
class SandboxSpec:
    """The specification of a sandbox. `image` is for docker only; None is the default image of `sandboxes/images`."""

    image: str | None = None
    runtime: DockerRuntime = "auto"
    """Runtime of the Docker engine; auto takes gVisor's `runsc` if the engine has it."""
    mounts: tuple[Mount, ...] = ()
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    """Absolute path of the working folder. None: the default of the kind, an empty folder. In docker, a path given here
    is a folder of the image, with the image's files."""
    folders: tuple[str, ...] = ()
    """Further empty, writable folders, absolute."""
    hosts: tuple[str, ...] = ()
    """Names that resolve to 127.0.0.1 inside. If there are any, `listen` can also use port HTTPS_PORT."""

    def check(self) -> None:
        """Raise `SandboxError` if a folder or mount is invalid, or a mount's source is missing. Starts nothing."""
        for folder in (*self.folders, *([self.workdir] if self.workdir else [])):
            if not posixpath.isabs(folder) or posixpath.normpath(folder) == "/":
                raise SandboxError(f"a folder of a sandbox must be absolute and not /: {folder!r}")
        for mount in self.mounts:
            if not mount.source.exists():
                raise SandboxError(f"cannot mount {mount.source}: it does not exist")
            if not posixpath.isabs(mount.target) or posixpath.normpath(mount.target) == "/":
                raise SandboxError(f"cannot mount at {mount.target!r}: the target must be absolute and not /")


@dataclass(frozen=True)
class ExecResult:
    """The result of a command. `truncated`: stdout or stderr was longer than the limit, and only its tail was kept."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    seconds: float
    truncated: bool = False


@dataclass(frozen=True)
class Command:
    """A command as a sandbox runs it: `env` is its whole environment, `cwd` is absolute."""

    argv: list[str]
    env: Mapping[str, str]
    cwd: str
    timeout: float | None
    stdin: bytes
    on_output: OutputCallback | None
    output_limit: int


class OutputTail:
    """Collects bytes and keeps the last `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.truncated = False

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > self._limit:
            self.truncated = True
            del self._kept[: len(self._kept) - self._limit]

    def value(self) -> bytes:
        return bytes(self._kept)


async def uncancellable(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled meanwhile, and raise the cancellation afterwards.

    For clean-up that must not stop half-way: killing, removing, unregistering.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})  # unlike `await task`, this neither cancels the task nor raises its error
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


class Sandbox(ABC):
    """One open sandbox. `open_sandbox` opens it; `close`, or the end of the `async with` block, removes it.

    As long as anything of the sandbox exists on this machine, the registry has a record of the sandbox.
    """

    kind: ClassVar[SandboxKind]
    exceeded: str | None = None
    """Why the programs inside were stopped, if their files exceeded the disk quota; else None. The files stay, and new
    commands can run."""
    unenforced: tuple[str, ...] = ()
    """The requested limits that this sandbox cannot enforce, each with the reason."""
    base_env: Mapping[str, str] = {}
    """Default environment of every command. Variables of the specification replace those of the same name."""
    home: str
    workdir: str

    def __init__(self, spec: SandboxSpec, registry: SandboxRegistry) -> None:
        self.spec = spec
        self._registry = registry
        self._record = registry.new_record(self.kind)
        self.id = self._record.id
        self.host_folder = registry.state_dir / self.id
        """A folder on the host for the sandbox's files, removed with the sandbox. Programs inside see it only in a
        `process` sandbox."""
        self._record.dirs.append(str(self.host_folder))
        self._closing: asyncio.Task[None] | None = None
        self._disk_watch: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life cycle

    @classmethod
    async def open(cls, spec: SandboxSpec, registry: SandboxRegistry) -> Self:
        """Open a sandbox. If that fails or is cancelled, remove the parts that were made."""
        spec.check()
        sandbox = cls(spec, registry)
        try:
            await sandbox._start()
        except BaseException:
            await uncancellable(sandbox.close())
            raise
        return sandbox

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all processes inside and remove the sandbox. Idempotent; completes even if cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._end_and_unregister())
        await uncancellable(_wait(self._closing))

    async def _end_and_unregister(self) -> None:
        if self._disk_watch is not None:
            self._disk_watch.cancel()
            await asyncio.wait({self._disk_watch})
        await self._end()
        await asyncio.to_thread(self._unregister)

    def _unregister(self) -> None:
        try:
            remove_tree(self.host_folder)
        except OSError as error:
            # Files that an agent left must not fail the caller. The record stays, and the next sweep tries again.
            log.warning("The folder of sandbox %s cannot be removed: %s", self.id, error)
        else:
            self._registry.remove(self.id)

    async def _stop_programs(self, reason: str) -> None:
        self.exceeded = f"the sandbox was stopped: {reason}"
        await self.kill_all()

    def _require_open(self, handle: T | None) -> T:
        """Return the handle of the running sandbox. Raise `SandboxEnded` if it is closed."""
        if handle is None or self._closing is not None:
            raise SandboxEnded("the sandbox is closed")
        return handle

    @abstractmethod
    async def _start(self) -> None:
        """Register the sandbox, then make it ready for commands."""

    @abstractmethod
    async def _end(self) -> None:
        """End every process of the sandbox, then remove the sandbox. Called once, also after a failed `_start`."""

    # ------------------------------------------------------------ use

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        stdin: bytes = b"",
        on_output: OutputCallback | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a program (no shell) and wait for its end.

        `env` is added to the sandbox's own; `cwd` is absolute or relative to `workdir`; `timeout` is in seconds.
        `on_output` gets the bytes of stdout and stderr as they arrive. It is called in the event loop, so it must be
        quick. If it raises an error, the command is ended and `exec` raises the error. `output_limit` bounds stdout and
        stderr each. Raise `SandboxEnded` if the sandbox ends meanwhile.
        """
        if isinstance(argv, str) or not argv:  # a plain string is refused, because its first letter would be run
            raise ValueError("argv must be a non-empty sequence of strings")
        args = [os.fspath(one) for one in argv]
        if any("\0" in one for one in args):
            raise ValueError("argv must not contain a NUL byte")
        variables = {**self.base_env, "HOME": self.home, **self.spec.env, **(env or {})}
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                raise SandboxError(f"environment variable {name!r}: the name is invalid, or the value has a NUL byte")
        variables[SANDBOX_ID_VARIABLE] = self.id
        where = self.path(cwd or self.workdir)
        return await self._exec(Command(args, variables, where, timeout, stdin, on_output, output_limit))

    @abstractmethod
    async def _exec(self, command: Command) -> ExecResult:
        """Run a checked command, as `exec` promises."""

    @abstractmethod
    async def kill_all(self) -> None:
        """End every process that commands have started, background ones too. Files stay.

        Call it after an agent has ended and before its files are read.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file and make missing folders. The path is resolved inside the sandbox, links included."""

    @abstractmethod
    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        """Read a regular file. The path is resolved inside the sandbox, links included.

        Raise `FileNotFoundError` if there is no such file, `IsADirectoryError` if it is a folder, `FileTooLarge` if it
        has more than `limit` bytes.
        """

    @abstractmethod
    async def read_tree(self, path: str | None = None) -> SandboxTree:
        """End the sandbox's processes and return the files below `path` (`workdir` if None).

        The files are read from outside, without any program inside the sandbox. The caller closes the tree. Run no more
        commands in the sandbox afterwards: in docker, for example, the container has ended.

        Raise `SandboxError` for a folder that this kind cannot read from outside (`workdir`, `home` and the folders of
        the specification always work). Raise `TreeTooLarge` if the files exceed a limit of `sandboxes.tree`.
        """

    async def write_tree(self, files: Mapping[str, bytes], root: str | None = None) -> None:
        """Write many files below `root` (`workdir` if None). Raise ValueError for a name that leaves the root."""
        check_tree_paths(files)
        for name, data in files.items():
            await self.write(posixpath.join(root or self.workdir, name), data)

    @abstractmethod
    async def listen(self, port: int = 0) -> socket.socket | None:
        """Return a TCP socket that listens on 127.0.0.1 *of the sandbox's network*, so that this process can accept
        connections from inside.

        Return None if the sandbox shares the host's network: bind an ordinary socket then. The caller closes the
        socket.
        """

    def path(self, path: str) -> str:
        return posixpath.join(self.workdir, path)


def check_tree_paths(files: Mapping[str, bytes]) -> None:
    """Raise ValueError for a name that leads out of the root of `write_tree`, because the names come from task data."""
    for name in files:
        if posixpath.isabs(name) or ".." in name.split("/") or posixpath.normpath(name) == ".":
            raise ValueError(f"write_tree: {name!r} is not a relative path below the root")


async def _wait(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)
