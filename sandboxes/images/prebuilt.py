"""Prebuilt images: a base image with files and folders of this machine at their own paths.

The tag is a hash of the base image and of every file's path, mode and bytes, so that an image is built only once. A
container of the image needs no mounts, so it also starts in an engine that cannot see this machine's disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sandboxes import docker_engine
from sandboxes.base import SandboxError

if TYPE_CHECKING:
    import aiodocker

REPOSITORY = "polar-prebuilt"
BASE_LABEL = "polar.base"
BUILD_SECONDS = 1800.0
_ROOT = "root.tar"


@dataclass(frozen=True, slots=True)
class PrebuiltImage:
    """An image with a harness. `made`: whether `prebuild` built the image, because it did not exist."""

    image: str
    base: str
    made: bool
    seconds: float


async def prebuild(engine: aiodocker.Docker, base: str | None, paths: Sequence[Path]) -> PrebuiltImage:
    """Return an image of `base` (None: the default image) with `paths` added. Build it if it does not exist.

    Raise `SandboxUnavailable` if there is no base image, `SandboxError` if the build fails.
    """
    began = time.monotonic()
    name = await docker_engine.find_image(engine, base)
    with docker_engine.translate_errors():
        parent = str((await engine.images.inspect(name))["Id"])
    image = await asyncio.to_thread(prebuilt_tag, parent, paths)
    if await docker_engine.inspect_image(engine, image) is not None:
        return PrebuiltImage(image, name, False, time.monotonic() - began)
    with tempfile.TemporaryFile(prefix="polar-prebuild-") as context:
        await asyncio.to_thread(write_context, context, parent, paths)
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                stream = engine.images.build(
                    fileobj=context, encoding="identity", tag=image, stream=True, rm=True, labels={BASE_LABEL: name}
                )
                output = [str(line.get("stream", "")) async for line in stream]
        except docker_engine.require_aiodocker().DockerError as error:
            raise SandboxError(f"the image {image} could not be built: {error.message}") from error
        except TimeoutError as error:
            raise SandboxError(f"the image {image} was not built within {BUILD_SECONDS:.0f} s") from error
    if not any("Successfully" in line for line in output):
        raise SandboxError(f"the image {image} could not be built: {''.join(output)[-500:].strip()}")
    return PrebuiltImage(image, name, True, time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class StoredPrebuiltImage:
    """A prebuilt image in the Docker engine, and whether `prune_prebuilt` removed it."""

    image: str
    base: str
    bytes: int
    """Size of the image without its base; the whole size if the base is gone."""
    removed: bool
    why: str
    """Why the image was removed or kept."""


async def prune_prebuilt(
    engine: aiodocker.Docker, agents: Sequence[Sequence[Path]], *, base: str | None = None, everything: bool = False
) -> list[StoredPrebuiltImage]:
    """Remove the prebuilt images that are out of date and unused.

    `agents` has the paths of each installed harness. An image is up to date if prebuilding one of these harnesses now
    would give the same image; with `everything`, every image counts as out of date. An image is unused if no container
    exists that was made from it. `base` limits the removal to images on that base.

    A Polar process looks up each image only once. If that image is removed later, the process can open no more
    sandboxes with it until the process is restarted. Raise SandboxError if an image cannot be removed.
    """
    found: list[StoredPrebuiltImage] = []
    current: dict[str, tuple[set[str], int]] = {}
    label = BASE_LABEL if base is None else f"{BASE_LABEL}={base}"
    with docker_engine.translate_errors():
        images = await engine.images.list(filters={"label": [label]})
    for image in images:
        # Podman puts a registry before the names, such as `localhost/`.
        names = [name.rpartition("/")[2] for name in image["RepoTags"] or []]
        name = next((name for name in names if name.startswith(f"{REPOSITORY}:")), None)
        if name is None:
            continue
        below = str(image["Labels"][BASE_LABEL])
        if below not in current:
            current[below] = await _current(engine, below, [] if everything else agents)
        up_to_date, size = current[below]
        entry = StoredPrebuiltImage(name, below, int(image["Size"]) - size, False, "an installed agent uses it")
        if name not in up_to_date and await _remove_unless_used(engine, name):
            entry = replace(entry, removed=True, why="requested" if everything else "out of date")
        elif name not in up_to_date:
            entry = replace(entry, why="a container uses it")
        found.append(entry)
    return found


async def _remove_unless_used(engine: aiodocker.Docker, name: str) -> bool:
    """Remove an image. Return False if a container uses it."""
    try:
        await engine.images.delete(name)
    except docker_engine.require_aiodocker().DockerError as error:
        if error.status == 409:
            return False
        raise SandboxError(f"the image {name} could not be removed: {error.message}") from error
    return True


async def _current(engine: aiodocker.Docker, base: str, agents: Sequence[Sequence[Path]]) -> tuple[set[str], int]:
    """Return the names of the images that `prebuild` would make now from `base` and each of `agents`. Also return the
    size of `base` in bytes. If `base` no longer exists, return no names and 0."""
    parent = await docker_engine.inspect_image(engine, base)
    if parent is None:
        return set(), 0
    names = {await asyncio.to_thread(prebuilt_tag, str(parent["Id"]), paths) for paths in agents if paths}
    return names, int(parent["Size"])


def prebuilt_tag(parent: str, paths: Sequence[Path]) -> str:
    """Return the name of an image with exactly this content. Reads all files."""
    digest = hashlib.sha256(parent.encode())
    for path in sorted(set(paths)):
        for one in _below(path):
            found = one.lstat()
            what = os.readlink(one).encode() if one.is_symlink() else b""
            if stat.S_ISREG(found.st_mode):
                with one.open("rb") as file:
                    what = hashlib.file_digest(file, "sha256").digest()
            digest.update(f"\0{one}\0{found.st_mode:o}\0".encode(errors="surrogateescape") + what)
    return f"{REPOSITORY}:{digest.hexdigest()[:16]}"


def write_context(file: BinaryIO, parent: str, paths: Sequence[Path]) -> None:
    """Write a build context: a Dockerfile of two lines, and an archive that the engine unpacks at the root."""
    with tempfile.TemporaryFile(prefix="polar-prebuild-") as inner:
        with tarfile.open(fileobj=inner, mode="w", dereference=False) as archive:
            for path in sorted(set(paths)):
                for one in _below(path):
                    archive.add(one, str(one).lstrip("/"), recursive=False, filter=_of_root)
        size = inner.tell()
        inner.seek(0)
        with tarfile.open(fileobj=file, mode="w") as context:
            text = f"FROM {parent}\nADD {_ROOT} /\n".encode()
            entry = tarfile.TarInfo("Dockerfile")
            entry.size = len(text)
            context.addfile(entry, io.BytesIO(text))
            entry = tarfile.TarInfo(_ROOT)
            entry.size = size
            context.addfile(entry, inner)
    file.seek(0)


def _below(path: Path) -> Iterator[Path]:
    """Yield the path and everything below it, in a fixed order.

    Links are not followed; only files, folders and links are included.
    """
    path = path.absolute()
    yield path
    if path.is_dir() and not path.is_symlink():
        for one in sorted(path.rglob("*")):
            mode = one.lstat().st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
                yield one


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make root the owner of an archive entry, make the entry readable by every user, set its modification time to 0,
    and return it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = 0
    entry.mode |= 0o555 if entry.isdir() or entry.mode & 0o100 else 0o444
    return entry
