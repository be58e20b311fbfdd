"""`docker`: a container without a network, driven through the engine's API.

Inside nothing but a POSIX shell and the usual small tools is needed (see `docker_scripts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import socket
import tarfile
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from sandboxes.base import (
    OUTPUT_LIMIT,
    READ_LIMIT,
    SANDBOX_ID_VARIABLE,
    ExecResult,
    FileTooLarge,
    OutputCallback,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxSpec,
    check_argv,
    check_tree_paths,
    command_environment,
    new_sandbox_id,
    uncancellable,
)
from sandboxes.docker_engine import CommandStream, docker_client, find_image, module, remove_container, translated

from . import docker_scripts as scripts
from . import netns, orphans

if TYPE_CHECKING:
    import aiodocker

HOME = "/home/agent"
WORKDIR = "/workspace"
EXEC_MARKER = "POLAR_EXEC_ID"
END_SECONDS = 10.0
PROBE = ["true"]


class DockerSandbox(Sandbox):
    kind = "docker"
    isolation = (
        "Own processes, network (loopback only) and files of an image, no capabilities, the engine's system-call "
        "filter; the kernel is shared, and root inside is root of the engine's user namespace."
    )

    def __init__(self, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> None:
        self.id = new_sandbox_id()
        self.spec = spec
        self.home, self.workdir = HOME, spec.workdir or WORKDIR
        self._volumes = (HOME, *([] if spec.workdir else [WORKDIR]), *spec.folders)
        self.unenforced = ()
        self._registry = registry
        self._record = orphans.SandboxRecord.mine(self.id, self.kind)
        self._stack = contextlib.AsyncExitStack()
        self._engine: aiodocker.Docker | None = None
        self._container: Any = None
        self._main = "1"
        self._closing: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[int]] = set()
        """What follows the commands that run."""
        self._ending: set[asyncio.Task[None]] = set()
        """The ends of commands whose tasks were cancelled; one that failed stays, and whoever comes next is told."""

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

    async def _start(self) -> None:
        engine = self._engine = await self._stack.enter_async_context(docker_client())
        image = await find_image(engine, self.spec.image)
        self._record.container = self.id  # the name: known before there is a container
        await uncancellable(asyncio.to_thread(self._registry.write, self._record))
        try:
            # Cancelled half-way, the engine would make the container after we had looked for it in vain.
            creating = engine.containers.create(self._config(image), name=self.id)
            self._container = await uncancellable(creating)
            await uncancellable(self._container.start())
        except module().DockerError as error:
            raise SandboxError(f"the engine did not start a container of {image}: {error.message}") from error
        # The volumes come owned by root; an image's own user has to be able to write to them.
        done = await self._script(scripts.FIRST, *self._volumes)
        self._main = done.stdout.split()[0].decode() if done.stdout else "1"
        if done.exit_code:
            await self._own_volumes()

    async def _own_volumes(self) -> None:
        """Open these folders to the image's user. Root inside has no capability; the engine's archive call has."""
        who = await self.exec(["sh", "-c", "id -u; id -g"], cwd="/")
        uid, gid = (int(n) for n in who.stdout.split())
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for folder in self._volumes:
                entry = tarfile.TarInfo(folder.lstrip("/"))
                entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, uid, gid
                tar.addfile(entry)
        await self._container.put_archive("/", buffer.getvalue())

    def _config(self, image: str) -> dict[str, Any]:
        limits = self.spec.limits
        mounts: list[dict[str, Any]] = [
            # Empty even where the image has such a folder, and quicker than the image's layers.
            {"Type": "volume", "Target": target, "VolumeOptions": {"NoCopy": True}}
            for target in self._volumes
        ]
        mounts += [
            {"Type": "bind", "Source": str(m.source.absolute()), "Target": m.target, "ReadOnly": m.read_only}
            for m in self.spec.mounts
        ]
        host: dict[str, Any] = {
            "NetworkMode": "none",
            "Init": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Mounts": mounts,
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            # No copy of all output in the engine's own log.
            "LogConfig": {"Type": "none"},
        }
        if limits.memory_mb is not None:
            host["Memory"] = host["MemorySwap"] = limits.memory_mb << 20
        if limits.cpus is not None:
            host["NanoCpus"] = int(limits.cpus * 1e9)
        if limits.pids is not None:
            host["PidsLimit"] = limits.pids
        if limits.file_mb is not None:
            size = limits.file_mb << 20
            host["Ulimits"].append({"Name": "fsize", "Soft": size, "Hard": size})
        return {
            "Image": image,
            "Entrypoint": ["tail", "-f", "/dev/null"],
            "Cmd": [],
            "Hostname": "sandbox",
            "WorkingDir": self.workdir,
            "Env": [f"{SANDBOX_ID_VARIABLE}={self.id}", f"HOME={HOME}"],
            "Labels": {**self.spec.labels, **orphans.owner_labels(self._record)},
            "HostConfig": host,
        }

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await uncancellable(_join(self._closing))

    async def _close(self) -> None:
        try:
            if self._record.container is not None and self._engine is not None:
                await remove_container(self._engine, self.id)
        finally:
            for task in (*self._ending, *self._running):
                task.cancel()
            await self._stack.aclose()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        orphans.remove_dir(self._registry.state_dir / self.id)
        self._registry.remove(self.id)

    def _live(self) -> Any:
        if self._container is None or self._closing is not None:
            raise SandboxEnded("the sandbox is closed")
        return self._container

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
        for ending in tuple(self._ending):
            await asyncio.shield(ending)
        container = self._live()
        ident = uuid.uuid4().hex
        variables = {**command_environment({}, self, self.spec.env, env), EXEC_MARKER: ident}
        where = self.path(cwd or self.workdir)
        args = check_argv(argv)
        shell = (
            ["sh", "-c", scripts.RUN_STDIN, "sh", where, str(len(stdin))]
            if stdin
            else ["sh", "-c", scripts.RUN, "sh", where]
        )
        start = time.monotonic()
        run = CommandStream(stdin, on_output, output_limit)
        task: asyncio.Task[int] | None = None
        try:
            with translated():
                execution = await container.exec([*shell, *args], environment=variables, stdin=bool(stdin), workdir="/")
                task = asyncio.ensure_future(run.follow(execution))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                await asyncio.wait({task}, timeout=timeout)
                timed_out = not task.done()
                if timed_out:
                    await uncancellable(self._kill(ident, task))
                if task.cancelled():
                    raise SandboxEnded("the sandbox was closed while the command ran")
                exit_code = task.result()
        except asyncio.CancelledError:
            if task is not None and self._closing is None:
                self._end(ident, task)
            raise
        except BaseException as error:
            if task is not None and self._closing is None:
                # Also when the reader failed (an error of the callback): the program may still be running.
                try:
                    await uncancellable(self._kill(ident, task))
                except SandboxError as failed:
                    error.add_note(f"and the command could not be ended: {failed}")
            raise
        if exit_code == 137 and not timed_out and args != PROBE and await self._ended():
            raise SandboxEnded("the container ended while the command ran")
        truncated = run.out.truncated or run.err.truncated
        seconds = time.monotonic() - start
        return ExecResult(exit_code, run.out.value(), run.err.value(), timed_out, seconds, truncated)

    def _end(self, ident: str, task: asyncio.Task[int]) -> None:
        """End a cancelled command. It is not waited for: as a rule the sandbox is closed next, which ends everything by
        one call of the engine where this takes three."""

        def ended(ending: asyncio.Task[None]) -> None:
            if ending.cancelled() or ending.exception() is None:
                self._ending.discard(ending)

        ending = asyncio.ensure_future(self._kill(ident, task))
        ending.add_done_callback(ended)
        self._ending.add(ending)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen: nobody asks for it any more

    async def _kill(self, ident: str, task: asyncio.Task[int]) -> None:
        """End a command's tree and wait for its end; whatever resists takes the sandbox with it."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            # Not by `exec`, which waits for this.
            with translated():
                killing = ["sh", "-c", scripts.KILL, "sh", self._main, f"{EXEC_MARKER}={ident}"]
                await CommandStream(b"", None, OUTPUT_LIMIT).follow(await self._live().exec(killing, workdir="/"))
            # Again if need be: the engine may have been about to start the program.
            await asyncio.wait({task}, timeout=0.5)
            if task.done():
                break
            if time.monotonic() > deadline:
                task.cancel()
                await self.close()
                raise SandboxEnded("a command could not be killed, so the sandbox was closed")
        if not task.cancelled():
            task.exception()  # seen: what matters of it has been raised already

    async def _ended(self) -> bool:
        """Whether the container died, and not only the command.

        The engine calls a container that was just killed running for a moment longer; a new command tells at once if
        it still is. That may fail for other reasons, such as a process limit: then the engine's word counts.
        """
        with contextlib.suppress(SandboxError):
            if (await self.exec(PROBE, cwd="/")).exit_code == 0:
                return False
        deadline = time.monotonic() + 2.0
        while self._closing is None and time.monotonic() < deadline:
            with translated():
                if not (await self._container.show())["State"]["Running"]:
                    return True
            await asyncio.sleep(0.1)
        return self._closing is not None

    async def _script(self, script: str, *args: str, stdin: bytes = b"", limit: int = OUTPUT_LIMIT) -> ExecResult:
        """A few lines of shell of our own, as the sandbox's user."""
        return await self.exec(["sh", "-c", script, "sh", *args], cwd="/", stdin=stdin, output_limit=limit)

    async def kill_all(self) -> None:
        await self._script(scripts.KILL, self._main, "")

    # ------------------------------------------------------------ files and network

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        done = await self._script(scripts.WRITE, self.path(path), f"{mode:o}", stdin=data)
        if done.exit_code:
            raise OSError(f"cannot write {path} in the sandbox: {done.stderr.decode(errors='replace').strip()}")

    async def write_tree(self, files: Mapping[str, bytes], root: str | None = None) -> None:
        """One archive for all: each call of the engine costs as much as a thousand small files."""
        check_tree_paths(files)
        if not files:
            return
        data = await asyncio.to_thread(_archive, files)
        done = await self._script(scripts.UNPACK, self.path(root or self.workdir), stdin=data)
        if done.exit_code:
            raise OSError(f"cannot write files in the sandbox: {done.stderr.decode(errors='replace').strip()}")

    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        done = await self._script(scripts.READ, self.path(path), str(limit + 1), limit=limit + 1)
        if done.exit_code == 2:
            raise FileNotFoundError(2, "no such file in the sandbox", path)
        if done.exit_code == 21:
            raise IsADirectoryError(21, "is a folder in the sandbox", path)
        if done.exit_code:
            reason = done.stderr.decode(errors="replace").strip() or "not a regular file"
            raise OSError(f"cannot read {path} in the sandbox: {reason}")
        if len(done.stdout) > limit:
            raise FileTooLarge(f"{path} is larger than {limit} bytes")
        return done.stdout

    async def listen(self, port: int = 0) -> socket.socket | None:
        with translated():
            state = (await self._live().show())["State"]
        if not state["Running"]:
            raise SandboxEnded("the container has ended")
        try:
            return await asyncio.to_thread(netns.listen, state["Pid"], self.id, port)
        except netns.CannotEnter as error:
            assert self._engine is not None
            labels = {**orphans.owner_labels(self._record), orphans.LABEL: f"{self.id}-net"}
            return await netns.listen_by_helper(self._engine, self.id, port, labels, error)


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(posixpath.normpath(name))
            entry.size, entry.mode, entry.mtime = len(data), 0o644, int(time.time())
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


async def _join(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)
