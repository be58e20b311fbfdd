"""Installing a Python harness into a cached virtual environment of its own; see `harness_adapters.cache`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_adapters import cache
from harness_adapters.base import Installed


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
        facts = [self.requirements, sys.base_prefix, sys.version_info[:3]]
        return cache.folder_of(cache_root, self.name, self.version, facts)


def is_ready(recipe: VenvRecipe, cache_root: Path) -> bool:
    """Whether the environment is complete."""
    return cache.is_complete(recipe.folder(cache_root))


def ensure(recipe: VenvRecipe, cache_root: Path) -> Installed:
    """Return the environment of `recipe`, making it first when it is missing or half made.

    Raises `InstallError` with the end of the installer's output.
    """
    # Not resolved: the path must stay the one under which the sandbox will see it.
    folder = recipe.folder(cache_root.absolute())
    cache.ensure(folder, lambda path: _build(recipe, path))
    return Installed(
        name=recipe.name,
        version=recipe.version,
        root=folder,
        program=folder / "bin" / "python",
        mounts=(folder, *_interpreter_mounts()),
    )


def _build(recipe: VenvRecipe, folder: Path) -> dict[str, object]:
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
    _step(recipe, "create its environment", [sys.executable, "-m", "venv", str(folder)])
    _step(recipe, "install it", [*pip, "--no-compile", *recipe.requirements])
    # Start-up time is paid by every rollout, and the sandbox mounts the folder read-only.
    # compileall reports files that are not meant for this Python version; pip would have skipped them silently.
    compileall = [python, "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
    _step(recipe, "compile it", compileall, strict=False)
    _step(recipe, "start it once", [python, *recipe.check])
    return {"requirements": recipe.requirements}


def _step(recipe: VenvRecipe, what: str, argv: Sequence[str], *, strict: bool = True) -> None:
    advice = (
        f"Check that pip reaches a package index (pip install {' '.join(recipe.requirements)}) "
        "and that the disk has room."
    )
    cache.step(f"{what}: {recipe.name} {recipe.version}", argv, advice=advice, strict=strict)


def _interpreter_mounts() -> tuple[Path, ...]:
    """Where the base interpreter lives, when a sandbox that shows /usr would not have it."""
    roots = {Path(sys.base_prefix), Path(sys.base_prefix).resolve(), Path(sys.base_exec_prefix).resolve()}
    return tuple(sorted(root for root in roots if not root.is_relative_to("/usr")))
