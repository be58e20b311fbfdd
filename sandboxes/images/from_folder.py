"""Build an image from a task's folder. The folder's Dockerfile is untrusted: its commands run with limits, and without
a network unless the caller allows one."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandboxes import docker_engine
from sandboxes.base import OutputTail, SandboxError

if TYPE_CHECKING:
    import aiodocker

CPU_PERIOD = 100_000
LOG_LIMIT = 16 << 10


@dataclass(frozen=True)
class BuildLimits:
    """Limits of a build. `seconds` limits the whole build, all other values limit each command of the Dockerfile.
    `file_mb` limits the size of a file that a command writes."""

    network: bool = False
    memory_mb: int = 4096
    cpus: float = 2.0
    file_mb: int = 8192
    seconds: float = 1800.0

    def parameters(self, *, podman: bool = False) -> dict[str, str]:
        """Return the limits as parameters of POST /build: https://docs.docker.com/reference/api/engine/

        `podman`: the engine is Podman, whose `ulimits` have another form.
        """
        memory, size = str(self.memory_mb << 20), self.file_mb << 20
        found = {"memory": memory, "memswap": memory, "cpuperiod": str(CPU_PERIOD)}
        found["cpuquota"] = str(int(self.cpus * CPU_PERIOD))
        limit = f"fsize={size}:{size}" if podman else {"Name": "fsize", "Soft": size, "Hard": size}
        found["ulimits"] = json.dumps([limit])
        return found if self.network else {**found, "networkmode": "none"}


async def build_image(engine: aiodocker.Docker, context: bytes, tag: str, limits: BuildLimits) -> None:
    """Build `context`, a tar archive with a Dockerfile. If the build fails, raise `SandboxError` with the end
    of the log."""
    library = docker_engine.require_aiodocker()
    log = OutputTail(LOG_LIMIT)
    podman = docker_engine.is_podman(await docker_engine.engine_info(engine))
    parameters = {"t": tag, "rm": "1", "forcerm": "1", **limits.parameters(podman=podman)}
    try:
        async with asyncio.timeout(limits.seconds):
            async for message in _messages(engine, context, parameters):
                log.add(str(message.get("stream", "")).encode())
    except library.DockerError as error:
        raise SandboxError(_describe(error.message, log, limits)) from error
    except TimeoutError as error:
        raise SandboxError(_describe(f"not built within {limits.seconds:.0f} s", log, limits)) from error


async def _messages(
    engine: aiodocker.Docker, context: bytes, parameters: dict[str, str]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of the engine. If the connection is closed, the engine ends the build."""
    images: Any = engine.images
    request = engine._query(  # aiodocker's `images.build` has no parameters for the limits
        "build",
        "POST",
        params=parameters,
        headers={"content-type": "application/x-tar"},
        data=io.BytesIO(context),
        timeout=None,
    )
    async for message in images._handle_response(request, True):
        yield message


def _describe(problem: str, log: OutputTail, limits: BuildLimits) -> str:
    lines = [problem, log.value().decode(errors="replace")[-1000:].strip()]
    if not limits.network:
        lines.append("The build has no network: set the task's environment.build_network or sandboxes.build_network.")
    return "\n".join(line for line in lines if line)
