"""`docker`: a container without a network, driven through the engine's API.

The image needs only a POSIX shell with cat, head, mkdir, rm, tar, tr and grep: see the scripts at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import socket
import tarfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandboxes import disk, netns, orphans
from sandboxes.base import (
    OUTPUT_LIMIT,
    READ_LIMIT,
    SANDBOX_ID_VARIABLE,
    Command,
    ExecResult,
    FileTooLarge,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxSpec,
    check_tree_paths,
    uncancellable,
)
from sandboxes.docker_engine import (
    CommandStream,
    changed_names,
    container_bytes,
    docker_client,
    engine_info,
    fetch_tree,
    find_image,
    find_runtime,
    ignored_limits,
    image_user,
    is_podman,
    kill_container,
    pack_archive,
    remove_container,
    require_aiodocker,
    seccomp_option,
    translate_errors,
)
from sandboxes.process import process_limits
from sandboxes.tree import SandboxTree

if TYPE_CHECKING:
    import aiodocker

HOME = "/home/agent"
WORKDIR = "/workspace"
COMMAND_ID_VARIABLE = "POLAR_EXEC_ID"
END_SECONDS = 10.0
SCRIPT_SECONDS = 120.0
SHARED_MEMORY_BYTES = 256 << 20
PROBE = ["true"]
MAIN_USER = "65533:65533"
"""The user of the container's own program. No command runs as this user or has a capability, so no command can kill
this program and thereby end the container."""


class DockerSandbox(Sandbox):
    kind = "docker"

    def __init__(self, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> None:
        super().__init__(spec, registry)
        self.home, self.workdir = HOME, spec.workdir or WORKDIR
        self._volumes = (HOME, *([] if spec.workdir else [WORKDIR]), *spec.folders)
        self._stack = contextlib.AsyncExitStack()
        self._engine: aiodocker.Docker | None = None
        self._container: Any = None
        self._main = "1"
        self._user = ""
        """User that all commands run as: the one that the image names."""
        self.runtime = "runc"
        """Name of the runtime with which Docker runs the container, such as runc; known once the sandbox is open."""
        self._running: set[asyncio.Task[int]] = set()
        """One task for each running command. The task collects the command's output and its exit status."""
        self._ending: set[asyncio.Task[None]] = set()
        """One task for each cancelled command that is being ended. If a task fails, it stays here, and every later
        command raises its error."""

    # ------------------------------------------------------------ life cycle

    async def _start(self) -> None:
        engine = self._engine = await self._stack.enter_async_context(docker_client())
        image = await find_image(engine, self.spec.image)
        info = await engine_info(engine)
        self.runtime = find_runtime(info, self.spec.runtime)
        self._record.container = self.id  # the container's name, known before it exists
        await uncancellable(asyncio.to_thread(self._registry.write, self._record))
        self._user = await image_user(engine, image)
        try:
            # Not cancelled half-way, because the engine could create the container after the clean-up looked for it.
            system_calls = await seccomp_option(info, self.host_folder)
            config = self._config(image, system_calls)
            self._container = await uncancellable(engine.containers.create(config, name=self.id))
            await uncancellable(self._container.start())
        except require_aiodocker().DockerError as error:
            raise SandboxError(f"the engine did not start a container of {image}: {error.message}") from error
        # The image's own user must be able to write to the folders, which are another user's at first.
        done = await self._script(FIND_MAIN_PROCESS, self.workdir, *self._volumes)
        self._main = done.stdout.split()[0].decode() if done.stdout else "1"
        if done.exit_code:
            await self._own(*self._volumes, *([self.workdir] if done.exit_code == NO_WORKDIR else []))
        if is_podman(info):
            await self._empty_volumes()
        with translate_errors():
            found = await self._container.show()
        self.unenforced = ignored_limits(config["HostConfig"], found["HostConfig"])
        folders = self._local_folders(found)
        if not folders and self.spec.limits.files is not None:
            self.unenforced += ("files: the engine measures only their size, and only root can count them",)
        watching = disk.watch(self.id, lambda: self._disk_usage(folders), self.spec.limits, self._stop_programs)
        self._disk_watch = asyncio.create_task(watching)

    def _local_folders(self, found: dict[str, Any]) -> list[Path]:
        """Return the folders of this machine that hold the container's files; none if this process cannot read them."""
        layer = (found["GraphDriver"]["Data"] or {}).get("UpperDir")
        names = [layer, *(mount["Source"] for mount in found["Mounts"] if mount["Type"] == "volume")]
        readable = [name is not None and os.access(name, os.R_OK | os.X_OK) for name in names]
        return [Path(name) for name in names] if os.geteuid() == 0 and all(readable) else []

    async def _disk_usage(self, folders: list[Path]) -> disk.DiskUsage:
        if folders:
            return await asyncio.to_thread(disk.measure, folders, self.spec.limits)
        assert self._engine is not None
        with translate_errors():
            return disk.DiskUsage(size=await container_bytes(self._engine, self.id))

    async def _own(self, *folders: str) -> None:
        """Make the image's user the owner of these folders, and create the missing ones.

        Root in the container may not change owners. So Docker unpacks an archive that contains the folders with their
        owner.
        """
        who = await self.exec(["sh", "-c", "id -u; id -g"], cwd="/")
        uid, gid = (int(n) for n in who.stdout.split())
        entries = []
        for folder in folders:
            entry = tarfile.TarInfo(folder.lstrip("/"))
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, uid, gid
            entries.append((entry, b""))
        await self._container.put_archive("/", pack_archive(entries))

    async def _empty_volumes(self) -> None:
        """Remove the image's files from the volumes. Podman copies them there, because its Docker API ignores
        `NoCopy`."""
        done = await self._script(EMPTY, *self._volumes)
        if done.exit_code:
            reason = done.stderr.decode(errors="replace").strip()
            raise SandboxError(
                f"Podman copied the image's files into {', '.join(self._volumes)}, and they cannot be removed: {reason}"
            )

    def _config(self, image: str, system_calls: str) -> dict[str, Any]:
        limits = self.spec.limits
        mounts: list[dict[str, Any]] = [
            # Empty even if the image has such a folder, and faster than the image's layers.
            {"Type": "volume", "Target": target, "VolumeOptions": {"NoCopy": True}}
            for target in self._volumes
        ]
        mounts += [
            {"Type": "bind", "Source": str(m.source.absolute()), "Target": m.target, "ReadOnly": True}
            for m in self.spec.mounts
        ]
        host: dict[str, Any] = {
            "NetworkMode": "none",
            "Init": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges", system_calls],
            "Mounts": mounts,
            "Runtime": self.runtime,
            "ShmSize": SHARED_MEMORY_BYTES,
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            # The engine keeps no copy of the output in its own log.
            "LogConfig": {"Type": "none"},
        }
        if self.spec.hosts:
            host["ExtraHosts"] = [f"{name}:127.0.0.1" for name in self.spec.hosts]
        if limits.memory_mb is not None:
            host["Memory"] = host["MemorySwap"] = limits.memory_mb << 20
        if limits.cpus is not None:
            host["NanoCpus"] = int(limits.cpus * 1e9)
        if limits.pids is not None:
            host["PidsLimit"] = limits.pids
        for name, limit in (("fsize", "RLIMIT_FSIZE"), ("nofile", "RLIMIT_NOFILE")):
            if (value := process_limits(limits).get(limit)) is not None:
                host["Ulimits"].append({"Name": name, "Soft": value, "Hard": value})
        return {
            "Image": image,
            "User": MAIN_USER,
            "Entrypoint": ["tail", "-f", "/dev/null"],
            "Cmd": [],
            "Hostname": "sandbox",
            "WorkingDir": "/",  # the engines do not agree on the owner of a new working folder
            "Env": [f"{SANDBOX_ID_VARIABLE}={self.id}", f"HOME={HOME}"],
            "Labels": {**self.spec.labels, **orphans.owner_labels(self._record)},
            "HostConfig": host,
        }

    async def _end(self) -> None:
        try:
            if self._record.container is not None and self._engine is not None:
                await remove_container(self._engine, self.id)
        finally:
            for task in (*self._ending, *self._running):
                task.cancel()
            await self._stack.aclose()

    # ------------------------------------------------------------ commands

    async def _exec(self, command: Command) -> ExecResult:
        for ending in tuple(self._ending):
            await asyncio.shield(ending)
        container = self._require_open(self._container)
        command_id = uuid.uuid4().hex
        variables = {**command.env, COMMAND_ID_VARIABLE: command_id}
        shell = ["sh", "-c", RUN, "sh", command.cwd]
        if command.stdin:
            shell = ["sh", "-c", RUN_WITH_STDIN, "sh", command.cwd, str(len(command.stdin))]
        argv = [*shell, *command.argv]
        start = time.monotonic()
        run = CommandStream(command.stdin, command.on_output, command.output_limit)
        task: asyncio.Task[int] | None = None
        try:
            with translate_errors():
                execution = await container.exec(
                    argv, user=self._user, environment=variables, stdin=bool(command.stdin), workdir="/"
                )
                task = asyncio.ensure_future(run.follow(execution))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                await asyncio.wait({task}, timeout=command.timeout)
                timed_out = not task.done()
                if timed_out:
                    await uncancellable(self._kill(command_id, task))
                if task.cancelled():
                    raise SandboxEnded("the sandbox was closed while the command ran")
                exit_code = task.result()
        except asyncio.CancelledError:
            if task is not None and self._closing is None:
                self._end_in_background(command_id, task)
            raise
        except BaseException as error:
            if task is not None and self._closing is None:
                # Also if only the output callback failed, because the program may still run.
                try:
                    await uncancellable(self._kill(command_id, task))
                except SandboxError as failed:
                    error.add_note(f"and the command could not be ended: {failed}")
            raise
        if exit_code == 137 and not timed_out and command.argv != PROBE and await self._container_ended():
            raise SandboxEnded("the container ended while the command ran")
        truncated = run.out.truncated or run.err.truncated
        seconds = time.monotonic() - start
        return ExecResult(exit_code, run.out.value(), run.err.value(), timed_out, seconds, truncated)

    def _end_in_background(self, command_id: str, task: asyncio.Task[int]) -> None:
        """Begin to end a cancelled command, and return without waiting for its end.

        Ending a command takes three calls to the Docker engine. Usually the sandbox is closed next, and this ends the
        command with one call.
        """

        def ended(ending: asyncio.Task[None]) -> None:
            if ending.cancelled() or ending.exception() is None:
                self._ending.discard(ending)

        ending = asyncio.ensure_future(self._kill(command_id, task))
        ending.add_done_callback(ended)
        self._ending.add(ending)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved: it is not awaited

    async def _kill(self, command_id: str, task: asyncio.Task[int]) -> None:
        """End a command's process tree and wait for its end. End the container if a process resists.

        Programs can resist: while they use up the limit of processes, the program that would kill them cannot start.
        """
        deadline = time.monotonic() + END_SECONDS
        while True:
            # Not through `exec`, which waits until `_kill` has ended.
            container = self._require_open(self._container)
            with contextlib.suppress(SandboxEnded), translate_errors():
                killing = ["sh", "-c", KILL, "sh", self._main, f"{COMMAND_ID_VARIABLE}={command_id}"]
                execution = await container.exec(killing, user=self._user, workdir="/")
                await CommandStream(b"", None, OUTPUT_LIMIT).follow(execution)
            # Repeated if needed: the engine may have been about to start the program.
            await asyncio.wait({task}, timeout=0.5)
            if task.done():
                break
            if time.monotonic() > deadline:
                await self._end_container(task)
                break
        if not task.cancelled():
            task.exception()  # retrieved, so that it is not logged; the relevant error was raised already

    async def _end_container(self, task: asyncio.Task[int]) -> None:
        """End all processes inside. The files can still be read.

        If the command that `task` follows does not end, close the sandbox and raise `SandboxEnded`.
        """
        with translate_errors():
            await kill_container(self._require_open(self._container))
        await asyncio.wait({task}, timeout=END_SECONDS)
        if not task.done():
            task.cancel()
            await self.close()
            raise SandboxEnded("a command could not be killed, so the sandbox was closed")

    async def _container_ended(self) -> bool:
        """Return whether the container was ended from outside. Return False if only a command in it ended, or if the
        kernel ended the container because programs inside filled its memory.

        For a moment Docker reports a killed container as running, so a trial command is run first. If the trial
        succeeds, the container runs. If it fails, the container may have reached its limit of processes instead, so
        Docker's report decides.
        """
        with contextlib.suppress(SandboxError):
            if (await self.exec(PROBE, cwd="/")).exit_code == 0:
                return False
        deadline = time.monotonic() + 2.0
        while self._closing is None and time.monotonic() < deadline:
            with translate_errors():
                state = (await self._container.show())["State"]
            if not state["Running"]:
                return not state["OOMKilled"]
            await asyncio.sleep(0.1)
        return self._closing is not None

    async def _script(self, script: str, *args: str, stdin: bytes = b"", limit: int = OUTPUT_LIMIT) -> ExecResult:
        """Run one of the scripts below as the sandbox's user.

        Raise OSError if the script does not end. A program in the sandbox can make a script hang: it replaces a file by
        a pipe at the right moment.
        """
        argv = ["sh", "-c", script, "sh", *args]
        done = await self.exec(argv, cwd="/", stdin=stdin, output_limit=limit, timeout=SCRIPT_SECONDS)
        if done.timed_out:
            raise OSError(f"a file operation in the sandbox did not end within {SCRIPT_SECONDS:.0f} s")
        return done

    async def kill_all(self) -> None:
        await self._script(KILL, self._main, "")

    # ------------------------------------------------------------ files and network

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        done = await self._script(WRITE, self.path(path), f"{mode:o}", stdin=data)
        if done.exit_code:
            reason = done.stderr.decode(errors="replace").strip() or "not a regular file"
            raise OSError(f"cannot write {path} in the sandbox: {reason}")

    async def write_tree(self, files: Mapping[str, bytes], root: str | None = None) -> None:
        """Send all files in one archive: one more call to Docker takes longer than many more small files in it."""
        check_tree_paths(files)
        if not files:
            return
        data = await asyncio.to_thread(_pack_files, files)
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

    async def read_tree(self, path: str | None = None) -> SandboxTree:
        folder = posixpath.normpath(path or self.workdir)
        container = self._require_open(self._container)
        assert self._engine is not None
        with translate_errors():
            await kill_container(container)
            in_volume = any(folder == volume or folder.startswith(volume + "/") for volume in self._volumes)
            top_names = None if in_volume else await changed_names(self._engine, self.id, folder)
            return await fetch_tree(self._engine, self.id, folder, top_names)

    async def listen(self, port: int = 0) -> socket.socket | None:
        with translate_errors():
            state = (await self._require_open(self._container).show())["State"]
        if not state["Running"]:
            raise SandboxEnded("the container has ended")
        try:
            return await asyncio.to_thread(netns.listen, state["Pid"], self.id, port)
        except netns.CannotEnterNamespace as error:
            assert self._engine is not None
            labels = {**orphans.owner_labels(self._record), orphans.LABEL: f"{self.id}-net"}
            return await netns.listen_by_helper(self._engine, self.id, port, labels, error)


