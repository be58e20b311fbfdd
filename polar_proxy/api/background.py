"""Background work of an API server: send callbacks, end pauses, count groups for the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

from polar_proxy.api.callbacks import CallbackSender, callback_secret
from polar_proxy.api.context import ApiContext
from polar_proxy.errors import StoreError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_FEED_SECONDS = 5.0


class BackgroundLoops:
    """`async with BackgroundLoops(context)` runs the loops until the block ends, and then ends the API's streams.

    Several servers may do this on one database: each callback and each pause is handled by one of them.
    """

    def __init__(self, context: ApiContext) -> None:
        """Raises UsageError if the callback secret is invalid or cannot be stored."""
        self._context = context
        self._sender = CallbackSender(context.store, context.settings.api, callback_secret(context.settings))
        self._tasks: list[asyncio.Task[None]] = []
        self.feed_depth: dict[str, int] = {}
        """Number of groups in each state of the feed, at most a few seconds old."""

    async def __aenter__(self) -> Self:
        loops = (
            ("callbacks", self._send_callbacks, _POLL_SECONDS),
            ("pauses", self._end_pauses, _POLL_SECONDS),
            ("feed", self._count_feed, _FEED_SECONDS),
        )
        self._tasks = [
            asyncio.create_task(_run_forever(name, work, pause), name=f"polar-{name}") for name, work, pause in loops
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._context.closing.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sender.close()

    async def _send_callbacks(self) -> None:
        while await self._sender.send_due():
            pass

    async def _end_pauses(self) -> None:
        if await self._context.store.jobs.resume_due():
            self._context.wake()

    async def _count_feed(self) -> None:
        self.feed_depth = await self._context.store.feed.depth()


async def _run_forever(name: str, work: Callable[[], Awaitable[None]], pause: float) -> None:
    while True:
        try:
            await work()
        except StoreError:
            log.exception("%s: the database cannot be used; trying again", name)
            await asyncio.sleep(10 * pause)
        await asyncio.sleep(pause)
