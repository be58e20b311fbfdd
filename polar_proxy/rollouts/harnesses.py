"""Agents by name: each installed once in this process's life, whatever asks for it at the same time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness_adapters.base import HarnessAdapter, HarnessError, Installation, get_adapter, split_version
from polar_proxy.errors import UsageError


@dataclass(frozen=True, slots=True)
class ReadyHarness:
    """An agent that stands ready."""

    adapter: HarnessAdapter
    installed: Installation

    @property
    def label(self) -> str:
        return f"{self.installed.name} {self.installed.version}"


class HarnessInstaller:
    """`cache`: where they are installed, once a version, for all processes of this machine."""

    def __init__(self, cache: Path, note: Callable[[str], None] = lambda line: None) -> None:
        self._cache = cache
        self._note = note
        self._ready: dict[str, ReadyHarness] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, name: str) -> ReadyHarness:
        """The agent called NAME[@VERSION], installed. Raises HarnessError."""
        async with self._locks[name]:
            if name not in self._ready:
                bare, version = split_version(name)
                adapter = get_adapter(bare)
                if not await asyncio.to_thread(adapter.is_installed, self._cache, version):
                    shown = version or adapter.default_version
                    self._note(f"installing {adapter.name} {shown} (once; a minute or two)")
                installed = await asyncio.to_thread(adapter.install, self._cache, version)
                self._ready[name] = ReadyHarness(adapter, installed)
            return self._ready[name]


def harness_label(name: str) -> str:
    """What a rollout's row says of an agent that need not be installed here. Raises UsageError for an unknown one."""
    bare, version = split_version(name)
    try:
        adapter = get_adapter(bare)
    except HarnessError as error:
        raise UsageError(str(error)) from error
    return f"{adapter.name} {version or adapter.default_version}"
