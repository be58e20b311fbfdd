"""The Docker engine: connecting, translating its errors, following one command, removing containers.

Uses aiodocker and not docker-py, for two reasons. docker-py needs a thread for each running command, and many commands
of agents run for minutes at once. docker-py's exec socket also loses output that arrives together with the response
header.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import posixpath
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sandboxes import images, orphans, seccomp
from sandboxes.base import DockerRuntime, OutputCallback, OutputTail, SandboxEnded, SandboxError, SandboxUnavailable
from sandboxes.tree import ARCHIVE_BYTES, ArchiveTree, SandboxTree, TreeTooLarge

if TYPE_CHECKING:
    import aiodocker

log = logging.getLogger(__name__)

CHANGED = 0
"""Kind of an entry in the engine's list of changes: the path was in the image and was changed. The other kinds are
added and deleted."""
UNREADABLE = "\ufffd"
CHANGES_BYTES = 64 << 20
"""Limit in bytes of the engine's list of changes, which names every file that programs in the container made."""
PODMAN_WRONG_STATE = "container state improper"
"""Text in the message of Podman's error 500. It shows that the container ended while Podman was about to use or kill
it."""
DF_ATTEMPTS = 5
DRAIN_SECONDS = 1.0
"""After the end of a command, its output counts as complete when no more has arrived for this many seconds."""


def require_aiodocker() -> Any:
    """Return the aiodocker module. Raise `SandboxUnavailable` if it is not installed."""
    try:
        import aiodocker
    except ImportError as error:
        raise SandboxUnavailable("aiodocker is not installed (pip install 'polar-proxy[docker]')") from error
    return aiodocker


class ImageMissing(SandboxUnavailable):
    """Raised if the engine answers but lacks the image."""


@contextlib.asynccontextmanager
async def docker_client() -> AsyncIterator[aiodocker.Docker]:
    """Connect to the engine of DOCKER_HOST or of the current context. Raise `SandboxUnavailable` if there is none."""
    library = require_aiodocker()
    try:
        engine: aiodocker.Docker = library.Docker()
    except (AssertionError, ValueError) as error:  # aiodocker asserts that it found an address
        raise SandboxUnavailable("no Docker engine: no socket was found and DOCKER_HOST is not set") from error
    async with engine:
        try:
            async with engine._query("_ping", versioned_api=False) as answer:
                # aiodocker would ask for it by another request, which takes Podman as long as starting a container.
                engine.api_version = "v" + answer.headers["Api-Version"]
        except (library.DockerError, OSError) as error:
            raise SandboxUnavailable(f"the Docker engine does not answer: {error}") from error
        yield engine


async def inspect_image(engine: aiodocker.Docker, name: str) -> dict[str, Any] | None:
    """Return the engine's description of an image; None if the engine has no such image. Raise `SandboxError` for any
    other error that the engine reports."""
    try:
        return await engine.images.inspect(name)
    except require_aiodocker().DockerError as error:
        if error.status == 404:
            return None
        raise SandboxError(f"the Docker engine reports: {error.message}") from error


async def image_user(engine: aiodocker.Docker, image: str) -> str:
    """Return the name or number of the user that an image's programs run as. Raise `SandboxError` if the engine reports
    an error."""
    found = await inspect_image(engine, image) or {}
    return (found.get("Config") or {}).get("User") or "0"


async def find_image(engine: aiodocker.Docker, image: str | None) -> str:
    """Return the name of `image` (None: the default image).

    Raise `ImageMissing`, with the command that gets the image, if this machine lacks it.
    """
    name = image or images.tag()
    if await inspect_image(engine, name) is None:
        command = f"docker pull {image}, or podman pull {image}" if image else "python -m sandboxes.images.build"
        raise ImageMissing(f"the image {name} is not on this machine (get it with: {command})")
    return name


async def engine_info(engine: aiodocker.Docker) -> dict[str, Any]:
    """Return the engine's description of itself. Podman takes a second for it."""
    with translate_errors():
        return dict(await engine.system.info())


def is_podman(info: dict[str, Any]) -> bool:
    return "BuildahVersion" in info


