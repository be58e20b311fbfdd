"""The Docker engine: reaching it, its errors as ours, following one command, removing containers.

aiodocker and not docker-py: an agent's command runs for minutes and many run at once, which with docker-py costs a
thread each, and its exec socket loses output that arrives together with the response header.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sandboxes.base import OutputCallback, OutputTail, SandboxEnded, SandboxError, SandboxUnavailable

from . import images, orphans

if TYPE_CHECKING:
    import aiodocker

log = logging.getLogger(__name__)

DRAIN_SECONDS = 1.0
"""A command is over, and its output is believed to have come when nothing more did for so long."""


def module() -> Any:
    try:
        import aiodocker
    except ImportError as error:
        raise SandboxUnavailable("aiodocker is not installed (pip install 'polar-proxy[docker]')") from error
    return aiodocker


@contextlib.asynccontextmanager
async def docker_client() -> AsyncIterator[aiodocker.Docker]:
    """A client of the engine that DOCKER_HOST or the current context names. Raises `SandboxUnavailable`."""
    library = module()
    try:
        engine: aiodocker.Docker = library.Docker()
    except (AssertionError, ValueError) as error:  # aiodocker asserts that it found an address
        raise SandboxUnavailable("no Docker engine: no socket was found and DOCKER_HOST is not set") from error
    async with engine:
        try:
            await engine.system.info()
        except (library.DockerError, OSError) as error:
            raise SandboxUnavailable(f"the Docker engine does not answer: {error}") from error
        yield engine


async def find_image(engine: aiodocker.Docker, image: str | None) -> str:
    """The image to run, checked to be there. Raises `SandboxUnavailable` with the way to get it."""
    name = image or images.tag()
    try:
        await engine.images.inspect(name)
    except module().DockerError as error:
        if error.status != 404:
            raise
        cure = f"docker pull {image}" if image else "python -m sandboxes.images.build"
        raise SandboxUnavailable(f"the image {name} is not on this machine (get it with: {cure})") from error
    return name


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """The engine's errors as ours."""
    library = module()
    try:
        yield
    except library.DockerError as error:
        if error.status in (404, 409):
            raise SandboxEnded(f"the container has ended: {error.message}") from error
        raise SandboxError(f"the Docker engine: {error.message}") from error
    except OSError as error:
        if type(error).__module__.startswith("aiohttp"):
            raise SandboxEnded(f"the Docker engine went away: {error}") from error
        raise


@contextlib.asynccontextmanager
async def _stream_of(execution: Any) -> AsyncIterator[Any]:
    """Start a command; its connection is gone when this is left. (A connection with input that nobody takes any more
    would stay open for ever, and the client would wait for that when it is closed.)"""
    transport: Any = None
    try:
        async with execution.start(detach=False) as stream:
            transport = stream._resp.connection.transport
            yield stream
    finally:
        if transport is not None:
            transport.abort()


class CommandStream:
    """The output of one command."""

    def __init__(self, stdin: bytes, callback: OutputCallback | None, limit: int) -> None:
        self.out, self.err = OutputTail(limit), OutputTail(limit)
        self._stdin = stdin
        self._callback = callback
        self._messages = 0

    async def follow(self, execution: Any) -> int:
        """Start the command, collect its output, return its exit status.

        The stream ends only when the last holder of the output does, which may be a background process; so the
        engine is also asked, ever more seldom, whether the command itself is over.
        """
        async with _stream_of(execution) as stream:
            reader = asyncio.ensure_future(self._read(stream))
            writer = asyncio.ensure_future(self._write(stream)) if self._stdin else None
            try:
                pause = 0.25
                while not (await asyncio.wait({reader}, timeout=pause))[0]:
                    if not (await execution.inspect())["Running"]:
                        await self._drained(reader)
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

    async def _drained(self, reader: asyncio.Future[None]) -> None:
        """Until the stream ends or falls silent, twice over: what came while this process stood still is read first."""
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
            return  # the program ended without reading it all: its exit status tells


async def remove_container(engine: aiodocker.Docker, name: str) -> bool:
    """Kill and remove a container with its volumes; False if there is none."""
    library = module()
    try:
        await engine.containers.container(name).delete(force=True, v=True)
    except library.DockerError as error:
        if error.status == 404:
            return False
        if error.status == 409 and "already in progress" in error.message:
            return True
        raise SandboxError(f"container {name} could not be removed: {error.message}") from error
    return True


async def sweep_containers(
    records: Sequence[orphans.SandboxRecord], removed: list[orphans.RemovedItem], problems: list[str]
) -> set[str]:
    """Remove the containers of dead owners, by record and by label.

    Returns the names that have to wait, because no engine answers.
    """
    named = {record.container for record in records if record.container}
    try:
        async with docker_client() as engine:
            found = await engine.containers.list(all=True, filters=json.dumps({"label": [orphans.OWNER_LABEL]}))
            for container in found:
                labels = container["Labels"]
                if orphans.OwnerProcess.parse(json.loads(labels[orphans.OWNER_LABEL])).dead():
                    named.add(labels[orphans.LABEL])
            for name in sorted(named):
                try:
                    if await remove_container(engine, name):
                        removed.append(orphans.RemovedItem(name, "container", name))
                except SandboxError as error:
                    problems.append(f"{name}: {error}")
    except SandboxUnavailable as error:
        if named:
            log.warning("left-over containers %s stay until a Docker engine answers: %s", sorted(named), error)
        return named
    return set()
