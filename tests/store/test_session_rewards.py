"""Rewards of sessions without a rollout, and the effect of a reward of the whole on the traces."""

from __future__ import annotations

import time
from pathlib import Path

import orjson
import pytest

from polar_proxy.errors import UsageError
from polar_proxy.export.archives import import_archive
from polar_proxy.export.exporter import export
from polar_proxy.store import Store, open_store
from polar_proxy.traces.operations import build_traces, find_targets, rebuild
from polar_proxy.types import Json
from tests.export.recorded_runs import rollout, session_without_rollout
from tests.factories import new_rollout, new_session


async def rewards_of_rows(store: Store, form: str = "tokens-jsonl") -> list[float | None]:
    lines: list[bytes] = []
    await export(store, form, lines.append)
    rows: list[Json] = [orjson.loads(line) for line in lines]
    return [row["reward"] for row in rows]


@pytest.mark.parametrize("built", [True, False])
async def test_a_sessions_reward_is_in_its_rows(store: Store, built: bool) -> None:
    session_id, calls = await session_without_rollout(store)
    if built:
        await build_traces(store, session_id, None, reward=None, incomplete=False)
    assert await rewards_of_rows(store) == [None, None]
    await store.rewards.add(None, 0.5, "human:anna", {"why": "ok"}, session_id=session_id)
    await store.rewards.add(None, 1.0, "human:anna", {}, session_id=session_id)
    await store.rewards.add(None, 9.0, "human:anna", {}, call_id=calls[0].call_id, session_id=session_id)
    summary = await store.sessions.summary(session_id)
    assert summary is not None
    assert summary.reward == 1.0
    assert [row.value for row in await store.rewards.of_session(session_id)] == [0.5, 1.0, 9.0]
    assert await rewards_of_rows(store) == [1.0, 1.0]
    assert await rewards_of_rows(store, "jsonl") == [1.0]
    await rebuild(store, await find_targets(store), builder="per_call")
    assert {trace.reward for trace in await store.traces.find(session_id=session_id, builder="per_call")} == {1.0}


async def test_a_later_reward_of_a_rollout_is_in_its_rows(store: Store) -> None:
    """Its traces were built with the evaluator's reward. A trace with a reward of its own keeps that."""
    rollout_id, _ = await rollout(store, reward=1.0)
    other, _ = await rollout(store, reward=0.0, base=30)
    await store.rewards.add(rollout_id, 0.25, "human:anna", {})
    assert await rewards_of_rows(store) == [0.25, 0.25, 0.0, 0.0]
    trace, *_ = await store.traces.find(rollout_id=other)
    await store.rewards.add(other, 0.75, "judge", {}, trace_id=trace.trace_id)
    await store.rewards.add(other, 0.5, "judge", {})
    assert await rewards_of_rows(store) == [0.25, 0.25, 0.75, 0.5]


async def test_a_reward_has_one_target(store: Store) -> None:
    session_id = await new_session(store)
    rollout_id = await new_rollout(store)
    for one, session in ((None, None), (rollout_id, session_id)):
        with pytest.raises(UsageError, match="either"):
            await store.rewards.add(one, 1.0, "me", {}, session_id=session)


async def test_a_sessions_rewards_are_archived_and_pruned_with_it(store: Store, tmp_path: Path) -> None:
    session_id, _ = await session_without_rollout(store)
    await store.rewards.add(None, 0.5, "me", {}, session_id=session_id)
    await store.archive.export_archive(tmp_path / "all.tar", sessions=[session_id])
    async with open_store(str(tmp_path / "copy" / "polar.db")) as copy:
        await import_archive(copy, tmp_path / "all.tar", max_bytes=1 << 30, progress=lambda *_: None)
        summary = await copy.sessions.summary(session_id)
        assert summary is not None
        assert summary.reward == 0.5
        assert [row.value for row in await copy.rewards.of_session(session_id)] == [0.5]
        assert await copy.maintenance.verify(lambda *_: None) == []
    await store.sessions.close(session_id)
    await store.maintenance.prune(time.time() + 1)
    assert await store.rewards.of_session(session_id) == []
    assert await store.sessions.summary(session_id) is None
