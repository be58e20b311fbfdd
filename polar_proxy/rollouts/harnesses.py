"""Preparation of agents for sandboxes: agents are installed on this machine and, for docker, built into images."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness_adapters.base import HarnessAdapter, HarnessError, Installation, get_adapter, split_version
from harness_adapters.shell import ShellCommand
from polar_proxy.allowed_code import NO_CODE, AllowedCode, is_code
from polar_proxy.errors import BadTaskError, UsageError
from sandboxes import docker_engine
from sandboxes.base import SandboxSpec
from sandboxes.images.prebuilt import PrebuiltImage, prebuild

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyHarness:
    """An installed agent with its adapter."""

    adapter: HarnessAdapter
    installed: Installation

    @property
    def label(self) -> str:
        return f"{self.installed.name} {self.installed.version}"


class HarnessInstaller:
    """Installs each agent at most once, however many rollouts ask for it at the same time."""

    def __init__(
        self, cache: Path, note: Callable[[str], None] = lambda line: None, code: AllowedCode = NO_CODE
    ) -> None:
        """`cache` is a folder that all processes of this machine share. It contains each installed version of each
        agent, and the definition files of agents that the user has added. `code` lists the Python adapters that may be
        used besides Polar's own."""
        self.cache = cache
        self._code = code
        self._note = note
        self._ready: dict[str, ReadyHarness] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, name: str) -> ReadyHarness:
        """Return the agent NAME[@VERSION], installing it first if necessary. Raises HarnessError."""
        async with self._locks[name]:
            if name not in self._ready:
                adapter, version = _find_adapter(name, self.cache, self._code)
                if not await asyncio.to_thread(adapter.is_installed, self.cache, version):
                    shown = version or adapter.default_version
                    self._note(f"installing {adapter.name} {shown} (once; a minute or two)")
                installed = await asyncio.to_thread(adapter.install, self.cache, version)
                self._ready[name] = ReadyHarness(adapter, installed)
            return self._ready[name]


def harness_label(name: str, folder: Path | None, code: AllowedCode = NO_CODE) -> str:
    """Return name and version of an agent, which need not be installed here. Raises UsageError if it is unknown or not
    allowed. `folder` holds the user's definition files."""
    try:
        adapter, version = _find_adapter(name, folder, code)
    except HarnessError as error:
        raise UsageError(str(error)) from error
    return f"{adapter.name} {version or adapter.default_version}"


def mounted_paths(name: str) -> tuple[str, ...]:
    """Return the paths of this machine that a harness of the form ``shell:COMMAND`` mounts. Raises UsageError."""
    if not name.startswith("shell:"):
        return ()
    try:
        return tuple(map(str, ShellCommand(name.removeprefix("shell:")).mounted_paths()))
    except HarnessError as error:
        raise UsageError(str(error)) from error


def _find_adapter(name: str, folder: Path | None, code: AllowedCode) -> tuple[HarnessAdapter, str | None]:
    """Return the adapter and the version of NAME[@VERSION]. Raises HarnessError for an adapter that is not allowed."""
    bare, version = split_version(name)
    if is_code(bare):
        try:
            code.check(bare)
        except BadTaskError as error:
            raise HarnessError(f"harness {name}: {error}") from error
    return get_adapter(bare, folder), version


@dataclass(slots=True)
class PrebuiltImageCounts:
    """Counts of the images that existed already and of the images that were built, for the metrics."""

    found: int = 0
    made: int = 0
    seconds: float = 0.0
    """Seconds spent on looking for images and building them."""


class PrebuiltImageCache:
    """Docker images that contain the agent, so that it need not be mounted from this machine's disk.

    There is one image for each base image and agent. Polar looks for an image once per process, and builds it if it
    does not exist."""

    def __init__(self) -> None:
        self._ready: dict[tuple[str | None, tuple[Path, ...]], str] = {}
        self._locks: dict[tuple[str | None, tuple[Path, ...]], asyncio.Lock] = defaultdict(asyncio.Lock)
        self.count = PrebuiltImageCounts()

    async def spec(self, spec: SandboxSpec, paths: Sequence[Path]) -> SandboxSpec:
        """Return the specification with an image that contains the files at `paths`, and without mounts of these paths.

        Raises SandboxError if the image cannot be built."""
        if not paths:
            return spec
        key = spec.image, tuple(sorted(set(paths)))
        async with self._locks[key]:
            if key not in self._ready:
                self._ready[key] = (await self._prebuild(*key)).image
        other_mounts = tuple(mount for mount in spec.mounts if mount.source not in key[1])
        return replace(spec, image=self._ready[key], mounts=other_mounts)

    async def _prebuild(self, base: str | None, paths: tuple[Path, ...]) -> PrebuiltImage:
        async with docker_engine.docker_client() as engine:
            prebuilt = await prebuild(engine, base, paths)
        if prebuilt.made:
            self.count.made += 1
            log.info("%s was built from %s in %.0f s", prebuilt.image, prebuilt.base, prebuilt.seconds)
        else:
            self.count.found += 1
        self.count.seconds += prebuilt.seconds
        return prebuilt
