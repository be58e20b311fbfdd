"""Images with programs baked in: an image, and files and folders of this machine at their own places in it.

Made once for each content: the tag is a hash of the image they are laid upon and of every file's path, mode and bytes.
So a container of it needs no mount of this machine, and may be started by an engine that cannot see its disk.
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

from .. import docker_engine
from ..base import SandboxError

if TYPE_CHECKING:
    import aiodocker

REPOSITORY = "polar-baked"
BASE_LABEL = "polar.base"
BUILD_SECONDS = 1800.0
_ROOT = "root.tar"


@dataclass(frozen=True, slots=True)
class PrebuiltImage:
    """`made`: it was not there yet."""

    image: str
    base: str
    made: bool
    seconds: float


async def prebuild(engine: aiodocker.Docker, base: str | None, paths: Sequence[Path]) -> PrebuiltImage:
    """The image `base` (None: the default one) with `paths`, which is made if it is not there.

    Raises `SandboxUnavailable` where there is no such image, `SandboxError` where it cannot be made.
    """
    began = time.monotonic()
    name = await docker_engine.find_image(engine, base)
    with docker_engine.translated():
        parent = str((await engine.images.inspect(name))["Id"])
    image = await asyncio.to_thread(prebuilt_tag, parent, paths)
    library = docker_engine.module()
    try:
        await engine.images.inspect(image)
    except library.DockerError as error:
        if error.status != 404:
            raise SandboxError(f"the Docker engine: {error.message}") from error
    else:
        return PrebuiltImage(image, name, False, time.monotonic() - began)
    with tempfile.TemporaryFile(prefix="polar-bake-") as context:
        await asyncio.to_thread(write_context, context, parent, paths)
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                stream = engine.images.build(
                    fileobj=context, encoding="identity", tag=image, stream=True, rm=True, labels={BASE_LABEL: name}
                )
                said = [str(line.get("stream", "")) async for line in stream]
        except library.DockerError as error:
            raise SandboxError(f"the image {image} cannot be made: {error.message}") from error
        except TimeoutError as error:
            raise SandboxError(f"the image {image} is not made within {BUILD_SECONDS:.0f} s") from error
    if not any("Successfully" in line for line in said):
        raise SandboxError(f"the image {image} cannot be made: {''.join(said)[-500:].strip()}")
    return PrebuiltImage(image, name, True, time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class StoredPrebuiltImage:
    """An image that was baked. `removed`: by `prune_prebuilt`; `why`: why, or why not. `bytes`: what it has beyond
    its base, all
    of it where the base is gone."""

    image: str
    base: str
    bytes: int
    removed: bool
    why: str


async def prune_prebuilt(
    engine: aiodocker.Docker, agents: Sequence[Sequence[Path]], *, base: str | None = None, everything: bool = False
) -> list[StoredPrebuiltImage]:
    """Remove the images that nobody uses any more: baking one of `agents` (the paths of each) on the image's base, as
    that is now, would give another one, and no container is made of it. With `everything` the first is not asked; with
    `base` only images upon that one are looked at.

    A process that goes on with such an image fails to open sandboxes of it until it starts anew. Raises SandboxError.
    """
    library = docker_engine.module()
    found: list[StoredPrebuiltImage] = []
    current: dict[str, tuple[set[str], int]] = {}
    label = BASE_LABEL if base is None else f"{BASE_LABEL}={base}"
    with docker_engine.translated():
        images = await engine.images.list(filters={"label": [label]})
    for image in images:
        name = next((name for name in image["RepoTags"] or [] if name.startswith(f"{REPOSITORY}:")), None)
        if name is None:
            continue
        below = str(image["Labels"][BASE_LABEL])
        if below not in current:
            current[below] = await _current(engine, below, [] if everything else agents)
        names, size = current[below]
        one = StoredPrebuiltImage(name, below, int(image["Size"]) - size, False, "an installed agent's")
        if name not in names:
            try:
                await engine.images.delete(name)
                one = replace(one, removed=True, why="asked for" if everything else "no installed agent's any more")
            except library.DockerError as error:
                if error.status != 409:
                    raise SandboxError(f"the image {name} cannot be removed: {error.message}") from error
                one = replace(one, why="a container is made of it")
        found.append(one)
    return found


async def _current(engine: aiodocker.Docker, base: str, agents: Sequence[Sequence[Path]]) -> tuple[set[str], int]:
    """What baking these on `base` would be called, and the bytes of `base`; nothing where there is no such image."""
    try:
        parent = await engine.images.inspect(base)
    except docker_engine.module().DockerError as error:
        if error.status != 404:
            raise SandboxError(f"the Docker engine: {error.message}") from error
        return set(), 0
    names = {await asyncio.to_thread(prebuilt_tag, str(parent["Id"]), paths) for paths in agents if paths}
    return names, int(parent["Size"])


def prebuilt_tag(parent: str, paths: Sequence[Path]) -> str:
    """The name of an image of exactly this content. Reads all of it."""
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
    """What an image is built of: two lines, and an archive that the engine unpacks at the root."""
    with tempfile.TemporaryFile(prefix="polar-bake-") as inner:
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
    """It and all that it holds, in one order everywhere; no links are followed, and what is no file is left out."""
    path = path.absolute()
    yield path
    if path.is_dir() and not path.is_symlink():
        for one in sorted(path.rglob("*")):
            mode = one.lstat().st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
                yield one


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Nobody's in particular, readable by every user of the image, and of no particular time."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = 0
    entry.mode |= 0o555 if entry.isdir() or entry.mode & 0o100 else 0o444

    return entry
