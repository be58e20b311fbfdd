"""Scripted faults of a store, for tests in which a real full disk or a stopped server is impractical."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import patch

from polar_proxy.errors import StoreError
from polar_proxy.store import Store

FULL = "The disk is full: nothing can be recorded until space is freed"


@contextlib.contextmanager
def failing_writes(store: Store, problem: str = FULL) -> Iterator[None]:
    """Let every write of the store fail; it can still be read."""

    @contextlib.asynccontextmanager
    async def writing(*_: Any) -> AsyncIterator[None]:
        raise StoreError(problem)
        yield

    async def fail(*_: Any) -> None:
        raise StoreError(problem)

    with patch.multiple(store.database, writing=writing, write_in_thread=fail, probe=fail):
        yield


@contextlib.contextmanager
def away(store: Store) -> Iterator[None]:
    """Let every operation of the store fail."""

    @contextlib.asynccontextmanager
    async def reading(*_: Any) -> AsyncIterator[None]:
        raise StoreError("The database cannot be reached")
        yield

    async def read(*_: Any) -> None:
        raise StoreError("The database cannot be reached")

    reads = patch.multiple(store.database, reading=reading, read=read)
    with failing_writes(store, "The database cannot be reached"), reads:
        yield


@contextlib.contextmanager
def hanging(store: Store) -> Iterator[None]:
    """Let every operation of the store wait until the end of the block, and then go on."""
    released = asyncio.Event()
    real = {name: getattr(store.database, name) for name in ("reading", "read", "writing", "write_in_thread", "probe")}

    def waits(name: str) -> Any:
        @contextlib.asynccontextmanager
        async def connected(*given: Any) -> AsyncIterator[Any]:
            await released.wait()
            async with real[name](*given) as connection:
                yield connection

        async def called(*given: Any) -> Any:
            await released.wait()
            return await real[name](*given)

        return connected if name in ("reading", "writing") else called

    with patch.multiple(store.database, **{name: waits(name) for name in real}):
        try:
            yield
        finally:
            released.set()
