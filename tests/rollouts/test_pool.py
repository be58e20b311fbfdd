"""The pool of sandboxes: each is alive when taken, is taken once, and is closed if left."""

from __future__ import annotations

import asyncio

import pytest

from polar_proxy.rollouts.pool import SandboxPool
from sandboxes.base import ResourceLimits, Sandbox, SandboxEnded, SandboxError, SandboxKind, SandboxSpec
from sandboxes.choice import open_sandbox
from sandboxes.orphans import default_state_dir

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_sandbox_register")]

SPEC = SandboxSpec(limits=ResourceLimits(memory_mb=None))
OTHER = SandboxSpec(limits=ResourceLimits(memory_mb=None), env={"A": "1"})


def registered() -> int:
    folder = default_state_dir()
    return sum(path.name.startswith("polar-") for path in folder.iterdir()) if folder.exists() else 0


async def test_refills_with_the_same_specification() -> None:
    async with SandboxPool(2, refill=True) as pool:
        first = await pool.take("process", SPEC)
        second = await pool.take(
            "process", SandboxSpec(limits=ResourceLimits(memory_mb=None), labels={"polar.rollout": "r"})
        )
        other = await pool.take("process", OTHER)
        assert len({first.id, second.id, other.id}) == 3
        assert (pool.count.hits, pool.count.misses, pool.waiting) == (1, 2, 2)
        for sandbox in (first, second, other):
            assert (await sandbox.exec(("ls", "-A"))).stdout == b""
            await sandbox.close()
    assert registered() == 0


async def test_replaces_a_dead_sandbox() -> None:
    async with SandboxPool(1) as pool:
        pool.expect("process", SPEC)
        _, task = pool._waiting[0]
        await (await task).close()
        sandbox = await pool.take("process", SPEC)
        assert (await sandbox.exec(("true",))).exit_code == 0
        assert (pool.count.hits, pool.count.misses, pool.count.dead) == (0, 1, 1)
        await sandbox.close()
        with pytest.raises(SandboxEnded):
            await (await task).exec(("true",))


async def test_holds_at_most_its_size() -> None:
    opened: list[Sandbox] = []

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        if spec.env:
            raise SandboxError("no room")
        opened.append(await open_sandbox(kind, spec))
        return opened[-1]

    async with SandboxPool(1, opener=opener) as pool:
        pool.expect("process", SPEC)
        pool.expect("process", SPEC)
        await pool._waiting[0][1]
        pool.expect("process", OTHER)  # replaces a waiting sandbox, and cannot be opened
        assert pool.waiting == 1
        with pytest.raises(SandboxError, match="no room"):
            await pool.take("process", OTHER)
        assert (len(opened), pool.waiting, pool.count.dead) == (1, 0, 1)
    assert registered() == 0


async def test_holds_as_many_as_are_taken_while_one_opens() -> None:
    """Three are taken at a time, repeatedly; opening one takes longer than the pause between."""

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(0.5)
        return await open_sandbox(kind, spec)

    async def take() -> None:
        await (await pool.take("process", SPEC)).close()

    async with SandboxPool(8, refill=True, opener=opener) as pool:
        await asyncio.gather(take(), take(), take())
        assert (pool.count.hits, pool.count.misses) == (0, 3)
        await asyncio.gather(take(), take(), take())
        await asyncio.gather(take(), take(), take())
        assert (pool.count.hits, pool.count.misses) == (6, 3)
        assert pool.counts() | {"waited_seconds": 0} == {
            "waiting": pool.waiting,
            "size": 8,
            "hits": 6,
            "misses": 3,
            "dead": 0,
            "waited_seconds": 0,
        }
        assert 3 <= pool.waiting <= 8
    assert registered() == 0


async def test_a_cancelled_taker_returns_its_sandbox() -> None:
    gate = asyncio.Event()

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        await gate.wait()
        return await open_sandbox(kind, spec)

    async with SandboxPool(1, opener=opener) as pool:
        pool.expect("process", SPEC)
        taking = asyncio.create_task(pool.take("process", SPEC))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert pool.waiting == 1  # for the next taker
        gate.set()
        sandbox = await pool.take("process", SPEC)
        assert pool.count.hits == 1
        await sandbox.close()
    assert registered() == 0
