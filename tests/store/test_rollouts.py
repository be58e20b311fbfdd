"""Tasks, groups, rollouts: their life, rewards, events, artifacts, and what a restart finds."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import pytest

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import FINAL_STATUSES, Store
from tests.factories import call_record, new_rollout, new_session


async def test_a_whole_life(store: Store) -> None:
    session_id = await new_session(store, origin="rollout")
    rollout_id = await new_rollout(store)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert (row.status, row.final, row.reward, row.session_id, row.calls) == ("queued", False, None, None, 0)
    assert (row.harness, row.sandbox, row.engine, row.model) == ("mini-swe-agent", "process", "local", "polar-tiny")
    assert (row.seed, row.config, row.incomplete, row.group_index) == (11, {"timeout": 60}, False, 0)
    assert (row.owner_host, row.owner_pid) == (socket.gethostname(), os.getpid())

    for status in ("preparing", "ready", "running", "scoring"):
        await store.rollouts.update(rollout_id, status=status)
    await store.rollouts.update(rollout_id, session_id=session_id, exit_code=0)
    await store.calls.commit(call_record(session_id))
    await store.rewards.add(rollout_id, 0.5, "tests", {"passed": 1, "failed": 1})
    await store.rewards.add(rollout_id, 1.0, "tests", {"passed": 2})
    await store.rollouts.update(rollout_id, status="done")

    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert (row.status, row.final, row.reward, row.exit_code) == ("done", True, 1.0, 0)
    assert (row.calls, row.prompt_tokens, row.completion_tokens) == (1, 7, 5)
    assert row.started_at is not None
    assert row.ended_at is not None
    assert row.created_at <= row.started_at <= row.ended_at
    events = await store.rollouts.events(rollout_id)
    assert [event.data["to"] for event in events if event.kind == "status"] == [
        *("queued", "preparing", "ready", "running", "scoring", "done")
    ]
    assert [reward.value for reward in await store.rewards.of_rollout(rollout_id)] == [0.5, 1.0]


@pytest.mark.parametrize("status", sorted(FINAL_STATUSES))
async def test_a_final_status_stays(store: Store, status: str) -> None:
    rollout_id = await new_rollout(store)
    await store.rollouts.update(rollout_id, status=status, error="why\x00")
    await store.rollouts.update(rollout_id, status=status)
    with pytest.raises(StoreError, match=f"is {status} already"):
        await store.rollouts.update(rollout_id, status="running", exit_code=3)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert (row.status, row.exit_code, row.error) == (status, None, "why\ufffd")


async def test_mistakes_are_told(store: Store) -> None:
    rollout_id = await new_rollout(store)
    with pytest.raises(UsageError, match="not a rollout status"):
        await store.rollouts.update(rollout_id, status="finished")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no rollout"):
        await store.rollouts.update("roll_unknown", status="done")
    with pytest.raises(StoreError, match="does not fit"):
        await store.rollouts.create_group("task-unknown", 1, {})
    assert await store.rollouts.get("roll_unknown") is None
    assert await store.tasks.get("task-unknown") is None


async def test_a_task_can_be_put_again(store: Store) -> None:
    await store.tasks.put("t", "swe-task", 1, "one", {})
    first = await store.tasks.get("t")
    await store.tasks.put("t", "swe-task", 2, "two", {"a": 1})
    task = await store.tasks.get("t")
    assert first is not None
    assert task is not None
    assert (task.seed, task.instruction, task.spec, task.created_at) == (2, "two", {"a": 1}, first.created_at)


async def test_selection(store: Store) -> None:
    one = await new_rollout(store, await new_session(store))
    two = await new_rollout(store, harness="codex", seed=12)
    three = await new_rollout(store, harness="codex", seed=13)
    await store.rewards.add(one, 1.0, "tests", {})
    await store.rewards.add(two, 0.0, "tests", {})
    await store.rollouts.update(three, status="failed")

    async def where(text: str) -> list[str]:
        return [row.rollout_id for row in await store.rollouts.find(where=text)]

    assert await where("reward>=1") == [one]
    assert await where("reward < 1") == [two]
    assert await where("harness=codex and seed>12") == [three]
    assert await where("status != failed, calls=0") == [one, two]
    assert await where("family=swe-task") == [one, two, three]
    for wrong in ("reward", "reward>=good", "colour=red", "1=1"):
        with pytest.raises(UsageError):
            await where(wrong)
    assert [row.rollout_id for row in await store.rollouts.find(limit=2)] == [two, three]
    assert [row.rollout_id for row in await store.rollouts.find(limit=2, before=two)] == [one]
    assert [row.rollout_id for row in await store.rollouts.find(rollout_ids=[three, one])] == [one, three]
    assert [row.rollout_id for row in await store.rollouts.find(statuses=["failed"])] == [three]
    row = await store.rollouts.get(two)
    assert row is not None
    assert [r.rollout_id for r in await store.rollouts.find(group_id=row.group_id, task_id="task-1")] == [two]


async def test_what_a_restart_finds(store: Store) -> None:
    done, left = await new_rollout(store), await new_rollout(store)
    await store.rollouts.update(done, status="done")
    await store.rollouts.update(left, status="running")
    (row,) = await store.rollouts.interrupted()
    assert (row.rollout_id, row.owner_pid) == (left, os.getpid())
    async with store.database.writing() as connection:
        await connection.exec_driver_sql("UPDATE rollouts SET owner_pid = 1, owner_host = 'elsewhere'")
    await store.rollouts.update(left, claim=True)
    (row,) = await store.rollouts.interrupted()
    assert (row.owner_host, row.owner_pid) == (socket.gethostname(), os.getpid())


async def test_events_of_any_kind(store: Store) -> None:
    rollout_id = await new_rollout(store)
    await store.rollouts.add_event(rollout_id, "command", {"command": "ls\x00", "exit_code": 0})
    event = (await store.rollouts.events(rollout_id))[-1]
    assert (event.kind, event.data) == ("command", {"command": "ls\x00", "exit_code": 0})


async def test_artifacts_are_files_by_hash(store: Store) -> None:
    one, two = await new_rollout(store), await new_rollout(store)
    patch = b"--- a\n+++ b\n"
    first = await store.artifacts.add(one, "patch.diff", patch)
    second = await store.artifacts.add(two, "other.diff", patch)
    await store.artifacts.add(one, "log.txt", b"")
    assert first.path == second.path
    assert first.path.read_bytes() == patch
    assert first.sha256 == hashlib.sha256(patch).hexdigest()
    assert [(a.name, a.bytes) for a in await store.artifacts.of_rollout(one)] == [
        ("patch.diff", len(patch)),
        ("log.txt", 0),
    ]
    assert await store.artifacts.of_rollout(two) == [second]
    assert [file for file in Path(first.path.parent).iterdir() if file.name.startswith("tmp")] == []
