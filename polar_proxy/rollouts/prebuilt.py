"""Docker sandboxes whose agent is part of their image, instead of mounted from this machine's disk."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sandboxes import SandboxSpec, docker_engine
from sandboxes.images.prebuilt import PrebuiltImage, prebuild

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PrebuiltImageCounts:
    """For the metrics: images that were there, and that were made, with the seconds of it."""

    found: int = 0
    made: int = 0
    seconds: float = 0.0


class PrebuiltImageCache:
    """One image for each base and agent, looked up once in this process's life."""

    def __init__(self) -> None:
        self._ready: dict[tuple[str | None, tuple[Path, ...]], str] = {}
        self._locks: dict[tuple[str | None, tuple[Path, ...]], asyncio.Lock] = defaultdict(asyncio.Lock)
        self.count = PrebuiltImageCounts()

    async def spec(self, spec: SandboxSpec, paths: Sequence[Path]) -> SandboxSpec:
        """The specification with these paths in its image, and no longer among its mounts. Raises SandboxError."""
        if not paths:
            return spec
        key = spec.image, tuple(sorted(set(paths)))
        async with self._locks[key]:
            if key not in self._ready:
                self._ready[key] = (await self._bake(*key)).image
        rest = tuple(mount for mount in spec.mounts if mount.source not in key[1])
        return replace(spec, image=self._ready[key], mounts=rest)

    async def _bake(self, base: str | None, paths: tuple[Path, ...]) -> PrebuiltImage:
        async with docker_engine.docker_client() as engine:
            prebuilt = await prebuild(engine, base, paths)
        if prebuilt.made:
            self.count.made += 1
            log.info("%s was made of %s in %.0f s", prebuilt.image, prebuilt.base, prebuilt.seconds)
        else:
            self.count.found += 1
        self.count.seconds += prebuilt.seconds
        return prebuilt
