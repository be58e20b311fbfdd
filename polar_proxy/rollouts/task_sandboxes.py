"""Sandboxes with the image, repository, folders and resource limits of a task.

A task's image is built from a folder: once for each content of the folder, under a name that contains the content's
digest. A task's repository is packed once into a git bundle, which holds only the commit at which the agent starts and
the ancestors of this commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_proxy.config import SandboxSettings
from polar_proxy.rewards.harbor import files_digest, folder_files
from polar_proxy.rollouts.pool import SandboxOpener
from polar_proxy.rollouts.workspace import (
    WorkspaceError,
    check_possible,
    uses_image,
    write_task_files,
)
from polar_proxy.tasks import Environment, GitRepository, Task
from sandboxes import docker_engine
from sandboxes.base import Mount, ResourceLimits, Sandbox, SandboxError, SandboxKind, SandboxSpec
from sandboxes.choice import open_sandbox
from sandboxes.images.from_folder import BuildLimits, build_image
from sandboxes.orphans import default_state_dir

_GIT_SECONDS = 900.0


class TaskSandboxes:
    """Opens sandboxes of one kind for tasks."""

    def __init__(
        self, kind: SandboxKind, settings: SandboxSettings | None = None, *, opener: SandboxOpener = open_sandbox
    ) -> None:
        self.kind: SandboxKind = kind
        self._settings = settings or SandboxSettings()
        self._open = opener
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def spec(
        self,
        task: Task,
        *,
        labels: Mapping[str, str],
        memory_mb: int | None = None,
        mounts: Sequence[Mount] = (),
    ) -> SandboxSpec:
        """Return the specification of the task's sandbox. Make the task's image and bundle first, unless they exist.

        `memory_mb` is the limit for tasks that do not specify their memory; the default is the limit in the settings.
        Raises `TaskNotPossibleError` if this kind of sandbox cannot hold the task, and `WorkspaceError` if the image or
        the bundle cannot be made.
        """
        check_possible(task, self.kind)
        environment = task.environment
        image, workdir = await self._image(environment)
        if (bundle := await self.bundle(task)) is not None:
            mounts = (*mounts, Mount(bundle, str(bundle)))
        settings = self._settings
        memory = environment.memory_mb or memory_mb or settings.memory_mb
        limits = ResourceLimits(
            memory_mb=None if self.kind == "process" else memory,
            cpus=environment.cpus,
            pids=settings.processes,
            disk_mb=environment.disk_mb or settings.disk_mb,
            files=settings.files,
            open_files=settings.open_files,
        )
        return SandboxSpec(
            image=image,
            runtime=settings.docker_runtime,
            mounts=tuple(mounts),
            limits=limits,
            env=environment.env,
            labels=labels,
            workdir=workdir,
            folders=environment.folders,
        )

    async def evaluator(self, task: Task, labels: Mapping[str, str]) -> SandboxSpec:
        memory = self._settings.memory_mb // 2
        return await self.spec(task, memory_mb=memory, labels={**labels, "polar.role": "evaluator"})

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
        folder = await asyncio.to_thread(default_state_dir) / "repositories"
        async with self._locks[f"{repository.source} {repository.commit}"]:
            return await _make_bundle(repository, folder)

    async def _image(self, environment: Environment) -> tuple[str | None, str | None]:
        if not uses_image(environment, self.kind):
            return None, environment.workdir
        async with docker_engine.docker_client() as engine:
            image = environment.image
            if environment.build is not None:
                files = await asyncio.to_thread(folder_files, Path(environment.build))
                image = f"polar-task:{(await asyncio.to_thread(files_digest, files))[:16]}"
                async with self._locks[image]:
                    await _build_image(engine, environment.build, files, image, self._build_limits(environment))
            if environment.workdir is not None or environment.repository is not None:
                return image, environment.workdir
            with docker_engine.translate_errors():
                found = await engine.images.inspect(await docker_engine.find_image(engine, image))
        workdir = found["Config"].get("WorkingDir") or "/"
        if workdir == "/":
            raise WorkspaceError(f"the image {image} has no WORKDIR; set the task's environment.workdir")
        return image, workdir

    def _build_limits(self, environment: Environment) -> BuildLimits:
        settings = self._settings
        return BuildLimits(
            network=environment.build_network or settings.build_network,
            memory_mb=settings.build_memory_mb,
            cpus=settings.build_cpus,
            file_mb=settings.disk_mb,
            seconds=settings.build_seconds,
        )


# ---------------------------------------------------------------- images


async def _build_image(
    engine: Any, folder: str, files: Mapping[str, tuple[bytes, bool]], tag: str, limits: BuildLimits
) -> None:
    if await docker_engine.inspect_image(engine, tag) is not None:
        return
    context = await asyncio.to_thread(_pack_files, files)
    try:
        await build_image(engine, context, tag, limits)
    except SandboxError as error:
        raise WorkspaceError(f"the image of {folder} cannot be built: {error}") from error


def _pack_files(files: Mapping[str, tuple[bytes, bool]]) -> bytes:
    entries = []
    for name, (data, executable) in files.items():
        entry = tarfile.TarInfo(name)
        entry.mode = 0o755 if executable else 0o644
        entries.append((entry, data))
    return docker_engine.pack_archive(entries)


# ---------------------------------------------------------------- bundles


async def _make_bundle(repository: GitRepository, folder: Path) -> Path:
    """Return the path of a repository's bundle in `folder`. If the bundle is missing, make it. Raises `WorkspaceError`
    if git fails."""
    source, commit = repository.source, repository.commit
    if Path(source).is_dir():  # the commit's full name
        output = await _git("-C", source, "rev-parse", "-q", "--verify", "--end-of-options", f"{commit}^{{commit}}")
        commit = output.decode().strip()
    name = hashlib.sha256(f"{source}\0{commit}".encode()).hexdigest()[:32]
    path = folder / f"{name}.bundle"
    if not path.exists():
        await _write_bundle(source, commit, path)
    return path


async def _write_bundle(source: str, commit: str, path: Path) -> None:
    """Write a bundle of `commit` and its ancestors, first under another name, so that `path` is complete or missing."""
    await asyncio.to_thread(path.parent.mkdir, mode=0o700, parents=True, exist_ok=True)
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=path.parent, prefix="making-"))
    try:
        work = folder / "work.git"
        await _git("init", "-q", "--bare", str(work))
        if Path(source).is_dir():
            # Objects are read in place; git would otherwise copy them before it packs them.
            objects = (await _git("-C", source, "rev-parse", "--git-path", "objects")).decode().strip()
            alternates = work / "objects" / "info" / "alternates"
            await asyncio.to_thread(alternates.write_text, f"{(Path(source) / objects).resolve()}\n")
        else:
            await _fetch(work, source, commit)
        await _git("-C", str(work), "update-ref", "refs/heads/base", f"{commit}^{{commit}}")
        made = folder / "made.bundle"
        await _git("-C", str(work), "bundle", "create", "-q", str(made), "refs/heads/base")
        await asyncio.to_thread(os.chmod, made, 0o644)  # root inside a container may not read all files
        await asyncio.to_thread(made.replace, path)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _fetch(work: Path, source: str, commit: str) -> None:
    """Fetch the commit from a URL or a bundle; fetch all refs if the commit alone cannot be fetched."""
    if "://" in source:
        with contextlib.suppress(WorkspaceError):
            await _git("-C", str(work), "fetch", "-q", "--no-tags", "--", source, commit)
            return
    await _git("-C", str(work), "fetch", "-q", "--no-tags", "--", source, "+refs/*:refs/in/*")


async def _git(*arguments: str) -> bytes:
    """Run git on this machine, without a terminal for questions. Raises `WorkspaceError`."""
    process = await asyncio.create_subprocess_exec(
        "git",
        # No transport that runs a command, whatever this machine's git allows.
        *("-c", "safe.directory=*", "-c", "gc.auto=0", "-c", "protocol.ext.allow=never"),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_GIT_SECONDS):
            out, err = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if process.returncode:
        message = err.decode(errors="replace").strip()[-400:] or f"exit {process.returncode}"
        raise WorkspaceError(f"the task's repository cannot be read: {message}")
    return out
