"""What a start finds of processes that were killed: their own jobs end, a service's go back into the queue."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polar_proxy.rollouts import JobSpec, recover, submit
from polar_proxy.rollouts.recovery import describe_removed
from polar_proxy.store import Store
from polar_proxy.tasks import get_source
from polar_proxy.traces.operations import SUPERSEDED
from sandboxes.orphans import RemovedItem
from tests.factories import call_record


@pytest.fixture(autouse=True)
def own_sandbox_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def dead() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


async def begun(store: Store, worker: str, *, owned: bool) -> str:
    """A job of one rollout that this worker has in hand, with one call; its rollout's id."""
    job, _ = await submit(store, [get_source("swe-task").task(1)], JobSpec(harness="shell:true"), owned=owned)
    (held,) = await store.queue.claim(worker, 5, 60, job_id=job.job_id if owned else None)
    session = await store.sessions.create(key_hash=None, label=None, rollout_id=held.rollout_id, origin="rollout")
    await store.rollouts.enter_stage(held, "preparing", session_id=session.session_id)
    await store.rollouts.enter_stage(held, "running")
    await store.calls.commit(call_record(session.session_id))
    return held.rollout_id


async def owned_by(store: Store, pid: int) -> None:
    async with store.database.writing() as connection:
        await connection.exec_driver_sql(f"UPDATE rollouts SET owner_pid = {pid}")


async def test_a_run_of_its_own_is_over(store: Store, dead: int) -> None:
    rollout_id = await begun(store, f"{socket.gethostname()}:{dead}:x", owned=True)
    await owned_by(store, os.getppid())
    assert await recover(store) == []  # it lives
    await owned_by(store, dead)
    (line,) = await recover(store)
    assert "was interrupted; its 1 recorded calls are kept" in line
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert (row.status, row.traces, row.reward) == ("failed", 1, None)
    assert [(stage.stage, stage.outcome) for stage in await store.rollouts.stages(rollout_id)] == [
        ("preparing", "ok"),
        ("running", "failed"),
    ]
    assert row.job_id is not None
    job = await store.jobs.get(row.job_id)
    assert job is not None
    assert job.status == "done"
    assert await recover(store) == []


async def test_what_a_service_held_is_queued_again(store: Store, dead: int) -> None:
    living = await begun(store, f"{socket.gethostname()}:{os.getppid()}:x", owned=False)
    elsewhere = await begun(store, f"other-host:{dead}:x", owned=False)
    lost = await begun(store, f"{socket.gethostname()}:{dead}:x", owned=False)
    first = await store.rollouts.get(lost)
    assert first is not None
    assert first.session_id is not None
    assert await recover(store) == [f"rollout {lost} is queued again"]
    statuses = {row.rollout_id: (row.status, row.attempt) for row in await store.rollouts.find()}
    assert statuses == {living: ("running", 1), elsewhere: ("running", 1), lost: ("queued", 2)}
    session = await store.sessions.get(first.session_id)
    assert session is not None
    assert session.closed_at is not None
    assert list((await store.traces.exclusions(first.session_id)).values()) == [SUPERSEDED]
    assert await store.traces.find(session_id=first.session_id) == []
    assert [held.rollout_id for held in await store.queue.claim("me", 5, 60)] == [lost]


def test_describes_removed_sandboxes_in_one_line() -> None:
    removed = [RemovedItem("a", "process", "1"), RemovedItem("a", "record", "x"), RemovedItem("b", "cgroup", "/c")]
    assert describe_removed(removed) == ["removed the remains of 2 sandboxes of a killed process (1 cgroup, 1 process)"]
    assert describe_removed([]) == []
