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
from dataclasses import dataclass
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
class Baked:
    """`made`: it was not there yet."""

    image: str
    base: str
    made: bool
    seconds: float


async def bake(engine: aiodocker.Docker, base: str | None, paths: Sequence[Path]) -> Baked:
    """The image `base` (None: the default one) with `paths`, which is made if it is not there.

    Raises `SandboxUnavailable` where there is no such image, `SandboxError` where it cannot be made.
    """
    began = time.monotonic()
    name = await docker_engine.find_image(engine, base)
    with docker_engine.translated():
        parent = str((await engine.images.inspect(name))["Id"])
    image = await asyncio.to_thread(tag, parent, paths)
    library = docker_engine.module()
    try:
        await engine.images.inspect(image)
    except library.DockerError as error:
        if error.status != 404:
            raise SandboxError(f"the Docker engine: {error.message}") from error
    else:
        return Baked(image, name, False, time.monotonic() - began)
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
    return Baked(image, name, True, time.monotonic() - began)


def tag(parent: str, paths: Sequence[Path]) -> str:
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
