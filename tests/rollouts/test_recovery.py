"""Recovery after a kill: the process's own jobs end, and rollouts of a server's jobs are queued again."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from polar_proxy.rollouts import JobSpec, recover, submit
from polar_proxy.rollouts.cluster import Cluster
from polar_proxy.rollouts.recovery import describe_removed
from polar_proxy.store import Store
from polar_proxy.tasks import get_source
from polar_proxy.temporary import temporary_folder
from polar_proxy.traces.operations import SUPERSEDED
from sandboxes.orphans import RemovedItem
from tests.factories import call_record

pytestmark = pytest.mark.usefixtures("own_sandbox_register")


@pytest.fixture
def dead() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


async def start_rollout(store: Store, worker: str, *, owned: bool) -> str:
    """Claim the rollout of a new job for `worker` and record one call; return the rollout's id."""
    job, _ = await submit(store, [get_source("swe-task").task(1)], JobSpec(harness="shell:true"), owned=owned)
    (claim,) = await store.queue.claim(worker, 5, 60, job_id=job.job_id if owned else None)
    session = await store.sessions.create(key_hash=None, label=None, rollout_id=claim.rollout_id, origin="rollout")
    await store.rollouts.enter_stage(claim, "preparing", session_id=session.session_id)
    await store.rollouts.enter_stage(claim, "running")
    await store.calls.commit(call_record(session.session_id))
    return claim.rollout_id


async def set_owner(store: Store, pid: int) -> None:
    async with store.database.writing() as connection:
        await connection.exec_driver_sql(f"UPDATE rollouts SET owner_pid = {pid}")


async def test_ends_an_interrupted_run(store: Store, dead: int) -> None:
    rollout_id = await start_rollout(store, f"{socket.gethostname()}:{dead}:x", owned=True)
    await set_owner(store, os.getppid())
    assert await recover(store) == []  # its owner lives
    await set_owner(store, dead)
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


async def test_queues_rollouts_of_a_dead_worker_again(store: Store, dead: int) -> None:
    living = await start_rollout(store, f"{socket.gethostname()}:{os.getppid()}:x", owned=False)
    elsewhere = await start_rollout(store, f"other-host:{dead}:x", owned=False)
    lost = await start_rollout(store, f"{socket.gethostname()}:{dead}:x", owned=False)
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
    assert [claim.rollout_id for claim in await store.queue.claim("me", 5, 60)] == [lost]


def test_describes_removed_sandboxes_in_one_line() -> None:
    removed = [RemovedItem("a", "process", "1"), RemovedItem("a", "record", "x"), RemovedItem("b", "cgroup", "/c")]
    assert describe_removed(removed) == ["removed the remains of 2 sandboxes of a killed process (1 cgroup, 1 process)"]
    assert describe_removed([]) == []


async def test_a_clusters_head_counts_what_is_queued_again(store: Store, dead: int) -> None:
    worker = f"{socket.gethostname()}:{dead}:x"
    await start_rollout(store, worker, owned=False)
    cancelled = await start_rollout(store, worker, owned=False)
    await store.queue.cancel(cancelled)
    notes: list[str] = []
    head = SimpleNamespace(_store=store, _note=notes.append, _plans={})
    await Cluster._reclaim_from(cast(Cluster, head), worker)
    assert notes == ["rollouts of a dead node: 1 are queued again, 1 have ended"]


async def test_temporary_folders_of_killed_processes_are_removed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    left, link, foreign = (tmp_path / f"polar-tmp-{ended.pid}-{name}" for name in ("a", "b", "c"))
    (left / "inner").mkdir(parents=True)
    link.symlink_to(tmp_path)
    foreign.write_text("a file")
    with temporary_folder() as own:
        await recover(store)
        assert not left.exists()
        assert own.exists()
        assert link.is_symlink()
        assert foreign.exists()
