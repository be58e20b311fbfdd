"""From what a task needs to a sandbox that has it: images, repositories, folders, limits.

What takes long is made once and kept by its content: an image under the digest of its folder, a repository as a bundle
that holds the base commit and its ancestors and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_proxy.rewards.harbor import folder_digest, folder_files
from polar_proxy.rollouts.git import WorkspaceError
from polar_proxy.rollouts.pool import SandboxOpener
from polar_proxy.rollouts.workspace import TaskNotPossibleError, unsupported_reason, uses_image, write_task_files
from polar_proxy.tasks import Environment, Repository, Task
from sandboxes import Mount, ResourceLimits, Sandbox, SandboxSpec, default_state_dir, docker_engine, open_sandbox
from sandboxes.base import SandboxKind

_FETCH_SECONDS = 900.0
_BUILD_SECONDS = 1800.0


class TaskSandboxes:
    """Sandboxes for tasks, of one kind. `cache`: where bundles are kept (default: beside the sandboxes' register);
    `opener` opens them (a pool's `take`)."""

    def __init__(self, kind: SandboxKind, cache: Path | None = None, *, opener: SandboxOpener = open_sandbox) -> None:
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
        """What to open for this task; makes its image and bundle first if need be. `memory_mb` is for tasks that do
        not say.

        Raises `TaskNotPossibleError` where this kind of sandbox cannot hold it, `WorkspaceError` where something
        cannot be made.
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
        """What an evaluator of this task works in."""
        return await self.spec(task, memory_mb=2048, labels={**labels, "polar.role": "evaluator"})

    @contextlib.asynccontextmanager
    async def fresh(self, task: Task, labels: Mapping[str, str]) -> AsyncIterator[Sandbox]:
        """A new sandbox with the task's own state, for an evaluator."""
        async with await self._open(self.kind, await self.evaluator(task, labels)) as sandbox:
            await write_task_files(task, sandbox, await self.bundle(task))
            yield sandbox

    async def bundle(self, task: Task) -> Path | None:
        """The task's repository up to its commit, as a file; None if it has none."""
        repository = task.environment.repository
        if repository is None:
            return None
        folder = self._cache or await asyncio.to_thread(default_state_dir) / "repositories"
        commit = await _commit(repository)
        name = hashlib.sha256(f"{repository.source}\0{commit}".encode()).hexdigest()[:32]
        path = folder / f"{name}.bundle"
        async with self._locks[str(path)]:
            if not path.exists():
                await _make_bundle(repository.source, commit, path)
        return path

    async def _image(self, environment: Environment) -> tuple[str | None, str | None]:
        """The image and the workspace in it."""
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
            raise WorkspaceError(f"the image {image} has no WORKDIR, so it is not known where the agent shall work")
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
        said = "".join(lines)[-1000:].strip()
        raise WorkspaceError(f"the image of {folder} cannot be built: {error.message}\n{said}".strip()) from error


def _pack_folder(folder: Path) -> io.BytesIO:
    """Return the folder as a build context."""
    entries = []
    for name, (data, executable) in folder_files(folder).items():
        entry = tarfile.TarInfo(name)
        entry.mode = 0o755 if executable else 0o644
        entries.append((entry, data))
    return io.BytesIO(docker_engine.pack_archive(entries))


# ---------------------------------------------------------------- repositories


async def _commit(repository: Repository) -> str:
    """The commit's full name where the repository is a folder; else as it was given."""
    if not Path(repository.source).is_dir():
        return repository.commit
    words = await _git("-C", repository.source, "rev-parse", "-q", "--verify", f"{repository.commit}^{{commit}}")
    return words.decode().strip()


async def _make_bundle(source: str, commit: str, path: Path) -> None:
    """A bundle of `commit` and its ancestors, written aside and renamed, so that it is whole or not there."""
    await asyncio.to_thread(path.parent.mkdir, mode=0o700, parents=True, exist_ok=True)
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=path.parent, prefix="making-"))
    try:
        work = folder / "work.git"
        await _git("init", "-q", "--bare", str(work))
        if Path(source).is_dir():
            # Read in place: its objects are not copied to be packed.
            objects = (await _git("-C", source, "rev-parse", "--git-path", "objects")).decode().strip()
            alternates = work / "objects" / "info" / "alternates"
            await asyncio.to_thread(alternates.write_text, f"{(Path(source) / objects).resolve()}\n")
        else:
            await _fetch(work, source, commit)
        await _git("-C", str(work), "update-ref", "refs/heads/base", f"{commit}^{{commit}}")
        made = folder / "made.bundle"
        await _git("-C", str(work), "bundle", "create", "-q", str(made), "refs/heads/base")
        await asyncio.to_thread(os.chmod, made, 0o644)  # root inside a container has lost its right to read all
        await asyncio.to_thread(made.replace, path)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _fetch(work: Path, source: str, commit: str) -> None:
    """Get the commit from a URL or a bundle: by its name where the other side allows that, else with everything."""
    if "://" in source:
        with contextlib.suppress(WorkspaceError):
            await _git("-C", str(work), "fetch", "-q", "--no-tags", source, commit)
            return
    await _git("-C", str(work), "fetch", "-q", "--no-tags", source, "+refs/*:refs/in/*")


async def _git(*arguments: str) -> bytes:
    """git on this machine; it never asks at a terminal. Raises `WorkspaceError`."""
    process = await asyncio.create_subprocess_exec(
        "git",
        *("-c", "safe.directory=*", "-c", "gc.auto=0"),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_FETCH_SECONDS):
            out, err = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if process.returncode:
        words = err.decode(errors="replace").strip()[-400:] or f"exit {process.returncode}"
        raise WorkspaceError(f"the task's repository cannot be read: {words}")
    return out
