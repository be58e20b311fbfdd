"""A cache of folders, each of which is either complete or absent.

A folder lies at ``<cache_root>/<name>/<version>-<hash of the recipe>``. So a changed recipe makes a new folder, and a
folder that a running sandbox has mounted is never edited. A folder is complete when its marker file exists. The marker
is written last, under a lock. So a half-made folder never counts as complete, even if two installers run at once or an
installer is killed.
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

from harness_adapters.base import InstallError, check_version

_MARKER = ".complete"
_TAIL_CHARACTERS = 2000
STEP_SECONDS = 1800.0
"""Time that one command of an installation may take, a slow download included."""


def folder_of(cache_root: Path, name: str, version: str, recipe: object) -> Path:
    """Return the path of the folder made from `recipe`, which must be serialisable as JSON.

    Raises `HarnessError` if an installer could take `version` for an option, a path or a URL.
    """
    check_version(version)
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:8]
    return cache_root / name / f"{version}-{digest}"


def is_complete(folder: Path) -> bool:
    return (folder / _MARKER).is_file()


def ensure_folder(folder: Path, build: Callable[[Path], object]) -> None:
    """Make `folder` with `build` unless it is complete.

    `build` gets the path of the folder, which does not exist yet. If `build` fails, the folder is removed.
    """
    if is_complete(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder.with_name(folder.name + ".lock")):
        if is_complete(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            build(folder)
            (folder / _MARKER).touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def run_step(
    what: str,
    argv: Sequence[str],
    *,
    advice: str,
    env: Mapping[str, str] | None = None,
    strict: bool = True,
    seconds: float = STEP_SECONDS,
) -> None:
    """Run one command of an installation. `what` completes the sentence "could not ...".

    Raises `InstallError` with `advice` if the command cannot be started, or runs for longer than `seconds` (it is then
    killed). With `strict`, an exit code other than 0 raises the same error, with the command's last output.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            check=False,
            timeout=seconds,
        )
    except OSError as error:
        raise InstallError(f"could not {what}: {error}.\n{advice}") from error
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"could not {what}: it did not end within {seconds:g} s.\n{advice}") from error
    if strict and done.returncode != 0:
        tail = (done.stdout + done.stderr).strip()[-_TAIL_CHARACTERS:]
        raise InstallError(f"could not {what} (exit code {done.returncode}).\n{tail}\n{advice}")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold a lock that excludes other processes. The kernel releases the lock if its holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
