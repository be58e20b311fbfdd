"""Recorded groups: the local engine samples, the store has calls and traces, and the rows are exported."""

from __future__ import annotations

from pathlib import Path

import orjson

from polar_proxy.export.exporter import export
from polar_proxy.types import Json
from tests.training.bandit import Bandit, opened


async def recorded_groups(folder: Path, model: Path, *, groups: int = 1, samples: int = 4) -> list[list[Json]]:
    """Return rows of tokens-jsonl by group, as `polar export` writes them. Rewards differ within each group."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[bytes] = []
    async with opened(folder, model) as (store, engine):
        bandit = Bandit(store, engine, "recorded", groups, samples)
        await bandit.start_round(0)
        await bandit.pending_groups()
        await export(store, "tokens-jsonl", lines.append)
    found: dict[str, list[Json]] = {}
    for row in map(orjson.loads, lines):
        found.setdefault(row["group_id"], []).append(row)
    made = list(found.values())
    assert len(made) == groups
    assert all(len({row["reward"] for row in rows}) > 1 for rows in made)
    return made
