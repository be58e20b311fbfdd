"""Installing a Python harness into a cached virtual environment of its own; see `harness_adapters.toolkit.cache`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness_adapters.base import HarnessInfo, Installation
from harness_adapters.toolkit import cache, python_runtime


@dataclass(frozen=True)
class VenvRecipe:
    """What goes into the environment."""

    name: str
    version: str
    requirements: tuple[str, ...]
    """As pip takes them, the harness itself included."""
    check: tuple[str, ...]
    """Arguments for the new interpreter that prove the install, for example ``-c import x``."""
    pythons: tuple[str, ...] = ()
    """Minor versions that it runs on, best first, such as ``("3.12", "3.13")``; empty: any that runs Polar."""

    def folder(self, cache_root: Path) -> Path:
        """Where the environment stands."""
        # The interpreter belongs to the recipe: a venv does not survive a change of its base.
        facts: list[object] = [self.requirements, sys.base_prefix, sys.version_info[:3]]
        if self.pythons and python_runtime.own().minor not in self.pythons:
            # Which one it is stands in pyvenv.cfg: finding it takes longer than a look at the cache should.
            facts = [self.requirements, self.pythons]
        return cache.folder_of(cache_root, self.name, self.version, facts)


def is_ready(recipe: VenvRecipe, cache_root: Path) -> bool:
    """Whether the environment is complete, its interpreter included."""
    folder = recipe.folder(cache_root)
    return cache.is_complete(folder) and (folder / "bin" / "python").exists()


def ensure(recipe: VenvRecipe, cache_root: Path) -> Installation:
    """Return the environment of `recipe`, making it first when it is missing or half made.

    Raises `InstallError` with the end of the installer's output.
    """
    # Not resolved: the path must stay the one under which the sandbox will see it.
    folder = recipe.folder(cache_root.absolute())
    if cache.is_complete(folder) and not (folder / "bin" / "python").exists():
        shutil.rmtree(folder)  # a link whose target, the base interpreter, was removed
    cache.ensure(folder, lambda path: _build(recipe, path, cache_root.absolute()))
    return Installation(
        name=recipe.name,
        version=recipe.version,
        root=folder,
        program=folder / "bin" / "python",
        mounts=(folder, *_interpreter_mounts(folder)),
    )


def _build(recipe: VenvRecipe, folder: Path, cache_root: Path) -> dict[str, object]:
    base = python_runtime.ensure(recipe.pythons, cache_root) if recipe.pythons else python_runtime.own()
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
    _step(recipe, "create its environment", [str(base.program), "-m", "venv", str(folder)])
    _step(recipe, "install it", [*pip, "--no-compile", *recipe.requirements])
    # Start-up time is paid by every rollout, and the sandbox mounts the folder read-only.
    # compileall reports files that are not meant for this Python version; pip would have skipped them silently.
    compileall = [python, "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
    _step(recipe, "compile it", compileall, strict=False)
    _step(recipe, "start it once", [python, *recipe.check])
    return {"requirements": recipe.requirements, "python": base.version}


def _step(recipe: VenvRecipe, what: str, argv: Sequence[str], *, strict: bool = True) -> None:
    advice = (
        f"Check that pip reaches a package index (pip install {' '.join(recipe.requirements)}) "
        "and that the disk has room."
    )
    cache.step(f"{what}: {recipe.name} {recipe.version}", argv, advice=advice, strict=strict)


def _interpreter_mounts(folder: Path) -> tuple[Path, ...]:
    """Where the base interpreter lives, when a sandbox that shows /usr would not have it."""
    settings = dict(line.split(" = ", 1) for line in (folder / "pyvenv.cfg").read_text().splitlines() if " = " in line)
    base = Path(settings["home"]).parent
    roots = {base, base.resolve(), (folder / "bin" / "python").resolve().parent.parent}
    return tuple(sorted(root for root in roots if not root.is_relative_to("/usr")))


class VenvHarness:
    """The half of an adapter that all Python harnesses share."""

    name: str
    default_version: str
    facts: HarnessInfo
    imports: str
    """Modules whose import proves the install, separated by commas."""
    also: ClassVar[tuple[str, ...]] = ()
    """What it needs beside its own package, as pip takes it."""
    pythons: ClassVar[tuple[str, ...]] = ()
    """See `VenvRecipe.pythons`."""

    def _recipe(self, version: str | None) -> VenvRecipe:
        version = version or self.default_version
        return VenvRecipe(
            name=self.name,
            version=version,
            requirements=(f"{self.facts.package.removeprefix('pypi:')}=={version}", *self.also),
            check=("-c", f"import {self.imports}"),
            pythons=self.pythons,
        )

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        return ensure(self._recipe(version), cache_root)

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        return is_ready(self._recipe(version), cache_root.absolute())
