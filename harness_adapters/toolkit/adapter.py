"""The base of the adapters whose harness is installed into the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol

from harness_adapters.base import (
    ExitOutcome,
    HarnessInfo,
    Installation,
    LaunchContext,
    LaunchPlan,
    WireApi,
    failed_exit,
    require_supported,
)


class Recipe(Protocol):
    """How to install one version of a harness."""

    def install(self, cache_root: Path) -> Installation: ...

    def is_installed(self, cache_root: Path) -> bool: ...


class CachedHarness(ABC):
    """Implements `HarnessAdapter` except for the recipe and the command line."""

    name: str
    default_version: str
    info: HarnessInfo
    error_prefixes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the output lines that report an error, because the last line may be another one (Codex: a token
    count)."""

    @abstractmethod
    def recipe(self, version: str) -> Recipe:
        """Return the recipe for a version."""

    @abstractmethod
    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        """Return argument list, environment and files of a run. `launch` adds HOME and the mounts."""

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        return self.recipe(version or self.default_version).install(cache_root)

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        return self.recipe(version or self.default_version).is_installed(cache_root)

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        wire_api = require_supported(self.name, self.info, context)
        plan = self.make_plan(installed, context, wire_api)
        return replace(plan, env={"HOME": context.home, **plan.env}, mounts=installed.mounts)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        return failed_exit(self.name, exit_code, stdout_tail, self.error_prefixes) or ("ok", "finished")
