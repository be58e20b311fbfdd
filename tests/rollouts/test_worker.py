"""The worker with scripted attempts over a real store: every rollout ends, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from polar_proxy.errors import EngineError
from polar_proxy.rollouts.admission import AdmissionCheck, AdmissionRequest, ServiceLimits, StageLimits
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.rollouts.worker import Worker
from polar_proxy.store import Store
from polar_proxy.store.repositories.rollouts import Claim
from polar_proxy.store.service.groups import KEEP_OVERFLOW
from polar_proxy.store.service.jobs import NewGroup, NewRollout
from tests.fakes.store_faults import failing_writes
from tests.until import until

pytestmark = pytest.mark.slow

QUICK = ServiceLimits(in_flight=16, preparing=2, running=3, scoring=2, lease_seconds=30.0, poll_seconds=0.05)
Body = Callable[[Claim], Awaitable[float | None]]


class ScriptedAttempt:
    """An attempt whose running stage is `body(claim) -> reward`."""

    def __init__(self, store: Store, body: Body, limits: ServiceLimits = QUICK, **checks: AdmissionCheck) -> None:
        self._store = store
        self.stages = StageLimits(limits, **checks)
        self._body = body
        self.running = 0
        self.most = 0
        self.attempts: Counter[str] = Counter()

    async def __call__(self, claim: Claim) -> None:
        limits, request = self.stages, AdmissionRequest(claim.rollout_id, claim.group_id, claim.job_id)
        self.attempts[claim.rollout_id] += 1
        async with limits.preparing.enter(request):
            await self._store.rollouts.update(claim.rollout_id, status="preparing")
        async with limits.running.enter(request):
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self._store.rollouts.update(claim.rollout_id, status="running")
                reward = await self._body(claim)
            finally:
                self.running -= 1
        async with limits.scoring.enter(request):
            await self._store.rollouts.update(claim.rollout_id, status="scoring")
            await self._store.rewards.add(claim.rollout_id, reward, "tests", {})
            await self._store.rollouts.update(claim.rollout_id, status="done")


async def submit(store: Store, groups: int, size: int, wanted: int | None = None, **config: object) -> str:
    await store.tasks.put("t", "f", 1, "do", {})
    rollout = NewRollout("h 1", "process", "e", "m", 1, {})
    group = NewGroup("t", wanted or size, dict(config), (rollout,) * size, for_training=True)
    job, _ = await store.jobs.submit({}, [group] * groups)
    return job.job_id


async def rollout_counts(store: Store, job_id: str) -> dict[str, int]:
    job = await store.jobs.get(job_id)
    assert job is not None
    return job.rollouts


async def until_ended(store: Store, worker: Worker, job_id: str) -> None:
    """Wait until the job has ended and nothing of it is in flight."""
    async with asyncio.timeout(60):
        while (job := await store.jobs.get(job_id)) is None or job.ended_at is None or worker.in_flight:
            await asyncio.sleep(0.02)


async def test_claims_again_after_errors_of_engine_and_queue(store: Store) -> None:
    """A killed engine reports no policy version, and another error is unexpected; rollouts are claimed afterwards."""
    faults: list[Exception] = [EngineError("the engine is gone"), RuntimeError("unforeseen"), EngineError("still gone")]

    async def version() -> str | None:
        if faults:
            raise faults.pop()
        return "7"

    async def body(claim: Claim) -> float | None:
        return 1.0

    job_id = await submit(store, 1, 2)
    async with Worker(store, ScriptedAttempt(store, body), QUICK, policy_version=version):
        async with asyncio.timeout(60):
            while (await rollout_counts(store, job_id)) != {"done": 2}:
                await asyncio.sleep(0.05)
    assert faults == []


async def test_runs_all_rollouts_within_the_limits(store: Store) -> None:
    chance = random.Random(3)
    together = asyncio.Event()

    async def body(claim: Claim) -> float | None:
        if attempt.running > 1:
            together.set()
        await together.wait()  # the first for a second
        await asyncio.sleep(chance.random() / 100)
        return chance.choice([0.0, 1.0, None])

    job_id = await submit(store, 5, 4)
    attempt = ScriptedAttempt(store, body)
    settled: list[str] = []
    async with Worker(store, attempt, QUICK, on_settled=settled.append) as worker:
        await until_ended(store, worker, job_id)
    assert await rollout_counts(store, job_id) == {"done": 20}
    assert 1 < attempt.most <= 3
    assert sorted(settled) == [group.group_id for group in await store.groups.of_job(job_id)]
    assert await store.feed.depth() == {"waiting": 5}
    job = await store.jobs.get(job_id)
    assert job is not None
    assert job.status == "done"


async def test_a_failed_attempt_waits_for_the_store(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Its worker keeps the claim and queues it again as soon as the store can be written, without a traceback."""
    failing = contextlib.ExitStack()

    async def body(claim: Claim) -> float | None:
        if claim.attempt == 1:
            failing.enter_context(failing_writes(store))
            raise InfrastructureError("store", "the disk is full")
        return 1.0

    job_id = await submit(store, 1, 1)
    attempt = ScriptedAttempt(store, body)
    async with Worker(store, attempt, replace(QUICK, retry_seconds=0.0)) as worker:
        await until(lambda: "cannot be written" in caplog.text)
        await asyncio.sleep(0.3)
        failing.close()
        async with asyncio.timeout(QUICK.lease_seconds / 2):
            await until_ended(store, worker, job_id)
    (row,) = await store.rollouts.find()
    assert (row.status, row.attempt) == ("done", 2)
    assert [record for record in caplog.records if record.exc_info] == []


