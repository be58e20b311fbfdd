"""What a server of the API does beside answering: callbacks, pauses that are over, figures for the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from polar_proxy.api.callbacks import CallbackSender, callback_secret
from polar_proxy.api.context import ApiContext
from polar_proxy.errors import StoreError

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_DEPTH_SECONDS = 5.0


class BackgroundLoops:
    """`async with Housekeeping(api)` works until the block ends; then the streams of the API end, too.

    Any number of these may work on one database: each thing is done by one of them.
    """

    def __init__(self, api: ApiContext) -> None:
        """Raises UsageError where the secret that callbacks are signed with is none, or cannot be kept."""
        self._api = api
        self._sender = CallbackSender(api.store, api.settings.api, callback_secret(api.settings))
        self._tasks: list[asyncio.Task[None]] = []
        self.feed_depth: dict[str, int] = {}
        """As it was a few seconds ago."""

    async def __aenter__(self) -> Self:
        jobs = (
            ("callbacks", self._send, _LOOK_SECONDS),
            ("pauses", self._resume, _LOOK_SECONDS),
            ("feed", self._look, _DEPTH_SECONDS),
        )
        self._tasks = [
            asyncio.create_task(_again_and_again(name, work, pause), name=f"polar-{name}") for name, work, pause in jobs
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._api.closing.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sender.close()

    async def _send(self) -> None:
        while await self._sender.send_due():
            pass

    async def _resume(self) -> None:
        if await self._api.store.jobs.resume_due():
            self._api.wake()

    async def _look(self) -> None:
        self.feed_depth = await self._api.store.feed.depth()


async def _again_and_again(name: str, work: Callable[[], Awaitable[None]], pause: float) -> None:
    while True:
        try:
            await work()
        except StoreError:
            log.exception("%s: the database cannot be used; trying again", name)
            await asyncio.sleep(10 * pause)
        await asyncio.sleep(pause)
