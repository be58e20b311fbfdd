"""Sandboxes with the image, repository, folders and resource limits of a task.

An image is built once for each content of its folder, and named by the folder's digest; repositories are bundled once
(`bundles`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_proxy.rewards.harbor import folder_digest, folder_files
from polar_proxy.rollouts.pool import SandboxOpener
from polar_proxy.rollouts.workspace.bundles import make_bundle
from polar_proxy.rollouts.workspace.git import WorkspaceError
from polar_proxy.rollouts.workspace.prepare import (
    TaskNotPossibleError,
    unsupported_reason,
    uses_image,
    write_task_files,
)
from polar_proxy.tasks import Environment, Task
from sandboxes import Mount, ResourceLimits, Sandbox, SandboxSpec, default_state_dir, docker_engine, open_sandbox
from sandboxes.base import SandboxKind

_BUILD_SECONDS = 1800.0


class TaskSandboxes:
    """Opens sandboxes of one kind for tasks."""

    def __init__(self, kind: SandboxKind, cache: Path | None = None, *, opener: SandboxOpener = open_sandbox) -> None:
        """`cache` is the folder of bundles (default: beside the register of sandboxes). `opener` opens sandboxes, for
        example `SandboxPool.take`."""
        self.kind: SandboxKind = kind
        self._open = opener
        self._cache = cache
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def spec(
        self,
        task: Task,
        *,
        memory_mb: int,
        labels: Mapping[str, str],
        mounts: Sequence[Mount] = (),
    ) -> SandboxSpec:
        """Return the specification of the task's sandbox, making its image and bundle first if necessary.

        `memory_mb` is for tasks that do not say what they need. Raises `TaskNotPossibleError` if this kind of sandbox
        cannot hold the task, `WorkspaceError` if image or bundle cannot be made.
        """
        if (reason := unsupported_reason(task, self.kind)) is not None:
            raise TaskNotPossibleError(reason)
        environment = task.environment
        image, workdir = await self._image(environment)
        if (bundle := await self.bundle(task)) is not None:
            mounts = (*mounts, Mount(bundle, str(bundle)))
        memory = environment.memory_mb or memory_mb
        return SandboxSpec(
            image=image,
            mounts=tuple(mounts),
            limits=ResourceLimits(memory_mb=None if self.kind == "process" else memory, cpus=environment.cpus),
            env=environment.env,
            labels=labels,
            workdir=workdir,
            folders=environment.folders,
        )

    async def evaluator(self, task: Task, labels: Mapping[str, str]) -> SandboxSpec:
        """Return the specification of the sandbox in which the task is evaluated."""
        return await self.spec(task, memory_mb=2048, labels={**labels, "polar.role": "evaluator"})

    @contextlib.asynccontextmanager
    async def fresh(self, task: Task, labels: Mapping[str, str]) -> AsyncIterator[Sandbox]:
        """Open a new sandbox with the task's own files, for an evaluator."""
        async with await self._open(self.kind, await self.evaluator(task, labels)) as sandbox:
            await write_task_files(task, sandbox, await self.bundle(task))
            yield sandbox

    async def bundle(self, task: Task) -> Path | None:
        """Return a file with the task's repository up to its commit; None if the task has no repository."""
        repository = task.environment.repository
        if repository is None:
            return None
        folder = self._cache or await asyncio.to_thread(default_state_dir) / "repositories"
        async with self._locks[f"{repository.source} {repository.commit}"]:
            return await make_bundle(repository, folder)

    async def _image(self, environment: Environment) -> tuple[str | None, str | None]:
        """Return the image and the workspace in it."""
        if not uses_image(environment, self.kind):
            return None, environment.workdir
        async with docker_engine.docker_client() as engine:
            image = environment.image
            if environment.build is not None:
                image = f"polar-task:{(await asyncio.to_thread(folder_digest, Path(environment.build)))[:16]}"
                async with self._locks[image]:
                    await _build_image(engine, Path(environment.build), image)
            if environment.workdir is not None or environment.repository is not None:
                return image, environment.workdir
            with docker_engine.translate_errors():
                found = await engine.images.inspect(await docker_engine.find_image(engine, image))
        workdir = found["Config"].get("WorkingDir") or "/"
        if workdir == "/":
            raise WorkspaceError(f"the image {image} has no WORKDIR; set the task's environment.workdir")
        return image, workdir


async def _build_image(engine: Any, folder: Path, tag: str) -> None:
    with contextlib.suppress(docker_engine.require_aiodocker().DockerError):
        await engine.images.inspect(tag)
        return
    context = await asyncio.to_thread(_pack_folder, folder)
    async with asyncio.timeout(_BUILD_SECONDS):
        await _build(engine, folder, tag, context)


async def _build(engine: Any, folder: Path, tag: str, context: io.BytesIO) -> None:
    lines: list[str] = []
    try:
        async for line in engine.images.build(fileobj=context, encoding="identity", tag=tag, stream=True, rm=True):
            lines.append(str(line.get("stream", "")))
    except docker_engine.require_aiodocker().DockerError as error:
        output = "".join(lines)[-1000:].strip()
        raise WorkspaceError(f"the image of {folder} cannot be built: {error.message}\n{output}".strip()) from error


def _pack_folder(folder: Path) -> io.BytesIO:
    """Return the folder as a build context."""
    entries = []
    for name, (data, executable) in folder_files(folder).items():
        entry = tarfile.TarInfo(name)
        entry.mode = 0o755 if executable else 0o644
        entries.append((entry, data))
    return io.BytesIO(docker_engine.pack_archive(entries))
