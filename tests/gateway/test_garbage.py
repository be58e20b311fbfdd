"""Garbage collection in steps: cycles are collected soon after their making, and all of them while no request waits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from polar_proxy.gateway.garbage import GarbageCollection
from polar_proxy.gateway.http.connections import Connections, LimitedConnection
from tests.until import until


class Cycle:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself: Cycle | None = self


@pytest.fixture
def thresholds() -> Iterator[None]:
    """Restore the collector's thresholds after the test. No test makes as many objects as they are."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def never() -> bool:
    return False


async def test_young_garbage_is_collected_while_requests_are_answered(thresholds: None) -> None:
    async with GarbageCollection(never, step=0.01):
        young = ref(Cycle())
        await until(lambda: young() is None)


async def test_a_disabled_collector_stays_off(thresholds: None) -> None:
    async with GarbageCollection(never, step=0.01):
        gc.disable()
        try:
            young = ref(Cycle())
            await asyncio.sleep(0.2)
            assert young() is not None
        finally:
            gc.enable()


async def test_objects_in_use_are_examined_once(thresholds: None) -> None:
    """A step moves them to the oldest generation, so the work of the next steps does not grow with them."""
    async with GarbageCollection(never, step=0.01):
        kept = [Cycle() for _ in range(1000)]
        await until(lambda: all(is_old(one) for one in kept[::100]))


async def test_old_garbage_is_collected_while_no_request_is_answered(thresholds: None) -> None:
    busy = True
    async with GarbageCollection(lambda: not busy, step=0.01, pause=0.0):
        kept = [Cycle()]
        old = ref(kept[0])
        await until(lambda: is_old(kept[0]))
        kept.clear()
        await asyncio.sleep(0.1)
        assert old() is not None
        busy = False
        await until(lambda: old() is None)


async def test_old_garbage_is_collected_after_the_longest_time(thresholds: None) -> None:
    async with GarbageCollection(never, step=0.01, longest=0.5):
        kept = [Cycle()]
        old = ref(kept[0])
        await until(lambda: is_old(kept[0]))
        kept.clear()
        await until(lambda: old() is None)


def test_connections_with_a_request_are_not_idle() -> None:
    connections, one = Connections(2), LimitedConnection()
    connections.add(one)
    connections.add(LimitedConnection())
    assert connections.are_idle()
    connections.set_waiting(one, False)
    assert not connections.are_idle()
    connections.set_waiting(one, True)
    assert connections.are_idle()
    connections.set_waiting(one, False)
    connections.remove(one)
    assert connections.are_idle()


def is_old(one: object) -> bool:
    return any(other is one for other in gc.get_objects(generation=2))
