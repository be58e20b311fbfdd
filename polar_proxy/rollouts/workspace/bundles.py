"""Task repositories as git bundles, each made once.

A bundle holds the commit at which the agent starts and its ancestors, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from polar_proxy.rollouts.workspace.git import WorkspaceError
from polar_proxy.tasks import GitRepository

_GIT_SECONDS = 900.0


async def make_bundle(repository: GitRepository, folder: Path) -> Path:
    """Return the bundle of a repository in `folder`, making it first if it is missing. Raises `WorkspaceError`."""
    commit = await _full_commit(repository)
    name = hashlib.sha256(f"{repository.source}\0{commit}".encode()).hexdigest()[:32]
    path = folder / f"{name}.bundle"
    if not path.exists():
        await _write_bundle(repository.source, commit, path)
    return path


async def _full_commit(repository: GitRepository) -> str:
    """Return the commit's full name if the repository is a folder, else the name as given."""
    if not Path(repository.source).is_dir():
        return repository.commit
    output = await _git("-C", repository.source, "rev-parse", "-q", "--verify", f"{repository.commit}^{{commit}}")
    return output.decode().strip()


async def _write_bundle(source: str, commit: str, path: Path) -> None:
    """Write a bundle of `commit` and its ancestors, under another name first, so that it is complete or missing."""
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
    """Fetch the commit from a URL or a bundle: by its name if the server allows that, else with all refs."""
    if "://" in source:
        with contextlib.suppress(WorkspaceError):
            await _git("-C", str(work), "fetch", "-q", "--no-tags", source, commit)
            return
    await _git("-C", str(work), "fetch", "-q", "--no-tags", source, "+refs/*:refs/in/*")


async def _git(*arguments: str) -> bytes:
    """Run git on this machine, without a terminal to ask at. Raises `WorkspaceError`."""
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
