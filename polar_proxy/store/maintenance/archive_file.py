"""Unpacks archives piece by piece and within bounds, because they may come from anyone.

An archive has `polar.db`, the artifacts under their hashes, and nothing else. It unpacks to at most `_RATIO` times its
own size and some slack. Honest archives stay far below this limit, because their database is compressed already.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path

from polar_proxy.errors import StoreError, UsageError

DATABASE = "polar.db"
_ARTIFACT = re.compile(r"artifacts/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_MEMBERS = 1_000_000
_RATIO = 200
_SLACK = 256 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class UnpackedArchive:
    database: Path
    artifacts: frozenset[str]
    """The hashes of the artifacts. Their files lie in the same folders, under the same names, as in a store."""
    unpacked_limit: int
    """Maximum total size in bytes of the unpacked values of the database, which are stored compressed."""


def artifact_member(sha256: str) -> str:
    return f"artifacts/{sha256[:2]}/{sha256}"


def unpack(file: Path, folder: Path, max_bytes: int) -> UnpackedArchive:
    """Unpack an archive into an empty folder.

    `max_bytes`: maximum total size of the unpacked files. They must also not exceed `_RATIO` times the archive's size
    plus `_SLACK`. Raises UsageError if `file` does not exist. Raises StoreError if the archive is damaged, exceeds the
    limit, or contains a file that Polar never writes.
    """
    try:
        size = file.stat().st_size
        limit = min(max_bytes, _RATIO * size + _SLACK)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _check_members(file, members, limit, max_bytes)
            for member in members:
                _extract(file, archive, member, folder)
    except FileNotFoundError:
        raise UsageError(f"There is no file {file}") from None
    except (OSError, zipfile.BadZipFile, NotImplementedError, EOFError, ValueError) as error:
        raise StoreError(f"{file} cannot be read as an archive: {error}") from error
    artifacts = frozenset(found[2] for member in members if (found := _ARTIFACT.fullmatch(member.filename)))
    return UnpackedArchive(folder / DATABASE, artifacts, limit)


def _check_members(file: Path, members: list[zipfile.ZipInfo], limit: int, max_bytes: int) -> None:
    names = [member.filename for member in members]
    if DATABASE not in names:
        raise StoreError(f"{file} is not a Polar archive: it contains no {DATABASE}")
    if len(members) > _MEMBERS:
        raise StoreError(f"{file} contains {len(members)} files, more than the {_MEMBERS} that an archive may have")
    if len(set(names)) < len(names):
        raise StoreError(f"{file} is damaged: it contains a file twice")
    for member in members:
        kind = stat.S_IFMT(member.external_attr >> 16)
        known = member.filename == DATABASE or _ARTIFACT.fullmatch(member.filename)
        if not known or kind not in (0, stat.S_IFREG) or member.flag_bits & 1:
            raise StoreError(f"{file} contains {member.filename[:200]!r}, which no archive of Polar contains")
    total = sum(member.file_size for member in members)
    if total > limit:
        advice = "--max-gb allows more" if limit == max_bytes else "it was made to fill this machine's disk or memory"
        raise StoreError(f"{file} would unpack to {total >> 20} MiB, above the limit of {limit >> 20} MiB: {advice}")


def _extract(file: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> None:
    target = folder / member.filename
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest = hashlib.sha256()
    # `zipfile` reads no more than the declared size, and checks the sum of what it read.
    with (
        archive.open(member) as source,
        os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out,
    ):
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
    if (found := _ARTIFACT.fullmatch(member.filename)) and digest.hexdigest() != found[2]:
        raise StoreError(f"{file} is damaged: the content of {member.filename} does not match its name, a SHA-256")
