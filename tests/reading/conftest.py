"""A database with two rollouts and a session without one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar_proxy.store import open_store
from polar_proxy.types import CallRecord
from tests.export.recorded_runs import rollout, session_without_rollout


@dataclass(frozen=True)
class Recorded:
    url: str
    best: str
    calls: list[CallRecord]
    """The calls of the best rollout."""


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    url = f"sqlite:///{tmp_path}/polar.db"

    async def record() -> Recorded:
        async with open_store(url) as store:
            best, calls = await rollout(store, reward=1.0)
            await rollout(store, reward=0.0, base=20)
            await session_without_rollout(store, base=30)
        return Recorded(url, best, calls)

    return asyncio.run(record())
