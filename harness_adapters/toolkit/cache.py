"""Folders of a cache that are either complete or not there.

A folder stands at ``<cache_root>/<name>/<version>-<hash of the recipe>``, so that a changed recipe makes a new
one and never edits one that a running sandbox has mounted. It is complete when its marker file exists; the marker
is written last, under a lock, so that neither two installers nor one that was killed can leave a half one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness_adapters.base import InstallError

_MARKER = ".complete"
_TAIL_CHARACTERS = 2000


def folder_of(cache_root: Path, name: str, version: str, recipe: object) -> Path:
    """Where the folder stands that is made of `recipe`, which must be JSON."""
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:8]
    return cache_root / name / f"{version}-{digest}"


def is_complete(folder: Path) -> bool:
    """Whether there is nothing left to do."""
    return (folder / _MARKER).is_file()


def ensure(folder: Path, build: Callable[[Path], object]) -> None:
    """Make `folder` with `build` unless it is complete.

    `build` gets the folder's path, where nothing stands, and returns what the marker shall say, which must be JSON.
    When it fails nothing is left.
    """
    if is_complete(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if is_complete(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            facts = build(folder)
            (folder / _MARKER).write_text(json.dumps(facts) + "\n")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def step(
    what: str,
    argv: Sequence[str],
    *,
    advice: str,
    env: Mapping[str, str] | None = None,
    strict: bool = True,
) -> None:
    """Run one command of an install; `what` completes the sentence "could not ...".

    Raises `InstallError` with the end of its output and `advice` when it cannot be started or, with `strict`, when
    it fails.
    """
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=env, check=False
        )
    except OSError as error:
        raise InstallError(f"could not {what}: {error}.\n{advice}") from error
    if strict and done.returncode != 0:
        tail = (done.stdout + done.stderr).strip()[-_TAIL_CHARACTERS:]
        raise InstallError(f"could not {what} (exit code {done.returncode}).\n{tail}\n{advice}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the kernel drops it when its holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
