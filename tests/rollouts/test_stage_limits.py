"""The order in which rollouts enter a stage, and that no place is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from polar_proxy.rollouts.stage_limits import AdmissionRequest, StageLimiter


async def test_admits_by_priority_then_in_order() -> None:
    limiter = StageLimiter(1)
    entered: list[str] = []
    release = asyncio.Event()

    async def one(name: str, **given: object) -> None:
        async with limiter.enter(AdmissionRequest(name, **given)):  # type: ignore[arg-type]
            entered.append(name)
            await release.wait()
            await asyncio.sleep(0)

    first = asyncio.create_task(one("a1", group_id="a", job_id="x"))
    await asyncio.sleep(0)
    tasks = [
        asyncio.create_task(one(*args, **kwargs))  # type: ignore[arg-type]
        for args, kwargs in [
            (("b1",), {"group_id": "b", "job_id": "x"}),
            (("c1",), {"group_id": "c", "job_id": "y"}),
            (("a2",), {"group_id": "a", "job_id": "x"}),
            (("u1",), {"group_id": "u", "job_id": "x", "priority": 9}),
        ]
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    assert (limiter.inside, limiter.waiting) == (1, 4)
    release.set()
    await asyncio.gather(first, *tasks)
    # With one place nothing is inside when the next is chosen, so priority and order of arrival decide.
    assert entered == ["a1", "u1", "b1", "c1", "a2"]


async def test_admits_siblings_first_then_jobs_in_turn() -> None:
    limiter = StageLimiter(3)
    entered: list[str] = []
    leave = {name: asyncio.Event() for name in ("a1", "b1", "b2", "a2", "c1", "d1")}

    async def one(name: str, job: str) -> None:
        async with limiter.enter(AdmissionRequest(name, name[0], job)):
            entered.append(name)
            await leave[name].wait()

    jobs = {"a": "x", "b": "x", "c": "y", "d": "x"}
    tasks = [asyncio.create_task(one(name, jobs[name[0]])) for name in ("a1", "b1", "b2", "d1", "c1", "a2")]
    for _ in range(5):
        await asyncio.sleep(0)
    assert entered == ["a1", "b1", "b2"]
    for name, following in (("b1", "a2"), ("b2", "c1"), ("a1", "d1")):
        leave[name].set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert entered[-1] == following
    for event in leave.values():
        event.set()
    await asyncio.gather(*tasks)


async def test_cancelled_and_failed_rollouts_free_their_place() -> None:
    limiter = StageLimiter(3)
    chance = random.Random(5)
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        async with limiter.enter(AdmissionRequest(str(number), str(number % 7))):
            most = max(most, limiter.inside)
            await asyncio.sleep(chance.random() / 500)
            if number % 5 == 0:
                raise RuntimeError("failed inside")

    tasks = [asyncio.create_task(one(number)) for number in range(200)]
    for task in chance.sample(tasks, 60):
        await asyncio.sleep(chance.random() / 2000)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    later = asyncio.create_task(one(1))
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)
    assert most == 3
    assert (limiter.inside, limiter.waiting) == (0, 0)


async def test_waits_while_may_enter_refuses() -> None:
    reason: str | None = "engine queue"
    limiter = StageLimiter(2, may_enter=lambda request: reason)
    task = asyncio.create_task(limiter.enter(AdmissionRequest("a", "a")).__aenter__())
    await asyncio.sleep(0.05)
    assert not task.done()
    reason = None
    await asyncio.wait_for(task, 60)
    assert limiter.count.refusals["engine queue"] >= 1
    assert limiter.count.waited > 0.04
    with pytest.raises(ValueError, match="at least one"):
        StageLimiter(0)
