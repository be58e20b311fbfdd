"""The contract of a sandbox: an empty place in which a program can be run, watched and ended.

Promises that every kind keeps, and that `tests/sandboxes/test_sandbox_contract.py` checks for each of them:

* `home` and `workdir` are empty, writable and belong to this sandbox alone.
* Nothing of the owner's environment gets in, except what the specification gives.
* All commands of one sandbox see the same files and the same network.
* The exit status is the program's own: `128 + n` after signal n, 127 if the program was not found, 126 if it could not
  be started, with the reason on stderr.
* A command that runs out of time, or whose task is cancelled, is ended at once together with everything that it
  started; before that is done the sandbox runs no other. What a command leaves running after a normal end stays until
  `kill_all` or `close`, as with `docker exec`.
* Output is bounded: the tail is kept, and `truncated` says so.
* After `close` nothing is left. After `kill -9` of the owner nothing is left once `orphans.sweep` has run.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import socket
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar

SandboxKind = Literal["docker", "bubblewrap", "process"]
OutputCallback = Callable[[bytes], None]

OUTPUT_LIMIT = 4 << 20
READ_LIMIT = 64 << 20
SANDBOX_ID_VARIABLE = "POLAR_SANDBOX_ID"
"""Environment variable that every process of a sandbox is started with; `orphans` finds strays by it."""

T = TypeVar("T")


class SandboxError(Exception):
    """A sandbox could not do what was asked; the text says why and what helps."""


class SandboxUnavailable(SandboxError):
    """This kind of sandbox cannot be used on this machine now."""


class SandboxEnded(SandboxError):
    """The sandbox went away while it was in use (closed, killed, or the program inside killed its init process)."""


class FileTooLarge(SandboxError):
    """A file inside is larger than the reader is willing to take."""


@dataclass(frozen=True)
class Mount:
    """A host file or folder that appears inside at `target` (absolute)."""

    source: Path
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class ResourceLimits:
    """Upper bounds of one sandbox; None is no bound. `Sandbox.unenforced` names those that a kind cannot hold.

    `file_mb` is the size of any one file. Memory includes what lies in /tmp where that is in memory (bubblewrap).
    """

    memory_mb: int | None = 4096
    cpus: float | None = None
    pids: int | None = 1024
    file_mb: int | None = None


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is made of. `image` is for docker alone; None is the default image of `sandboxes/images`."""

    image: str | None = None
    mounts: tuple[Mount, ...] = ()
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    """Absolute path of the working folder; None: the kind's own. In docker: the image's folder, with what it holds."""
    folders: tuple[str, ...] = ()
    """Further empty, writable folders, absolute."""

    def check(self) -> None:
        """Raise `SandboxError` for a mount or folder that cannot work, before anything is started."""
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
    """How a command ended. `truncated`: stdout or stderr was longer than the limit and only its tail is here."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    seconds: float
    truncated: bool = False


class OutputTail:
    """Collects bytes and keeps the last `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self.truncated = False

    def add(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        while self._size > self._limit:
            self.truncated = True
            excess = self._size - self._limit
            first = self._chunks.popleft()
            if len(first) > excess:
                self._chunks.appendleft(first[excess:])
                self._size -= excess
            else:
                self._size -= len(first)

    def value(self) -> bytes:
        return b"".join(self._chunks)


async def uncancellable(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    For clean-up that must not stop half-way: killing, removing, unregistering.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})  # unlike `await task`, neither hands the cancellation on nor raises its error
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


def new_sandbox_id() -> str:
    return f"polar-{uuid.uuid4().hex[:16]}"


def check_tree_paths(files: Mapping[str, bytes]) -> None:
    """Refuse keys of `write_tree` which leave its root: they come from task data."""
    for name in files:
        if posixpath.isabs(name) or ".." in name.split("/") or posixpath.normpath(name) == ".":
            raise ValueError(f"write_tree: {name!r} is not a relative path below the root")


class Sandbox(ABC):
    """One open sandbox. Made by `open_sandbox`; closed by `close` or by leaving `async with`."""

    kind: ClassVar[SandboxKind]
    isolation: str
    """One honest sentence: what is kept apart and what is not."""
    unenforced: tuple[str, ...]
    """The limits asked for that this sandbox cannot hold, each with the reason."""
    id: str
    home: str
    workdir: str

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """End everything inside and remove it. Idempotent; completes even when cancelled."""

    @abstractmethod
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

        `env` is added to the sandbox's own; `cwd` is absolute or relative to `workdir`; `timeout` in seconds.
        `on_output` gets the bytes of stdout and stderr as they come, in the event loop: it has to be quick. An error
        that it raises ends the command and comes out here. `output_limit` bounds stdout and stderr each.
        Raises `SandboxEnded` if the sandbox goes away meanwhile.
        """

    @abstractmethod
    async def kill_all(self) -> None:
        """End every process that commands have started, background ones too; files stay.

        For the moment between the end of an agent and the reading of what it left.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file; missing folders are made. The path is resolved inside the sandbox, links included."""

    @abstractmethod
    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        """Read a regular file; the path is resolved inside the sandbox, links included.

        Raises `FileNotFoundError`, `IsADirectoryError`, or `FileTooLarge` beyond `limit` bytes.
        """

    async def write_tree(self, files: Mapping[str, bytes], root: str | None = None) -> None:
        """Write many files below `root` (`workdir` if None). Raises ValueError for a name that leaves the root."""
        check_tree_paths(files)
        for name, data in files.items():
            await self.write(posixpath.join(root or self.workdir, name), data)

    @abstractmethod
    async def listen(self, port: int = 0) -> socket.socket | None:
        """A listening TCP socket on 127.0.0.1 *of the sandbox's network*, on which this process accepts.

        None when the sandbox shares the host's network: bind an ordinary socket then. The caller closes it.
        """

    def path(self, path: str) -> str:
        """Absolute form of a path inside."""
        return posixpath.join(self.workdir, path)


def command_environment(base: Mapping[str, str], sandbox: Sandbox, *more: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a command: the kind's base, home, then what specification and call give, then the marker."""
    env = {**base, "HOME": sandbox.home}
    for extra in more:
        env.update(extra or {})
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise SandboxError(f"not an environment variable: {name!r}")
    return {**env, SANDBOX_ID_VARIABLE: sandbox.id}


def check_argv(argv: Sequence[str]) -> list[str]:
    """The arguments as a list; a bare string is refused, for it would run its first letter."""
    if isinstance(argv, str) or not argv:
        raise ValueError("argv is a non-empty sequence of strings")
    args = [os.fspath(a) for a in argv]
    if any("\0" in a for a in args):
        raise ValueError("argv must not contain a NUL byte")
    return args
