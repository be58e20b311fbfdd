"""Installing a Python harness into a cached virtual environment of its own.

The environment stands at ``<cache_root>/<name>/<version>-<hash of the recipe>``, so that a changed recipe
makes a new one and never edits one that a running sandbox has mounted. It is complete when its marker file
exists; the marker is written last, under a lock, so that neither two installers nor one that was killed can
leave a half one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness_adapters.base import Installed, InstallError

_MARKER = ".complete"
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True)
class VenvRecipe:
    """What goes into the environment."""

    name: str
    version: str
    requirements: tuple[str, ...]
    """As pip takes them, the harness itself included."""
    check: tuple[str, ...]
    """Arguments for the new interpreter that prove the install, for example ``-c import x``."""

    def folder(self, cache_root: Path) -> Path:
        """Where the environment stands."""
        # The interpreter belongs to the recipe: a venv does not survive a change of its base.
        facts = json.dumps([self.requirements, sys.base_prefix, sys.version_info[:3]])
        digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
        return cache_root / self.name / f"{self.version}-{digest}"


def is_ready(recipe: VenvRecipe, cache_root: Path) -> bool:
    """Whether the environment is complete."""
    return (recipe.folder(cache_root) / _MARKER).is_file()


def ensure(recipe: VenvRecipe, cache_root: Path) -> Installed:
    """Return the environment of `recipe`, making it first when it is missing or half made.

    Raises `InstallError` with the end of the installer's output.
    """
    # Not resolved: the path must stay the one under which the sandbox will see it.
    folder = recipe.folder(cache_root.absolute())
    if not (folder / _MARKER).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if not (folder / _MARKER).is_file():
                _build(recipe, folder)
    return Installed(
        name=recipe.name,
        version=recipe.version,
        root=folder,
        program=folder / "bin" / "python",
        mounts=(folder, *_interpreter_mounts()),
    )


def _build(recipe: VenvRecipe, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
    try:
        _step(recipe, "create its environment", [sys.executable, "-m", "venv", str(folder)])
        _step(recipe, "install it", [*pip, "--no-compile", *recipe.requirements])
        # Start-up time is paid by every rollout, and the sandbox mounts the folder read-only.
        compileall = [python, "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
        _step(recipe, "compile it", compileall, strict=False)
        _step(recipe, "start it once", [python, *recipe.check])
        (folder / _MARKER).write_text(json.dumps({"requirements": recipe.requirements}) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _step(recipe: VenvRecipe, what: str, argv: Sequence[str], *, strict: bool = True) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    # compileall reports files that are not meant for this Python version; pip would have skipped them
    # silently.
    if strict and done.returncode != 0:
        tail = (done.stdout + done.stderr).strip()[-_TAIL_CHARACTERS:]
        raise InstallError(
            f"could not {what}: {recipe.name} {recipe.version} (exit code {done.returncode}).\n{tail}\n"
            f"Check that pip reaches a package index (pip install {' '.join(recipe.requirements)}) "
            "and that the disk has room."
        )


def _interpreter_mounts() -> tuple[Path, ...]:
    """Where the base interpreter lives, when a sandbox that shows /usr would not have it."""
    roots = {Path(sys.base_prefix), Path(sys.base_prefix).resolve(), Path(sys.base_exec_prefix).resolve()}
    return tuple(sorted(root for root in roots if not root.is_relative_to("/usr")))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the kernel drops it when its holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
