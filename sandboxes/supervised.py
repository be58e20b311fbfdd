"""What `process` and `bubblewrap` share: the owner's side of `supervisor.py`.

Output comes through pipes straight from the program to this process; the supervisor only starts, watches and ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sandboxes.base import (
    OUTPUT_LIMIT,
    READ_LIMIT,
    ExecResult,
    FileTooLarge,
    OutputCallback,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxSpec,
    check_argv,
    command_environment,
    new_sandbox_id,
    uncancellable,
)
from sandboxes.control_link import ControlLink, OutputPipe, Reply

from . import cgroups, orphans

# After the program's end its own output is in the pipe already; this is for helpers that still flush
# (`> >(tee log)`). Only a background process that holds the pipe open makes a command wait this long.
DRAIN_SECONDS = 0.1
# Far more than any end takes, also on a busy machine: what lasts longer cannot be killed, and costs the sandbox.
END_SECONDS = 30.0

# The supervisor package by itself, without this one's face and what that imports: it starts in half the time.
START = "import sys; sys.path.append(sys.argv[1]); from supervisor.server import main; sys.exit(main(sys.argv[2]))"


class SupervisedSandbox(Sandbox):
    """Life cycle, commands and files; a subclass says what to start and what the inside looks like."""

    base_env: dict[str, str]

    def __init__(self, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> None:
        self.id = new_sandbox_id()
        self.spec = spec
        self._registry = registry
        self._link: ControlLink | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: set[OutputPipe] = set()
        self._record = orphans.SandboxRecord.mine(self.id, self.kind)
        self._cgroup: cgroups.ControlGroup | None = None
        self._closing: asyncio.Task[None] | None = None
        self.unenforced = ()
        self.base = registry.state_dir / self.id

    # ------------------------------------------------------------ life

    @classmethod
    async def open(cls, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> Self:
        spec.check()
        self = cls(spec, registry)
        try:
            await self._start()
        except BaseException:
            await uncancellable(self.close())
            raise
        return self

    @abstractmethod
    def _prepare(self) -> list[str] | None:
        """Make the folders (in a thread); the bwrap command line, or None."""

    @abstractmethod
    def _rlimits(self) -> dict[str, int]:
        """Per-process limits of every command: name in `resource` -> value."""

    async def _start(self) -> None:
        self._record.dirs.append(str(self.base))
        bwrap = await uncancellable(asyncio.to_thread(self._make))
        mine, theirs = socket.socketpair()
        try:
            self._link = ControlLink(mine)
            await uncancellable(asyncio.to_thread(self._spawn, theirs))
        finally:
            theirs.close()
        procs = self._cgroup.procs if self._cgroup else []
        ready, future = self._link.expect()
        await self._link.send({"id": ready, "bwrap": bwrap, "cgroup_procs": procs})
        try:
            reply, _ = await future
        except SandboxEnded:
            log = await asyncio.to_thread((self.base / "supervisor.log").read_text, errors="replace")
            raise SandboxError(f"the {self.kind} sandbox did not start: {log.strip()[-2000:]}") from None
        assert self._process is not None
        pids = [self._process.pid] + ([reply["init"]] if reply["init"] else [])
        self._record.add_processes(pids)
        await uncancellable(asyncio.to_thread(self._registry.write, self._record))

    def _make(self) -> list[str] | None:
        self._registry.write(self._record)
        self.base.mkdir(mode=0o700)
        return self._prepare()

    def _spawn(self, control: socket.socket) -> None:
        folder = str(Path(__file__).parent)
        with (self.base / "supervisor.log").open("wb") as log:
            # Kept here and not returned: a cancelled caller would lose it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", START, folder, str(control.fileno())],
                pass_fds=[control.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env={"PATH": os.defpath, "POLAR_SANDBOX_ID": self.id},
                start_new_session=True,
            )

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await uncancellable(_join(self._closing))

    async def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            await asyncio.to_thread(_end_process, self._process)
        for pipe in tuple(self._pipes):
            pipe.close()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        # A supervisor that had to be killed, or a program inside that outlived it: found by the marker.
        orphans.kill_marked({self.id})
        if self._cgroup is not None:
            self._cgroup.remove()
        orphans.remove_dir(self.base)
        self._registry.remove(self.id)

    def _live(self) -> ControlLink:
        if self._link is None or self._closing is not None:
            raise SandboxEnded("the sandbox is closed")
        return self._link

    # ------------------------------------------------------------ commands

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
        link = self._live()
        message = {
            "op": "exec",
            "argv": check_argv(argv),
            "env": command_environment(self.base_env, self, self.spec.env, env),
            "cwd": self.path(cwd or self.workdir),
            "rlimits": self._rlimits(),
        }
        source = await _stdin_file(stdin)
        ident, done = link.expect()
        broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        out, err = (OutputPipe(output_limit, broken, on_output) for _ in range(2))
        self._pipes |= {out, err}
        start = time.monotonic()
        try:
            # Sent for certain, even if cancelled meanwhile: so it is known that there is something to kill.
            await uncancellable(link.send({"id": ident, **message}, [source, out.writer, err.writer]))
            for pipe in (out, err):
                pipe.close_writer()
            either: set[asyncio.Future[Any]] = {done, broken}
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()  # raises the callback's error; the command is killed below
            timed_out = not done.done()
            if timed_out:
                await uncancellable(self._kill(link, ident, done))
            reply, _ = done.result()
            seconds = time.monotonic() - start
            waits = [asyncio.ensure_future(pipe.ended.wait()) for pipe in (out, err)]
            await asyncio.wait(waits, timeout=DRAIN_SECONDS)
            for wait in waits:
                wait.cancel()
            if broken.done():
                broken.result()
            if reply.get("note"):
                err.tail.add(f"{reply['note']}\n".encode())
            truncated = out.tail.truncated or err.tail.truncated
            return ExecResult(reply.get("exit", 137), out.tail.value(), err.tail.value(), timed_out, seconds, truncated)
        except BaseException as error:
            if not done.done() and not link.ended.is_set():
                try:
                    await uncancellable(self._kill(link, ident, done))
                except SandboxError as failed:
                    error.add_note(f"and the command could not be ended: {failed}")
            raise
        finally:
            os.close(source)
            done.cancel()
            broken.cancel()
            for pipe in (out, err):
                pipe.close_writer()
                pipe.discard()
            self._pipes = {p for p in self._pipes if not p.ended.is_set()}

    async def _kill(self, link: ControlLink, ident: int, done: asyncio.Future[Reply]) -> None:
        """End a command's tree and wait for its end; whatever resists takes the sandbox with it."""
        await link.call(op="kill", target=ident)
        await asyncio.wait({done}, timeout=END_SECONDS)
        if not done.done():
            await self.close()
            raise SandboxEnded("a command could not be killed, so the sandbox was closed")

    async def kill_all(self) -> None:
        await self._live().call(op="kill", target=None)
        deadline = time.monotonic() + END_SECONDS
        while (await self._live().call(op="running"))[0]["running"]:
            if time.monotonic() > deadline:
                await self.close()
                raise SandboxEnded("a process could not be killed, so the sandbox was closed")
            await asyncio.sleep(0.005)

    # ------------------------------------------------------------ files and network

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        _, fds = await self._live().call(op="open", path=self.path(path), write=True, mode=mode)
        await uncancellable(asyncio.to_thread(_write_fd, fds[0], data))

    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        _, fds = await self._live().call(op="open", path=self.path(path), write=False)
        return await uncancellable(asyncio.to_thread(_read_fd, fds[0], limit, path))


async def _join(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _stdin_file(data: bytes) -> int:
    """The program's stdin as an unlinked file: end of file comes by itself, and nothing has to be pumped."""
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
