"""Installing an npm harness into a cached folder of its own, with a Node.js of Polar's; see
`harness_adapters.toolkit.cache`.

Some packages carry a native program, which is then started itself; others are scripts and are started with node.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness_adapters.base import ExitOutcome, HarnessInfo, Installation, InstallError
from harness_adapters.toolkit import cache, node

_ERRORS = ("ERROR", "Error:", "API Error")
"""How a line begins that says what went wrong; without one it is the last line (Codex prints a token count there)."""


@dataclass(frozen=True)
class NpmRecipe:
    """What goes into the folder."""

    name: str
    version: str
    package: str
    """As npm names it, without a version."""
    entry: str
    """Pattern, relative to the folder, of the one native program or script that is started."""
    needs_node: bool
    """Whether `entry` is a script."""
    node_version: str = node.DEFAULT_VERSION

    def folder(self, cache_root: Path) -> Path:
        """Where it stands."""
        facts = [self.package, self.entry, self.node_version, sys.platform, platform.machine()]
        return cache.folder_of(cache_root, self.name, self.version, facts)


def is_ready(recipe: NpmRecipe, cache_root: Path) -> bool:
    """Whether `ensure` would return at once."""
    cache_root = cache_root.absolute()
    if recipe.needs_node and not cache.is_complete(node.folder(cache_root, recipe.node_version)):
        return False
    return cache.is_complete(recipe.folder(cache_root))


def ensure(recipe: NpmRecipe, cache_root: Path) -> Installation:
    """Return the harness of `recipe`, installing it and its Node.js first when they are missing or half made.

    Raises `InstallError` with the end of npm's output.
    """
    cache_root = cache_root.absolute()
    folder = recipe.folder(cache_root)
    runtime = node.NodeRuntime(node.folder(cache_root, recipe.node_version))
    if recipe.needs_node or not cache.is_complete(folder):
        runtime = node.ensure(cache_root, recipe.node_version)
    cache.ensure(folder, lambda path: _build(recipe, path, runtime))
    entry = _entry(recipe, folder)
    return Installation(
        name=recipe.name,
        version=recipe.version,
        root=folder,
        program=runtime.program if recipe.needs_node else entry,
        mounts=(folder, runtime.root) if recipe.needs_node else (folder,),
    )


def _build(recipe: NpmRecipe, folder: Path, runtime: node.NodeRuntime) -> dict[str, object]:
    folder.mkdir()
    wanted = {recipe.package: recipe.version}
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted}) + "\n")
    # Packages' own install scripts start `node` by name.
    env = {**os.environ, "PATH": os.pathsep.join((str(runtime.program.parent), os.environ.get("PATH", os.defpath)))}
    quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
    # Native programs are optional packages, put into place by install scripts; a user's settings may say no to both.
    needed = ("--ignore-scripts=false", "--include=optional", "--omit=dev")
    advice = (
        f"Check that npm reaches a package registry (npm view {recipe.package}@{recipe.version}) "
        "and that the disk has room."
    )
    named = f"{recipe.name} {recipe.version}"
    install = [*runtime.npm, "install", "--prefix", str(folder), *quiet, *needed]
    cache.step(f"install {named}", install, advice=advice, env=env)
    entry = _entry(recipe, folder)
    start = [str(runtime.program), str(entry)] if recipe.needs_node else [str(entry)]
    with tempfile.TemporaryDirectory(prefix="polar-home-") as home:
        cache.step(f"start {named} once", [*start, "--version"], advice=advice, env={**env, "HOME": home})
    return {"package": recipe.package, "version": recipe.version, "node": recipe.node_version}


def _entry(recipe: NpmRecipe, folder: Path) -> Path:
    found = sorted(folder.glob(recipe.entry))
    if not found:
        raise InstallError(
            f"{recipe.package} {recipe.version} has no {recipe.entry}: it does not support this system "
            f"({sys.platform}, {platform.machine()}), or another version of it is laid out differently; remove {folder}"
        )
    return found[0]


class NpmHarness:
    """The half of an adapter that all npm harnesses share."""

    name: str
    default_version: str
    facts: HarnessInfo
    entry: str
    needs_node = False
    limit_exit_codes: ClassVar[Mapping[int, str]] = {}
    """Exit codes by which it ends a run of its own accord, such as at its step limit."""

    def _recipe(self, version: str | None) -> NpmRecipe:
        return NpmRecipe(
            name=self.name,
            version=version or self.default_version,
            package=self.facts.package.removeprefix("npm:"),
            entry=self.entry,
            needs_node=self.needs_node,
        )

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        return ensure(self._recipe(version), cache_root)

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        return is_ready(self._recipe(version), cache_root)

    def command(self, installed: Installation) -> list[str]:
        """The start of its command line."""
        start = [str(installed.program)]
        return [*start, str(installed.root / self.entry)] if self.needs_node else start

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        if exit_code is None:
            return "timed_out", f"{self.name} was stopped by the clock"
        if exit_code in self.limit_exit_codes:
            return "ok", f"ended by {self.limit_exit_codes[exit_code]}"
        if exit_code != 0:
            lines = [line.strip() for line in stdout_tail.splitlines() if line.strip()]
            told = [line for line in lines if line.startswith(_ERRORS)] or lines or ["no output"]
            return "failed", f"{self.name} exited with {exit_code}: {told[-1][:400]}"
        return "ok", "finished"
