"""Who may join those that run: by the machine's memory and by the engine's load; work never stands still."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar_proxy.config import AdmissionSettings
from polar_proxy.engines.base import EngineLoad
from polar_proxy.errors import EngineError
from polar_proxy.rollouts.admission import RESERVATION_SECONDS, TOO_LITTLE_MEMORY, MemoryAdmission, free_memory_mb
from polar_proxy.rollouts.engine_monitor import ENGINE_CACHE_FULL, ENGINE_DOWN, ENGINE_QUEUE_LONG, EngineMonitor
from polar_proxy.rollouts.stage_limits import AdmissionRequest, StageLimiter
from polar_proxy.rollouts.worker import Worker, WorkerLimits
from polar_proxy.store import Store
from polar_proxy.store.stages import Claim
from tests.fakes.player import PlayerEngine
from tests.rollouts.test_worker import Scripted, stands, submit


def of(name: str, memory_mb: int | None = None) -> AdmissionRequest:
    return AdmissionRequest(name, name, memory_mb=memory_mb)


async def test_others_join_only_where_there_is_room_but_one_is_always_let_in() -> None:
    full = True
    gate = StageLimiter(3, crowded=lambda ticket: "full" if full else None)
    leave = {name: asyncio.Event() for name in "abc"}
    entered: list[str] = []

    async def one(name: str) -> None:
        async with gate.enter(of(name)):
            entered.append(name)
            await leave[name].wait()

    tasks = [asyncio.create_task(one(name)) for name in "abc"]
    await asyncio.wait_for(_until(lambda: gate.waiting == 2), 60)
    assert entered == ["a"]
    assert gate.counts() | {"waited_seconds": 0} == {
        "inside": 1,
        "waiting": 2,
        "limit": 3,
        "entered": 1,
        "waited_seconds": 0,
        "refused": gate.count.refusals["full"],
    }
    leave["a"].set()
    await asyncio.wait_for(_until(lambda: "b" in entered), 60)
    assert entered == ["a", "b"]  # nobody was inside
    full = False
    await asyncio.wait_for(_until(lambda: "c" in entered), 60)
    assert entered == ["a", "b", "c"]
    for event in leave.values():
        event.set()
    await asyncio.gather(*tasks)
    assert gate.count.refusals["full"] >= 2


async def test_a_gate_that_is_told_what_idle_means() -> None:
    """Nobody is preparing; but agents run, and there is no room for one more."""
    running = 1
    gate = StageLimiter(1, crowded=lambda ticket: TOO_LITTLE_MEMORY, idle=lambda: running == 0)
    task = asyncio.create_task(gate.enter(of("a")).__aenter__())
    await asyncio.sleep(0.3)
    assert not task.done()
    running = 0
    await asyncio.wait_for(task, 60)


def test_room_counts_what_is_still_to_come() -> None:
    free, now = 4000, 100.0
    room = MemoryAdmission(1000, 500, free=lambda: free, clock=lambda: now)
    assert room.refusal(of("a")) is None
    assert room.refusal(of("b", 2000)) is None
    assert room.refusal(of("c")) == TOO_LITTLE_MEMORY  # 4000 - 3000 that are to come - 1000 < 500
    assert room.refusal(of("c", 400)) is None
    assert room.refusal(of("c", 400)) is None  # asked again, at the next gate: not counted twice
    now += RESERVATION_SECONDS + 1
    free = 1400
    assert room.refusal(of("d")) == TOO_LITTLE_MEMORY
    free = 1500
    assert room.refusal(of("d")) is None
    assert room.refusal(of("e")) == TOO_LITTLE_MEMORY
    room.left("d")
    assert room.refusal(of("e")) is None  # what is over is not to come any more


async def test_room_is_given_back_by_rollouts_that_end(store: Store) -> None:
    """Room for two at a time, and short rollouts: the third does not wait for the minute of the first to pass."""

    async def body(held: Claim) -> float | None:
        return 1.0

    job_id = await submit(store, 4, 2)
    limits = WorkerLimits(in_flight=8, preparing=2, running=2, scoring=8, poll_seconds=0.05)
    room = MemoryAdmission(1000, 0, free=lambda: 2000)
    watched: list[str] = []
    attempt = Scripted(store, body)

    def left(rollout_id: str) -> None:
        watched.append(rollout_id)
        room.left(rollout_id)

    async with Worker(store, attempt, limits, crowded=room.refusal, room=room.refusal, on_release=left) as scheduler:
        await asyncio.wait_for(scheduler.until_idle(), RESERVATION_SECONDS / 2)
    assert await stands(store, job_id) == {"done": 8}
    assert len(watched) == len(set(watched)) == 8
    assert room.refusal(of("a", 2000)) is None  # nothing is counted any more


def test_room_that_is_not_looked_at() -> None:
    assert MemoryAdmission(0, 500, free=lambda: 1).refusal(of("a", 4000)) is None
    assert MemoryAdmission(1000, 500, free=lambda: None).refusal(of("a")) is None


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


class Busy(PlayerEngine):
    """Says what it is told to say of its load."""

    said: EngineLoad | EngineError | None = None
    gone: str | None = None

    async def health(self) -> str | None:
        return self.gone

    async def load(self) -> EngineLoad | None:
        if isinstance(self.said, EngineError):
            raise self.said
        return self.said


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (None, None),
        (EngineLoad(None, None, None), None),
        (EngineLoad(0.5, 16, 400), None),
        (EngineLoad(0.51, 0, 1), ENGINE_CACHE_FULL),
        (EngineLoad(None, 17, 1), ENGINE_QUEUE_LONG),
        (EngineLoad(0.5, 32, 400, replicas=2), None),
        (EngineLoad(0.5, 33, 400, replicas=2), ENGINE_QUEUE_LONG),
        (EngineError("it says nothing of it"), None),
    ],
)
async def test_how_busy_the_engine_is(said: EngineLoad | EngineError | None, why: str | None) -> None:
    engine = Busy()
    engine.said = said
    watch = EngineMonitor(engine, 60.0, AdmissionSettings())
    await watch.look()
    assert watch.crowded() == why
    assert watch.refusal() is None
    engine.gone = "restarting"
    await watch.look()
    assert (watch.refusal(), watch.crowded(), watch.load) == (ENGINE_DOWN, None, None)


async def test_a_machine_without_memory_goes_on_one_by_one(store: Store) -> None:
    async def body(held: Claim) -> float | None:
        await asyncio.sleep(0.01)
        return 1.0

    job_id = await submit(store, 2, 3)
    attempt = Scripted(store, body)
    limits = WorkerLimits(in_flight=6, preparing=6, running=6, scoring=6, poll_seconds=0.05)
    room = MemoryAdmission(1000, 0, free=lambda: 10)
    scheduler = Worker(store, attempt, limits, crowded=room.refusal, room=room.refusal)
    async with scheduler:
        await asyncio.wait_for(scheduler.until_idle(), 60)
        counts = scheduler.counts()
    assert await stands(store, job_id) == {"done": 6}
    assert attempt.most <= 2  # one more may be let in while another is between two gates
    assert counts["refusals"]["preparing"][TOO_LITTLE_MEMORY] > 0
    assert counts["gates"]["scoring"]["entered"] == 6


async def _until(true: object) -> None:
    while not true():  # type: ignore[operator]
        await asyncio.sleep(0.01)
