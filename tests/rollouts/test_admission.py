"""The order in which rollouts enter a stage, and admission by memory and engine load; work never stops for good."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from polar_proxy.config import AdmissionSettings
from polar_proxy.engines.base import EngineLoad
from polar_proxy.errors import EngineError
from polar_proxy.rollouts.admission import (
    ENGINE_CACHE_FULL,
    ENGINE_DOWN,
    ENGINE_QUEUE_LONG,
    RESERVATION_SECONDS,
    TOO_LITTLE_MEMORY,
    AdmissionRequest,
    EngineMonitor,
    MemoryAdmission,
    ServiceLimits,
    StageLimiter,
    free_memory_mb,
)
from polar_proxy.rollouts.worker import Worker
from polar_proxy.store import Store
from polar_proxy.store.repositories.rollouts import Claim
from tests.fakes.player import PlayerEngine
from tests.rollouts.test_worker import ScriptedAttempt, rollout_counts, submit, until_ended


def request(name: str, memory_mb: int | None = None) -> AdmissionRequest:
    return AdmissionRequest(name, name, memory_mb=memory_mb)


async def test_admits_in_order() -> None:
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
            (("u1",), {"group_id": "u", "job_id": "x"}),
        ]
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    assert (limiter.inside, limiter.waiting) == (1, 4)
    release.set()
    await asyncio.gather(first, *tasks)
    # With one place nothing is inside when the next is chosen, so the order of arrival decides.
    assert entered == ["a1", "b1", "c1", "a2", "u1"]


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
    assert limiter.refusals["engine queue"] >= 1
    assert limiter.waited_seconds > 0.04
    with pytest.raises(ValueError, match="at least one"):
        StageLimiter(0)


async def test_one_rollout_enters_even_while_may_join_refuses() -> None:
    full = True
    limiter = StageLimiter(3, may_join=lambda request: "full" if full else None)
    leave = {name: asyncio.Event() for name in "abc"}
    entered: list[str] = []

    async def one(name: str) -> None:
        async with limiter.enter(request(name)):
            entered.append(name)
            await leave[name].wait()

    tasks = [asyncio.create_task(one(name)) for name in "abc"]
    await asyncio.wait_for(_until(lambda: limiter.waiting == 2), 60)
    assert entered == ["a"]
    assert limiter.counts() | {"waited_seconds": 0} == {
        "inside": 1,
        "waiting": 2,
        "limit": 3,
        "entered": 1,
        "waited_seconds": 0,
        "refusals": {"full": limiter.refusals["full"]},
    }
    leave["a"].set()
    await asyncio.wait_for(_until(lambda: "b" in entered), 60)
    assert entered == ["a", "b"]  # nothing was inside
    full = False
    await asyncio.wait_for(_until(lambda: "c" in entered), 60)
    assert entered == ["a", "b", "c"]
    for event in leave.values():
        event.set()
    await asyncio.gather(*tasks)
    assert limiter.refusals["full"] >= 2


async def test_uses_the_given_idle_function() -> None:
    """Nothing is preparing, but agents run and there is no memory for one more."""
    running = 1
    limiter = StageLimiter(1, may_join=lambda request: TOO_LITTLE_MEMORY, idle=lambda: running == 0)
    task = asyncio.create_task(limiter.enter(request("a")).__aenter__())
    await asyncio.sleep(0.3)
    assert not task.done()
    running = 0
    await asyncio.wait_for(task, 60)


def test_memory_counts_reservations() -> None:
    free, now = 4000, 100.0
    memory = MemoryAdmission(1000, 500, free=lambda: free, clock=lambda: now)
    assert memory.refusal(request("a")) is None
    assert memory.refusal(request("b", 2000)) is None
    assert memory.refusal(request("c")) == TOO_LITTLE_MEMORY  # 4000 MiB - 3000 reserved - 1000 < 500
    assert memory.refusal(request("c", 400)) is None
    assert memory.refusal(request("c", 400)) is None  # asked again at the next stage, and not counted twice
    now += RESERVATION_SECONDS + 1
    free = 1400
    assert memory.refusal(request("d")) == TOO_LITTLE_MEMORY
    free = 1500
    assert memory.refusal(request("d")) is None
    assert memory.refusal(request("e")) == TOO_LITTLE_MEMORY
    memory.release("d")
    assert memory.refusal(request("e")) is None  # a released reservation no longer counts


async def test_memory_is_released_by_rollouts_that_end(store: Store) -> None:
    """There is memory for two short rollouts at a time; the third does not wait until a reservation expires."""

    async def body(claim: Claim) -> float | None:
        return 1.0

    job_id = await submit(store, 4, 2)
    limits = ServiceLimits(in_flight=8, preparing=2, running=2, scoring=8, poll_seconds=0.05)
    memory = MemoryAdmission(1000, 0, free=lambda: 2000)
    released: list[str] = []
    attempt = ScriptedAttempt(store, body, limits, may_run=memory.refusal, may_prepare=memory.refusal)

    def release(rollout_id: str) -> None:
        released.append(rollout_id)
        memory.release(rollout_id)

    async with Worker(store, attempt, limits, on_release=release) as worker:
        await asyncio.wait_for(until_ended(store, worker, job_id), RESERVATION_SECONDS / 2)
    assert await rollout_counts(store, job_id) == {"done": 8}
    assert len(released) == len(set(released)) == 8
    assert memory.refusal(request("a", 2000)) is None  # no reservation is left


def test_memory_check_can_be_off_or_unknown() -> None:
    assert MemoryAdmission(0, 500, free=lambda: 1).refusal(request("a", 4000)) is None
    assert MemoryAdmission(1000, 500, free=lambda: None).refusal(request("a")) is None


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9000000 kB\nHugePages_Free: 0\nMemAvailable:  4096000 kB\n"}, 4000),
        (
            {
                "proc/meminfo": "MemAvailable: 4096000 kB\n",
                "sys/fs/cgroup/memory.current": "1073741824\n",
                "sys/fs/cgroup/memory.max": "2147483648\n",
                "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 104857600\n",
            },
            1124,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 4096000 kB\n",
                "sys/fs/cgroup/memory.current": "1073741824\n",
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 1\n",
            },
            4000,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 4096000 kB\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "3221225472\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            0,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 4096000 kB\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "3221225472\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            4000,
        ),
    ],
)
def test_free_memory(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_memory_mb(tmp_path) == free


class ReportingEngine(PlayerEngine):
    """Reports a given load and health."""

    reported: EngineLoad | EngineError | None = None
    down: str | None = None

    async def health(self) -> str | None:
        return self.down

    async def load(self) -> EngineLoad | None:
        if isinstance(self.reported, EngineError):
            raise self.reported
        return self.reported


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        (None, None),
        (EngineLoad(None, None, None), None),
        (EngineLoad(0.5, 16, 400), None),
        (EngineLoad(0.51, 0, 1), ENGINE_CACHE_FULL),
        (EngineLoad(None, 17, 1), ENGINE_QUEUE_LONG),
        (EngineLoad(0.5, 32, 400, replicas=2), None),
        (EngineLoad(0.5, 33, 400, replicas=2), ENGINE_QUEUE_LONG),
        (EngineError("no statistics"), None),
    ],
)
async def test_reports_a_busy_or_down_engine(reported: EngineLoad | EngineError | None, reason: str | None) -> None:
    engine = ReportingEngine()
    engine.reported = reported
    monitor = EngineMonitor(engine, 60.0, AdmissionSettings())
    await monitor.check()
    assert monitor.busy() == reason
    assert monitor.down() is None
    engine.down = "restarting"
    await monitor.check()
    assert (monitor.down(), monitor.busy(), monitor.load) == (ENGINE_DOWN, None, None)


async def test_without_memory_rollouts_run_one_at_a_time(store: Store) -> None:
    async def body(claim: Claim) -> float | None:
        await asyncio.sleep(0.01)
        return 1.0

    job_id = await submit(store, 2, 3)
    limits = ServiceLimits(in_flight=6, preparing=6, running=6, scoring=6, poll_seconds=0.05)
    memory = MemoryAdmission(1000, 0, free=lambda: 10)
    attempt = ScriptedAttempt(store, body, limits, may_run=memory.refusal, may_prepare=memory.refusal)
    async with Worker(store, attempt, limits) as worker:
        await until_ended(store, worker, job_id)
    counts = attempt.stages.counts()
    assert await rollout_counts(store, job_id) == {"done": 6}
    assert attempt.most <= 2  # one more may enter while another is between two stages
    assert counts["preparing"]["refusals"][TOO_LITTLE_MEMORY] > 0
    assert counts["scoring"]["entered"] == 6


async def _until(true: object) -> None:
    while not true():  # type: ignore[operator]
        await asyncio.sleep(0.01)