def find_runtime(info: dict[str, Any], wanted: DockerRuntime) -> str:
    """Return the name of the engine's runtime to use. Raise `SandboxUnavailable` if the engine lacks the wanted one."""
    default = str(info.get("DefaultRuntime") or "runc")
    # Podman lists the runtimes that it knows, installed or not, and starts every container in its default one.
    runtimes = {default} if is_podman(info) else set(info.get("Runtimes") or ())
    if wanted == "runsc" and "runsc" not in runtimes:
        raise SandboxUnavailable(
            "the Docker engine has no runtime runsc: install gVisor, run `runsc install`, and restart the engine; or "
            "set sandboxes.docker_runtime to auto"
        )
    if wanted == "auto":
        return "runsc" if "runsc" in runtimes else default
    return wanted


async def seccomp_option(info: dict[str, Any], folder: Path) -> str:
    """Return the security option with the filter of system calls. Podman reads the filter from a file in `folder`."""
    profile = json.dumps(seccomp.docker_profile())
    if not is_podman(info):
        return f"seccomp={profile}"
    file = folder / "seccomp.json"
    await asyncio.to_thread(_write_file, file, profile)
    return f"seccomp={file}"


def _write_file(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


async def describe_engine(wanted: DockerRuntime = "auto") -> str:
    """Return a text that names the runtime and says whether root inside containers is an unprivileged user outside.
    Raise `SandboxError` if no engine answers, or if the engine lacks the wanted runtime."""
    async with docker_client() as engine:
        info = await engine_info(engine)
    runtime = find_runtime(info, wanted)
    options = info.get("SecurityOptions") or []
    if info.get("Rootless") or any(option.startswith(("name=userns", "name=rootless")) for option in options):
        return f"runtime {runtime}, root inside is an ordinary user outside"
    return (
        f"runtime {runtime}, root inside is root outside (without capabilities); to change this, set userns-remap "
        "in the engine, which applies to all of its containers"
    )


def ignored_limits(wanted: dict[str, Any], found: dict[str, Any]) -> tuple[str, ...]:
    """Return the limits that the engine ignored, each with the reason. `wanted`: the HostConfig that was sent to the
    engine. `found`: the HostConfig that the container got."""
    names = {"Memory": ["memory_mb"], "NanoCpus": ["cpus"], "PidsLimit": ["pids"], "Ulimits": ["file_mb", "open_files"]}
    ignored = [limit for key, limits in names.items() if wanted.get(key) and not found.get(key) for limit in limits]
    reason = "the engine ignores it; rootless Podman enforces it from version 5.5 on and with control groups v2"
    return tuple(f"{limit}: {reason}" for limit in ignored)


async def container_bytes(engine: aiodocker.Docker, name: str) -> int:
    """Return the size of a container's own files and volumes, as the engine measures it."""
    container: dict[str, Any] = await engine._query_json(f"containers/{name}/json", params={"size": "true"})
    volumes = {mount["Name"] for mount in container["Mounts"] if mount["Type"] == "volume"}
    found = await _all_volumes(engine)
    sizes = [int(volume["UsageData"]["Size"]) for volume in found if volume["Name"] in volumes]
    return int(container.get("SizeRw") or 0) + sum(sizes)


async def _all_volumes(engine: aiodocker.Docker) -> list[dict[str, Any]]:
    for attempt in range(1, DF_ATTEMPTS + 1):
        try:
            found = await engine._query_json("system/df", params={"type": "volume"})
        except require_aiodocker().DockerError as error:
            # Podman fails if any container is removed while it counts.
            if attempt == DF_ATTEMPTS or "no such container" not in error.message:
                raise
        else:
            break
    return list(found["Volumes"] or ())


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    library = require_aiodocker()
    try:
        yield
    except library.DockerError as error:
        if error.status in (404, 409) or PODMAN_WRONG_STATE in error.message:
            raise SandboxEnded(f"the container has ended: {error.message}") from error
        raise SandboxError(f"the Docker engine reports: {error.message}") from error
    except OSError as error:
        if type(error).__module__.startswith("aiohttp"):
            raise SandboxEnded(f"the connection to the Docker engine was lost: {error}") from error
        raise


@contextlib.asynccontextmanager
async def _stream_of(execution: Any) -> AsyncIterator[Any]:
    """Start a command, and abort its connection at the end.

    If the program does not read its whole input, the connection would otherwise stay open forever. Closing the client
    would then wait for this connection.
    """
    transport: Any = None
    try:
        async with execution.start(detach=False) as stream:
            transport = stream._resp.connection.transport
            yield stream
    finally:
        # A transport that has written everything and is closed cannot be aborted (Python 3.11: it forgets its loop).
        if transport is not None and (not transport.is_closing() or transport.get_write_buffer_size()):
            transport.abort()


class CommandStream:
    def __init__(self, stdin: bytes, callback: OutputCallback | None, limit: int) -> None:
        self.out, self.err = OutputTail(limit), OutputTail(limit)
        self._stdin = stdin
        self._callback = callback
        self._messages = 0

    async def follow(self, execution: Any) -> int:
        """Start the command, collect its output, and return its exit status.

        The stream ends only when no process holds the output any more. A background process may hold it for long. So
        the engine is also asked, at growing intervals, whether the command itself has ended.
        """
        async with _stream_of(execution) as stream:
            reader = asyncio.ensure_future(self._read(stream))
            writer = asyncio.ensure_future(self._write(stream)) if self._stdin else None
            try:
                pause = 0.25
                while not (await asyncio.wait({reader}, timeout=pause))[0]:
                    if not (await execution.inspect())["Running"]:
                        await self._wait_until_silent(reader)
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

    async def _wait_until_silent(self, reader: asyncio.Future[None]) -> None:
        """Wait until the stream ends, or is silent for two intervals.

        One interval is not enough. If this process was suspended, the interval may end before the output that arrived
        meanwhile is read.
        """
        silent = 0
        while silent < 2 and not reader.done():
            before = self._messages
            await asyncio.wait({reader}, timeout=DRAIN_SECONDS / 2)
            silent = silent + 1 if self._messages == before else 0

    async def _exit_code(self, execution: Any) -> int:
        # The stream may end a moment before the engine knows the exit status.
        pause = 0.002
        while (state := await execution.inspect())["Running"] or state["ExitCode"] is None:
            await asyncio.sleep(pause)
            pause = min(0.1, pause * 2)
        return int(state["ExitCode"])

    async def _read(self, stream: Any) -> None:
        while (message := await stream.read_out()) is not None:
            self._messages += 1
            (self.out if message.stream == 1 else self.err).add(message.data)
            if self._callback is not None:
                self._callback(message.data)

    async def _write(self, stream: Any) -> None:
        try:
            for offset in range(0, len(self._stdin), 1 << 16):
                await stream.write_in(self._stdin[offset : offset + (1 << 16)])
        except (ConnectionError, RuntimeError):
            return  # the program ended without reading all of its input; its exit status says why


def pack_archive(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Return a tar archive of these entries and their contents, in the format that the engine takes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry, data in entries:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


# ---------------------------------------------------------------- reading a container's files, without its programs


async def kill_container(container: Any) -> None:
    """End all processes of a container; do nothing if it has ended already."""
    try:
        await container.kill()
    except require_aiodocker().DockerError as error:
        if error.status != 409:
            raise


async def changed_names(engine: aiodocker.Docker, name: str, folder: str) -> set[str] | None:
    """Return the entries of `folder` whose content differs between a container and its image. `.git` is left out.

    Returns None if any entry may differ: the folder was replaced, or a changed entry has a name that is not UTF-8.
    Raises `TreeTooLarge` if the engine's list is longer than `CHANGES_BYTES`.
    """
    listing = bytearray()
    async with engine._query(f"containers/{name}/changes", method="GET", timeout=None) as response:
        try:
            async for chunk in response.content.iter_chunked(1 << 20):
                listing += chunk
                if len(listing) > CHANGES_BYTES:
                    raise TreeTooLarge(f"the list of changed files has more than {CHANGES_BYTES >> 20} MiB")
        finally:
            response.close()
    found: set[str] = set()
    for change in await asyncio.to_thread(json.loads, listing) or ():
        path, replaced = str(change["Path"]), change["Kind"] != CHANGED
        if replaced and (folder + "/").startswith(path + "/"):
            return None
        if path.startswith(folder + "/"):
            found.add(path[len(folder) + 1 :].partition("/")[0])
    if any(UNREADABLE in one for one in found):  # the engine's JSON cannot name a file whose name is not UTF-8
        return None
    return found - {".git"}


async def fetch_tree(engine: aiodocker.Docker, name: str, folder: str, top_names: set[str] | None) -> SandboxTree:
    """Read `folder` of a container, or only the entries `top_names` of `folder`. Raise `TreeTooLarge` if the files
    exceed a limit.

    The engine itself packs the files into archives. No program in the container takes part."""
    file = tempfile.TemporaryFile(prefix="polar-tree-")  # noqa: SIM115 - the tree closes the file
    try:
        starts: dict[int, bytes] = {}
        for top in [""] if top_names is None else sorted(top_names):
            start = file.tell()
            if await _fetch_archive(engine, name, posixpath.join(folder, top).rstrip("/"), file):
                starts[start] = os.fsencode(top)
        names = None if top_names is None else {os.fsencode(top) for top in top_names}
        return await asyncio.to_thread(ArchiveTree, file, starts, names)
    except BaseException:
        file.close()
        raise


async def _fetch_archive(engine: aiodocker.Docker, name: str, path: str, file: BinaryIO) -> bool:
    """Append the archive of a path to the file; return False if there is no such path."""
    library = require_aiodocker()
    query = engine._query(f"containers/{name}/archive", method="GET", params={"path": path}, timeout=None)
    try:
        async with query as response:
            try:
                async for chunk in response.content.iter_chunked(1 << 20):
                    await asyncio.to_thread(file.write, chunk)
                    if file.tell() > ARCHIVE_BYTES:
                        raise TreeTooLarge(f"{path} holds more than {ARCHIVE_BYTES >> 20} MiB")
            finally:
                response.close()  # or the engine would send the rest, which may be endless
    except library.DockerError as error:
        if error.status == 404 and "no such container" not in error.message.lower():
            return False
        raise
    return True


async def remove_container(engine: aiodocker.Docker, name: str) -> bool:
    """Kill and remove a container with its volumes. Return False if the container does not exist."""
    library = require_aiodocker()
    container = engine.containers.container(name)
    try:
        try:
            await container.delete(force=True, v=True)
        except library.DockerError as error:
            if PODMAN_WRONG_STATE not in error.message:
                raise
            # The container ended while Podman was about to kill it, so it can be removed now.
            await container.wait()
            await container.delete(force=True, v=True)
    except library.DockerError as error:
        if error.status == 404:
            return False
        if error.status == 409 and "already in progress" in error.message:
            return True
        raise SandboxError(f"container {name} could not be removed: {error.message}") from error
    return True


async def sweep_containers(records: Sequence[orphans.SandboxRecord], report: orphans.SweepReport) -> None:
    """Find the containers of dead owners by record and by label, and remove them. If no engine answers, all remain."""
    named = {record.container for record in records if record.container}
    try:
        async with docker_client() as engine:
            found = await engine.containers.list(all=True, filters=json.dumps({"label": [orphans.OWNER_LABEL]}))
            for container in found:
                labels = container["Labels"]
                if orphans.OwnerProcess.parse(json.loads(labels[orphans.OWNER_LABEL])).dead():
                    named.add(labels[orphans.LABEL])
            for name in sorted(named, reverse=True):  # a helper container (`-net`) before the one it depends on
                sandbox_id = name.removesuffix("-net")
                try:
                    if await remove_container(engine, name):
                        report.add(sandbox_id, "container", name)
                except SandboxError as error:
                    report.add_failure(sandbox_id, f"{name}: {error}")
    except SandboxUnavailable as error:
        if named:
            log.warning("orphaned containers %s stay until a Docker engine answers: %s", sorted(named), error)
        report.remaining |= named