async def test_retries_infrastructure_failures_only(store: Store) -> None:
    async def body(claim: Claim) -> float | None:
        if claim.attempt < 3 and claim.group_index == 0:
            raise InfrastructureError("sandbox", "the sandbox would not start")
        if claim.group_index == 1:
            raise InfrastructureError("engine", "the engine is gone")
        return 1.0

    job_id = await submit(store, 1, 3)
    attempt = ScriptedAttempt(store, body)
    async with Worker(store, attempt, QUICK) as worker:
        await until_ended(store, worker, job_id)
    rows = sorted(await store.rollouts.find(), key=lambda row: row.group_index)
    assert [(row.status, row.error) for row in rows] == [
        ("done", None),
        ("failed", "the engine is gone"),
        ("done", None),
    ]
    assert [attempt.attempts[row.rollout_id] for row in rows] == [3, 3, 1]
    (group,) = await store.groups.of_job(job_id)
    assert group.status == "finished"


async def test_first_n_cancels_the_rest_of_the_group(store: Store) -> None:
    async def body(claim: Claim) -> float | None:
        await asyncio.sleep(0.01 if claim.group_index in (1, 2) else 600)
        return 1.0

    job_id = await submit(store, 1, 3, wanted=2, group_policy="first_n")
    async with Worker(store, ScriptedAttempt(store, body), QUICK) as worker:
        await until_ended(store, worker, job_id)
    assert await rollout_counts(store, job_id) == {"done": 2, "cancelled": 1}
    (group,) = await store.groups.of_job(job_id)
    assert (group.status, group.reason, group.delivery) == ("finished", "the first 2 have ended", "waiting")


async def test_keeps_overflowing_rollouts_for_the_next_group(store: Store) -> None:
    """Two groups of three, of which two complete a group; the slowest of the first group counts in the second.

    Three rollouts run at a time, so the second group still has one that has not started when the first is complete.
    """
    slow = asyncio.Event()

    async def body(claim: Claim) -> float | None:
        if claim.rollout_id not in quick:
            await slow.wait()
        return 1.0

    job_id = await submit(store, 2, 3, wanted=2, group_policy="first_n", **KEEP_OVERFLOW)
    first, second = await store.groups.of_job(job_id)
    rows = await store.rollouts.find(group_id=first.group_id)
    kept, *quick = [row.rollout_id for row in sorted(rows, key=lambda row: row.group_index)]
    limits = ServiceLimits(in_flight=3, preparing=3, running=3, scoring=3, poll_seconds=0.05)
    attempt = ScriptedAttempt(store, body, limits)
    async with Worker(store, attempt, limits) as worker:
        async with asyncio.timeout(60):
            while (group := await store.groups.get(first.group_id)) is None or group.ended_at is None:
                await asyncio.sleep(0.02)
        assert await store.rollouts.group_id(kept) == second.group_id
        slow.set()
        await until_ended(store, worker, job_id)
        job = await store.jobs.get(job_id)
    assert group is not None
    assert (group.status, group.reason) == ("finished", "the first 2 have ended")
    assert job is not None
    assert job.status == "done"
    assert await group_counts(store, first.group_id) == {"done": 2, "cancelled": 1}
    assert (await group_counts(store, second.group_id))["done"] >= 2
    row = await store.rollouts.get(kept)
    assert row is not None
    assert (row.status, attempt.attempts[kept]) == ("done", 1)
    assert await store.feed.depth() == {"waiting": 2}


