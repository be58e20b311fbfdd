"""`docker`: a container without a network, driven through the engine's API.

aiodocker and not docker-py: an agent's command runs for minutes and many run at once, which with docker-py costs a
thread each, and its exec socket loses output that arrives together with the response header.

Inside nothing but a POSIX shell and the usual small tools (sh, cat, head, mkdir, tar, tr, grep) is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import posixpath
import socket
import tarfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from . import images, netns, orphans
from .base import (
    MARKER,
    OUTPUT_LIMIT,
    READ_LIMIT,
    ExecResult,
    FileTooLarge,
    OutputCallback,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    Tail,
    check_argv,
    environment,
    new_id,
    settle,
    tree_paths,
)

if TYPE_CHECKING:
    import aiodocker

log = logging.getLogger(__name__)

HOME = "/home/agent"
WORKDIR = "/workspace"
EXEC_MARKER = "POLAR_EXEC_ID"
END_SECONDS = 10.0
DRAIN_SECONDS = 0.1

# `cd` here and not by the engine, which would create a missing folder; the shell names what cannot be started.
RUN = 'cd "$1" || exit 126; shift; exec "$@"'
# The engine offers no end of stdin that its clients agree on, so the shell takes exactly the bytes that were sent.
RUN_STDIN = 'cd "$1" || exit 126; n=$2; shift 2; head -c "$n" | "$@"'

# Ending the client of an exec, or its connection, leaves the program running: it has to be killed from inside.
# $2: what the environment of the command shows; that, and all below it, is killed until none is left. Without $2
# everything is. Spared are init, $1 (the container's own program) and this shell. Zombies are dead already.
KILL = r"""
me=$$; keep=$1; mark=$2
while :; do
  hit=" "; more=1
  for d in /proc/[0-9]*; do
    p=${d#/proc/}
    case $p in 1|"$me"|"$keep") continue;; esac
    if [ -z "$mark" ]; then
      IFS= read -r line <"$d/stat" || continue
      set -- ${line##*) }
      [ "$1" = Z ] || hit="$hit$p "
    elif tr '\0' '\n' <"$d/environ" | grep -qx -- "$mark"; then
      hit="$hit$p "
    fi
  done
  while [ $more = 1 ]; do
    more=0
    for d in /proc/[0-9]*; do
      p=${d#/proc/}
      case $hit in *" $p "*) continue;; esac
      IFS= read -r line <"$d/stat" || continue
      set -- ${line##*) }
      [ "$1" = Z ] && continue
      case $hit in *" $2 "*) hit="$hit$p "; more=1;; esac
    done
  done
  [ "$hit" = " " ] && exit 0
  kill -9 $hit
done 2>/dev/null
"""
# The container's own program is the only process besides init when the first command comes.
FIRST = (
    'for d in /proc/[0-9]*; do p=${d#/proc/}; case $p in 1|$$) ;; *) echo $p;; esac; done; test -w "$1" && test -w "$2"'
)
READ = '[ -e "$1" ] || exit 2; [ -d "$1" ] && exit 21; [ -f "$1" ] || exit 22; head -c "$2" -- "$1"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1" && chmod "$2" -- "$1"'
UNPACK = 'mkdir -p -- "$1" && tar -xof - -C "$1"'


def _aiodocker() -> Any:
    try:
        import aiodocker
    except ImportError as error:
        raise SandboxUnavailable("aiodocker is not installed (pip install 'polar-proxy[docker]')") from error
    return aiodocker


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiodocker.Docker]:
    """A client of the engine that DOCKER_HOST or the current context names. Raises `SandboxUnavailable`."""
    module = _aiodocker()
    try:
        engine: aiodocker.Docker = module.Docker()
    except (AssertionError, ValueError) as error:  # aiodocker asserts that it found an address
        raise SandboxUnavailable("no Docker engine: no socket was found and DOCKER_HOST is not set") from error
    async with engine:
        try:
            await engine.system.info()
        except (module.DockerError, OSError) as error:
            raise SandboxUnavailable(f"the Docker engine does not answer: {error}") from error
        yield engine


async def find_image(engine: aiodocker.Docker, image: str | None) -> str:
    """The image to run, checked to be there. Raises `SandboxUnavailable` with the way to get it."""
    name = image or images.tag()
    try:
        await engine.images.inspect(name)
    except _aiodocker().DockerError as error:
        if error.status != 404:
            raise
        cure = f"docker pull {image}" if image else "python -m sandboxes.images.build"
        raise SandboxUnavailable(f"the image {name} is not on this machine (get it with: {cure})") from error
    return name


class DockerSandbox(Sandbox):
    kind = "docker"
    isolation = (
        "Own processes, network (loopback only) and files of an image, no capabilities, the engine's system-call "
        "filter; the kernel is shared, and root inside is root of the engine's user namespace."
    )

    def __init__(self, spec: SandboxSpec, registry: orphans.Registry) -> None:
        self.id = new_id()
        self.spec = spec
        self.home, self.workdir = HOME, WORKDIR
        self.unenforced = ("file_mb: is held for each file, by its writer",) if spec.limits.file_mb else ()
        self._registry = registry
        self._record = orphans.Record.mine(self.id, self.kind)
        self._stack = contextlib.AsyncExitStack()
        self._engine: aiodocker.Docker | None = None
        self._container: Any = None
        self._main = "1"
        self._closing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ life

    @classmethod
    async def open(cls, spec: SandboxSpec, registry: orphans.Registry) -> Self:
        spec.check()
        self = cls(spec, registry)
        try:
            await self._start()
        except BaseException:
            await settle(self.close())
            raise
        return self

    async def _start(self) -> None:
        engine = self._engine = await self._stack.enter_async_context(client())
        image = await find_image(engine, self.spec.image)
        self._record.container = self.id  # the name: known before there is a container
        await settle(asyncio.to_thread(self._registry.write, self._record))
        try:
            # Cancelled half-way, the engine would make the container after we had looked for it in vain.
            creating = engine.containers.create(self._config(image), name=self.id)
            self._container = await settle(creating)
            await settle(self._container.start())
        except _aiodocker().DockerError as error:
            raise SandboxError(f"the engine did not start a container of {image}: {error.message}") from error
        # The volumes come owned by root; an image's own user has to be able to write to them.
        done = await self._script(FIRST, HOME, WORKDIR)
        self._main = done.stdout.split()[0].decode() if done.stdout else "1"
        if done.exit_code:
            await self._own_volumes()

    async def _own_volumes(self) -> None:
        """Open the two folders to the image's user. Root inside has no capability; the engine's archive call has."""
        who = await self.exec(["sh", "-c", "id -u; id -g"], cwd="/")
        uid, gid = (int(n) for n in who.stdout.split())
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for folder in (HOME, WORKDIR):
                entry = tarfile.TarInfo(folder.lstrip("/"))
                entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, uid, gid
                tar.addfile(entry)
        await self._container.put_archive("/", buffer.getvalue())

    def _config(self, image: str) -> dict[str, Any]:
        limits = self.spec.limits
        mounts: list[dict[str, Any]] = [
            # Empty even where the image has such a folder, and quicker than the image's layers.
            {"Type": "volume", "Target": target, "VolumeOptions": {"NoCopy": True}}
            for target in (HOME, WORKDIR)
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
            "WorkingDir": WORKDIR,
            "Env": [f"{MARKER}={self.id}", f"HOME={HOME}"],
            "Labels": {**self.spec.labels, **orphans.labels(self._record)},
            "HostConfig": host,
        }

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await settle(_join(self._closing))

    async def _close(self) -> None:
        try:
            if self._record.container is not None and self._engine is not None:
                await remove_container(self._engine, self.id)
        finally:
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
        container = self._live()
        ident = uuid.uuid4().hex
        variables = {**environment({}, self, self.spec.env, env), EXEC_MARKER: ident}
        where = self.path(cwd or self.workdir)
        args = check_argv(argv)
        shell = ["sh", "-c", RUN_STDIN, "sh", where, str(len(stdin))] if stdin else ["sh", "-c", RUN, "sh", where]
        start = time.monotonic()
        run = Run(stdin, on_output, output_limit)
        task: asyncio.Task[int] | None = None
        try:
            with _translated():
                execution = await container.exec([*shell, *args], environment=variables, stdin=bool(stdin), workdir="/")
                task = asyncio.ensure_future(run.follow(execution))
                await asyncio.wait({task}, timeout=timeout)
                timed_out = not task.done()
                if timed_out:
                    await settle(self._kill(ident, task))
                exit_code = task.result()
        except BaseException as error:
            if task is not None and self._closing is None:
                # Also when the reader failed (an error of the callback): the program may still be running.
                try:
                    await settle(self._kill(ident, task))
                except SandboxError as failed:
                    error.add_note(f"and the command could not be ended: {failed}")
            raise
        if exit_code == 137 and not timed_out and not await self._running():
            raise SandboxEnded("the container ended while the command ran")
        truncated = run.out.truncated or run.err.truncated
        seconds = time.monotonic() - start
        return ExecResult(exit_code, run.out.value(), run.err.value(), timed_out, seconds, truncated)

    async def _kill(self, ident: str, task: asyncio.Task[int]) -> None:
        """End a command's tree and wait for its end; whatever resists takes the sandbox with it."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            await self._script(KILL, self._main, f"{EXEC_MARKER}={ident}")
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

    async def _running(self) -> bool:
        if self._closing is not None:
            return False
        with _translated():
            return bool((await self._container.show())["State"]["Running"])

    async def _script(self, script: str, *args: str, stdin: bytes = b"", limit: int = OUTPUT_LIMIT) -> ExecResult:
        """A few lines of shell of our own, as the sandbox's user."""
        return await self.exec(["sh", "-c", script, "sh", *args], cwd="/", stdin=stdin, output_limit=limit)

    async def kill_all(self) -> None:
        await self._script(KILL, self._main, "")

    # ------------------------------------------------------------ files and network

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        done = await self._script(WRITE, self.path(path), f"{mode:o}", stdin=data)
        if done.exit_code:
            raise OSError(f"cannot write {path} in the sandbox: {done.stderr.decode(errors='replace').strip()}")

    async def write_tree(self, files: Mapping[str, bytes], root: str | None = None) -> None:
        """One archive for all: each call of the engine costs as much as a thousand small files."""
        tree_paths(files)
        if not files:
            return
        data = await asyncio.to_thread(_archive, files)
        done = await self._script(UNPACK, self.path(root or self.workdir), stdin=data)
        if done.exit_code:
            raise OSError(f"cannot write files in the sandbox: {done.stderr.decode(errors='replace').strip()}")

    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        done = await self._script(READ, self.path(path), str(limit + 1), limit=limit + 1)
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
        with _translated():
            state = (await self._live().show())["State"]
        if not state["Running"]:
            raise SandboxEnded("the container has ended")
        return await asyncio.to_thread(netns.listen, state["Pid"], self.id, port)


class Run:
    """The output of one command."""

    def __init__(self, stdin: bytes, callback: OutputCallback | None, limit: int) -> None:
        self.out, self.err = Tail(limit), Tail(limit)
        self._stdin = stdin
        self._callback = callback

    async def follow(self, execution: Any) -> int:
        """Start the command, collect its output, return its exit status.

        The stream ends only when the last holder of the output does, which may be a background process; so the
        engine is also asked, ever more seldom, whether the command itself is over.
        """
        async with execution.start(detach=False) as stream:
            reader = asyncio.ensure_future(self._read(stream))
            writer = asyncio.ensure_future(self._write(stream)) if self._stdin else None
            try:
                pause = 0.25
                while not (await asyncio.wait({reader}, timeout=pause))[0]:
                    if not (await execution.inspect())["Running"]:
                        await asyncio.wait({reader}, timeout=DRAIN_SECONDS)
                        break
                    pause = min(2.0, pause * 1.5)
                if reader.done():
                    reader.result()
            finally:
                for task in (reader, writer):
                    if task is not None:
                        task.cancel()
                        await asyncio.wait({task})
        return await self._exit_code(execution)

    async def _exit_code(self, execution: Any) -> int:
        # The stream may end a moment before the engine knows the exit status.
        pause = 0.002
        while (state := await execution.inspect())["Running"] or state["ExitCode"] is None:
            await asyncio.sleep(pause)
            pause = min(0.1, pause * 2)
        return int(state["ExitCode"])

    async def _read(self, stream: Any) -> None:
        while (message := await stream.read_out()) is not None:
            (self.out if message.stream == 1 else self.err).add(message.data)
            if self._callback is not None:
                self._callback(message.data)

    async def _write(self, stream: Any) -> None:
        try:
            for offset in range(0, len(self._stdin), 1 << 16):
                await stream.write_in(self._stdin[offset : offset + (1 << 16)])
        except (ConnectionError, RuntimeError):
            return  # the program ended without reading it all: its exit status tells


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(posixpath.normpath(name))
            entry.size, entry.mode, entry.mtime = len(data), 0o644, int(time.time())
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@contextlib.contextmanager
def _translated() -> Any:
    """The engine's errors as ours."""
    module = _aiodocker()
    try:
        yield
    except module.DockerError as error:
        if error.status in (404, 409):
            raise SandboxEnded(f"the container has ended: {error.message}") from error
        raise SandboxError(f"the Docker engine: {error.message}") from error
    except OSError as error:
        if type(error).__module__.startswith("aiohttp"):
            raise SandboxEnded(f"the Docker engine went away: {error}") from error
        raise


async def _join(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)


async def remove_container(engine: aiodocker.Docker, name: str) -> bool:
    """Kill and remove a container with its volumes; False if there is none."""
    module = _aiodocker()
    try:
        await engine.containers.container(name).delete(force=True, v=True)
    except module.DockerError as error:
        if error.status == 404:
            return False
        if error.status == 409 and "already in progress" in error.message:
            return True
        raise SandboxError(f"container {name} could not be removed: {error.message}") from error
    return True


async def sweep_containers(
    records: Sequence[orphans.Record], removed: list[orphans.Removed], problems: list[str]
) -> set[str]:
    """Remove the containers of dead owners, by record and by label.

    Returns the names that have to wait, because no engine answers.
    """
    named = {record.container for record in records if record.container}
    try:
        async with client() as engine:
            found = await engine.containers.list(all=True, filters=json.dumps({"label": [orphans.OWNER_LABEL]}))
            for container in found:
                labels = container["Labels"]
                if orphans.Owner.parse(json.loads(labels[orphans.OWNER_LABEL])).dead():
                    named.add(labels[orphans.LABEL])
            for name in sorted(named):
                try:
                    if await remove_container(engine, name):
                        removed.append(orphans.Removed(name, "container", name))
                except SandboxError as error:
                    problems.append(f"{name}: {error}")
    except SandboxUnavailable as error:
        if named:
            log.warning("left-over containers %s stay until a Docker engine answers: %s", sorted(named), error)
        return named
    return set()
