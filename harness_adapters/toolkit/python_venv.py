"""Installing a Python harness into its own cached virtual environment."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness_adapters.base import Installation
from harness_adapters.toolkit import cache, python_runtime
from harness_adapters.toolkit.adapter import CachedHarness

LITELLM_ENV: Mapping[str, str] = {
    # Otherwise every start downloads a price list from the internet, and waits for the failure.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
    "PYTHONUNBUFFERED": "1",
}
"""Environment of every harness that uses litellm, so that it contacts the endpoint only."""


@dataclass(frozen=True)
class VenvRecipe:
    """A virtual environment to make."""

    name: str
    version: str
    requirements: tuple[str, ...]
    """pip requirements, the harness itself included."""
    check: tuple[str, ...]
    """Arguments for the new interpreter that prove the installation, for example ``-c import x``."""
    pythons: tuple[str, ...] = ()
    """Minor versions that it runs on, best first, such as ``("3.12", "3.13")``; empty: the Python that runs Polar."""

    def folder(self, cache_root: Path) -> Path:
        # The interpreter is part of the recipe, because a venv breaks when its base interpreter changes.
        recipe: list[object] = [self.requirements, sys.base_prefix, sys.version_info[:3]]
        if self.pythons and python_runtime.own_python().minor not in self.pythons:
            # pyvenv.cfg names the interpreter. Searching for one would make looking into the cache slow.
            recipe = [self.requirements, self.pythons]
        return cache.folder_of(cache_root.absolute(), self.name, self.version, recipe)

    def is_installed(self, cache_root: Path) -> bool:
        folder = self.folder(cache_root)
        return cache.is_complete(folder) and (folder / "bin" / "python").exists()

    def install(self, cache_root: Path) -> Installation:
        """Return the environment, making it first if it is missing or incomplete.

        Raises `InstallError` with the installer's last output.
        """
        # Absolute but not resolved: the sandbox mounts it at this path.
        folder = self.folder(cache_root)
        if cache.is_complete(folder) and not (folder / "bin" / "python").exists():
            shutil.rmtree(folder)  # a link whose target, the base interpreter, was removed
        cache.ensure_folder(folder, lambda path: self._build(path, cache_root.absolute()))
        return Installation(
            name=self.name,
            version=self.version,
            root=folder,
            program=folder / "bin" / "python",
            mounts=(folder, *_interpreter_mounts(folder)),
        )

    def _build(self, folder: Path, cache_root: Path) -> dict[str, object]:
        own = python_runtime.own_python()
        base = python_runtime.ensure_python(self.pythons, cache_root) if self.pythons else own
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
        self._step("create its environment", [str(base.program), "-m", "venv", str(folder)])
        self._step("install it", [*pip, "--no-compile", *self.requirements])
        # Every rollout pays for the start-up, and the sandbox mounts the folder read-only, so compile now.
        # compileall fails for files of other Python versions, which pip would have skipped silently.
        compileall = [python, "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
        self._step("compile it", compileall, strict=False)
        self._step("start it once", [python, *self.check])
        return {"requirements": self.requirements, "python": base.version}

    def _step(self, what: str, argv: Sequence[str], *, strict: bool = True) -> None:
        advice = (
            f"Check that pip reaches a package index (pip install {' '.join(self.requirements)}) "
            "and that the disk has room."
        )
        cache.run_step(f"{what}: {self.name} {self.version}", argv, advice=advice, strict=strict)


def _interpreter_mounts(folder: Path) -> tuple[Path, ...]:
    """Return the folders of the base interpreter that a sandbox which mounts /usr would lack."""
    settings = dict(line.split(" = ", 1) for line in (folder / "pyvenv.cfg").read_text().splitlines() if " = " in line)
    base = Path(settings["home"]).parent
    roots = {base, base.resolve(), (folder / "bin" / "python").resolve().parent.parent}
    return tuple(sorted(root for root in roots if not root.is_relative_to("/usr")))


class VenvHarness(CachedHarness):
    """Base of the adapters of Python harnesses."""

    imports: str
    """Modules whose import proves the installation, separated by commas."""
    extra_requirements: ClassVar[tuple[str, ...]] = ()
    """pip requirements besides its own package."""
    pythons: ClassVar[tuple[str, ...]] = ()
    """As `VenvRecipe.pythons`."""

    def recipe(self, version: str) -> VenvRecipe:
        return VenvRecipe(
            name=self.name,
            version=version,
            requirements=(f"{self.info.package.removeprefix('pypi:')}=={version}", *self.extra_requirements),
            check=("-c", f"import {self.imports}"),
            pythons=self.pythons,
        )