async def test_an_unknown_policy_waits_for_all(store: Store) -> None:
    async def body(claim: Claim) -> float | None:
        return 1.0

    job_id = await submit(store, 1, 3, wanted=1, group_policy="of_tomorrow")
    async with Worker(store, ScriptedAttempt(store, body), QUICK) as worker:
        await until_ended(store, worker, job_id)
    assert await rollout_counts(store, job_id) == {"done": 3}


async def group_counts(store: Store, group_id: str) -> dict[str, int]:
    return dict(Counter(row.status for row in await store.rollouts.find(group_id=group_id)))


async def test_ends_rollouts_cancelled_by_another_process(store: Store) -> None:
    async def body(claim: Claim) -> float | None:
        await asyncio.sleep(600)
        return None

    job_id = await submit(store, 2, 3)
    attempt = ScriptedAttempt(store, body)
    async with Worker(store, attempt, QUICK) as worker:
        while attempt.running < 3:
            await asyncio.sleep(0.01)
        await store.jobs.set_status(job_id, "cancelled")
        await until_ended(store, worker, job_id)
    assert await rollout_counts(store, job_id) == {"cancelled": 6}
    assert {group.status for group in await store.groups.of_job(job_id)} == {"cancelled"}


async def test_a_stopped_worker_puts_rollouts_back_into_the_queue(store: Store) -> None:
    slow = True

    async def body(claim: Claim) -> float | None:
        await asyncio.sleep(600 if slow else 0)
        return 1.0

    job_id = await submit(store, 1, 4)
    attempt = ScriptedAttempt(store, body)
    async with Worker(store, attempt, QUICK):
        while attempt.running < 3:
            await asyncio.sleep(0.01)
    assert await rollout_counts(store, job_id) == {"queued": 4}
    slow = False
    async with Worker(store, attempt, QUICK) as worker:
        await until_ended(store, worker, job_id)
    assert await rollout_counts(store, job_id) == {"done": 4}


async def test_reclaims_rollouts_of_a_dead_worker(store: Store) -> None:
    async def body(claim: Claim) -> float | None:
        return 1.0

    job_id = await submit(store, 1, 3)
    assert len(await store.queue.claim("dead", 2, 0.2)) == 2
    attempt = ScriptedAttempt(store, body)
    async with Worker(store, attempt, QUICK), asyncio.timeout(60):
        while await rollout_counts(store, job_id) != {"done": 3}:
            await asyncio.sleep(0.05)
    assert await rollout_counts(store, job_id) == {"done": 3}
    assert set(attempt.attempts.values()) == {1}


async def test_starts_nothing_while_the_trainer_is_behind(store: Store) -> None:
    async def body(claim: Claim) -> float | None:
        return 1.0

    await submit(store, 6, 1)
    limits = ServiceLimits(in_flight=1, poll_seconds=0.02, backlog=2)
    async with Worker(store, ScriptedAttempt(store, body), limits):
        await until_feed(store, {"waiting": 2, "open": 4})
        for lease in (await store.feed.lease("trainer", 2, 60)).leases:
            await store.feed.acknowledge(lease.lease_id)
        await until_feed(store, {"waiting": 2, "open": 2, "delivered": 2})


async def until_feed(store: Store, depth: dict[str, int]) -> None:
    """Wait until the feed has this depth, and check that it stays so."""
    async with asyncio.timeout(60):
        while await store.feed.depth() != depth:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert await store.feed.depth() == depth
