"""Who enters a stage, in which order, and that places are never lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from polar_proxy.rollouts.stage_limits import AdmissionRequest, StageLimiter


async def test_order() -> None:
    gate = StageLimiter(1)
    entered: list[str] = []
    release = asyncio.Event()

    async def one(name: str, **given: object) -> None:
        async with gate.enter(AdmissionRequest(name, **given)):  # type: ignore[arg-type]
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
    assert (gate.inside, gate.waiting) == (1, 4)
    release.set()
    await asyncio.gather(first, *tasks)
    # With one place nothing is inside when the next is chosen: priority, then whoever came first.
    assert entered == ["a1", "u1", "b1", "c1", "a2"]


async def test_siblings_together_then_jobs_in_turn() -> None:
    gate = StageLimiter(3)
    entered: list[str] = []
    leave = {name: asyncio.Event() for name in ("a1", "b1", "b2", "a2", "c1", "d1")}

    async def one(name: str, job: str) -> None:
        async with gate.enter(AdmissionRequest(name, name[0], job)):
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


async def test_whoever_is_cancelled_or_fails_leaves_its_place() -> None:
    gate = StageLimiter(3)
    chance = random.Random(5)
    most = 0

    async def one(number: int) -> None:
        nonlocal most
        async with gate.enter(AdmissionRequest(str(number), str(number % 7))):
            most = max(most, gate.inside)
            await asyncio.sleep(chance.random() / 500)
            if number % 5 == 0:
                raise RuntimeError("failed inside")

    tasks = [asyncio.create_task(one(number)) for number in range(200)]
    for task in chance.sample(tasks, 60):
        await asyncio.sleep(chance.random() / 2000)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    everyone = asyncio.create_task(one(1))
    everyone.cancel()
    await asyncio.gather(everyone, return_exceptions=True)
    assert most == 3
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_admission() -> None:
    reason: str | None = "engine queue"
    gate = StageLimiter(2, lambda: reason)
    task = asyncio.create_task(gate.enter(AdmissionRequest("a", "a")).__aenter__())
    await asyncio.sleep(0.05)
    assert not task.done()
    reason = None
    await asyncio.wait_for(task, 60)
    assert gate.count.refusals["engine queue"] >= 1
    assert gate.count.waited > 0.04
    with pytest.raises(ValueError, match="at least one"):
        StageLimiter(0)
