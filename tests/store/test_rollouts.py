"""Tasks, rollouts, rewards and artifacts."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from pathlib import Path

import pytest

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.store import FINAL_STATUSES, RolloutStatus, Store
from polar_proxy.store.repositories.rollouts import ClaimLostError
from polar_proxy.store.service.jobs import NewGroup
from tests.factories import ROLLOUT, call_record, new_rollout, new_session

pytestmark = pytest.mark.slow


async def test_rollout_from_queued_to_done(store: Store) -> None:
    session_id = await new_session(store, origin="rollout")
    rollout_id = await new_rollout(store)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert (row.status, row.final, row.reward, row.session_id, row.calls) == ("queued", False, None, None, 0)
    assert (row.harness, row.sandbox, row.engine, row.model) == ("mini-swe-agent", "process", "local", "polar-tiny")
    assert (row.seed, row.config, row.incomplete, row.group_index) == (11, {"timeout": 60}, False, 0)
    assert (row.owner_host, row.owner_pid) == (socket.gethostname(), os.getpid())

    (claim,) = await store.queue.claim("worker", 1, 60, job_id=row.job_id)
    await store.rollouts.enter_stage(claim, "preparing", session_id=session_id)
    await store.rollouts.enter_stage(claim, "ready")
    await store.rollouts.enter_stage(claim, "running")
    await store.rollouts.enter_stage(claim, "scoring", exit_code=0)
    await store.calls.commit(call_record(session_id))
    await store.rewards.add(rollout_id, 0.5, "tests", {"passed": 1, "failed": 1})
    await store.rewards.add(rollout_id, 1.0, "tests", {"passed": 2})
    await store.rollouts.end(claim, "done")

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


async def test_each_stage_is_one_line_of_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    rollout_id = await new_rollout(store)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    (claim,) = await store.queue.claim("worker", 1, 60, job_id=row.job_id)
    with caplog.at_level(logging.INFO):
        await store.rollouts.enter_stage(claim, "preparing")
        await store.rollouts.end(claim, "failed", cause="agent", error="an agent's words")
        with pytest.raises(ClaimLostError):
            await store.rollouts.enter_stage(claim, "running")
    assert caplog.messages == [f"rollout {rollout_id}: preparing", f"rollout {rollout_id}: failed (agent)"]


async def test_lost_claim_changes_nothing(store: Store) -> None:
    rollout_id = await new_rollout(store)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    (claim,) = await store.queue.claim("worker", 1, 60, job_id=row.job_id)
    await store.queue.release(claim, cause="sandbox")
    with pytest.raises(ClaimLostError, match="another worker claimed it"):
        await store.rollouts.enter_stage(claim, "preparing")
    with pytest.raises(ClaimLostError):
        await store.rollouts.end(claim, "done")
    assert await store.rollouts.stages(rollout_id) == []


@pytest.mark.parametrize("status", sorted(FINAL_STATUSES))
async def test_final_status_cannot_change(store: Store, status: RolloutStatus) -> None:
    rollout_id = await new_rollout(store)
    await store.rollouts.update(rollout_id, status=status, error="why\x00")
    await store.rollouts.update(rollout_id, status=status)
    with pytest.raises(StoreError, match=f"is {status} already"):
        await store.rollouts.update(rollout_id, status="running", incomplete=True)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert (row.status, row.incomplete, row.error) == (status, False, "why\ufffd")


async def test_a_note_is_stored_without_characters_that_databases_refuse(store: Store) -> None:
    rollout_id = await new_rollout(store)
    await store.remarks.add("note", "anna", rollout_id=rollout_id, text="NUL \x00, lone surrogate \ud800")
    (remark,) = await store.remarks.of_rollout(rollout_id)
    assert remark.text == "NUL \ufffd, lone surrogate ?"


async def test_rejects_unknown_ids_and_statuses(store: Store) -> None:
    rollout_id = await new_rollout(store)
    with pytest.raises(UsageError, match="not a rollout status"):
        await store.rollouts.update(rollout_id, status="finished")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no rollout"):
        await store.rollouts.update("roll_unknown", status="done")
    with pytest.raises(StoreError, match="contradicts"):
        await store.jobs.submit({}, [NewGroup("task-unknown", 1, {}, (ROLLOUT,))])
    assert await store.rollouts.get("roll_unknown") is None
    assert await store.tasks.get("task-unknown") is None


async def test_task_can_be_replaced(store: Store) -> None:
    await store.tasks.put("t", "swe-task", 1, "one", {})
    first = await store.tasks.get("t")
    await store.tasks.put("t", "swe-task", 2, "two", {"a": 1})
    task = await store.tasks.get("t")
    assert first is not None
    assert task is not None
    assert (task.seed, task.instruction, task.spec, task.created_at) == (2, "two", {"a": 1}, first.created_at)


async def test_find_by_conditions(store: Store) -> None:
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
    assert [r.rollout_id for r in await store.rollouts.find(group_id=row.group_id)] == [two]


async def test_interrupted_rollouts_have_no_final_status(store: Store) -> None:
    done, running = await new_rollout(store), await new_rollout(store)
    await store.rollouts.update(done, status="done")
    await store.rollouts.update(running, status="running")
    (row,) = await store.rollouts.interrupted()
    assert (row.rollout_id, row.owner_pid) == (running, os.getpid())


async def test_equal_artifacts_share_a_file(store: Store) -> None:
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