def _pack_files(files: Mapping[str, bytes]) -> bytes:
    now = int(time.time())
    entries = []
    for name, data in files.items():
        entry = tarfile.TarInfo(posixpath.normpath(name))
        entry.mode, entry.mtime = 0o644, now
        entries.append((entry, data))
    return pack_archive(entries)


# ---------------------------------------------------------------- shell scripts that run inside the container

# The shell changes the folder, because the engine would create a missing one, and reports a program that cannot start.
RUN = 'cd "$1" || exit 126; shift; exec "$@"'
# The clients of the engine do not agree on how stdin ends, so the shell reads exactly the bytes that were sent.
RUN_WITH_STDIN = 'cd "$1" || exit 126; n=$2; shift 2; head -c "$n" | "$@"'

# Ending the client of an exec, or its connection, leaves the program running: it must be killed from inside. Kills the
# processes whose environment has the line $2, and all their descendants, until none is left; without $2, everything.
# Spares init, $1 (the container's own program) and this shell. Zombies are dead already.
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
# The container's own program is the only process besides init when the first command runs. $1: the working folder.
FIND_MAIN_PROCESS = (
    "for d in /proc/[0-9]*; do p=${d#/proc/}; case $p in 1|$$) ;; *) echo $p;; esac; done; "
    'mkdir -p -- "$1" || exit 2; shift; for f; do test -w "$f" || exit 1; done'
)
NO_WORKDIR = 2
EMPTY = 'for f; do rm -rf -- "$f"/* "$f"/.[!.]* "$f"/..?* || exit 1; done'
# Only regular files are read and written: a pipe without another end would never answer.
READ = '[ -e "$1" ] || exit 2; [ -d "$1" ] && exit 21; [ -f "$1" ] || exit 22; head -c "$2" -- "$1"'
WRITE = '[ -e "$1" ] && [ ! -f "$1" ] && exit 22; mkdir -p -- "$(dirname -- "$1")" && cat >"$1" && chmod "$2" -- "$1"'
UNPACK = 'mkdir -p -- "$1" && tar -xof - -C "$1"'
