"""Background work of an API server: send callbacks, end pauses whose time is over, count groups for the metrics.

Callbacks are signed. Only one server at a time sends a given callback. A failed callback is sent again, unless the
receiver answered 410 or `api.callback_attempts` attempts were made. All attempts send the same body, that of the first
attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Self

import httpx

from polar_proxy import __version__, webhooks
from polar_proxy.api.callback_transport import PublicTransport
from polar_proxy.api.context import ApiContext, require, write_private
from polar_proxy.api_models import CallbackPayload
from polar_proxy.config import ApiSettings, Settings
from polar_proxy.errors import ApiError, StoreError
from polar_proxy.gateway.health import OutageLog
from polar_proxy.records import find_group, find_job
from polar_proxy.store import Store
from polar_proxy.store.service.job_events import CallbackRow
from polar_proxy.types import Json

SECRET_FILE = "callback-secret"
POLL_SECONDS = 0.5
_FEED_SECONDS = 5.0
_BATCH = 16
_GONE = 410
"""HTTP status by which a receiver refuses callbacks (Standard Webhooks). The callback is then not sent again."""

log = logging.getLogger(__name__)


class BackgroundLoops:
    """`async with BackgroundLoops(context)` runs the loops until the block ends.

    The end of the block also ends open streams of events, and requests that wait until a group can be leased.

    Several servers of one database may run the loops: each callback is sent, and each pause ended, by only one server.
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
            ("callbacks", self._send_callbacks, POLL_SECONDS),
            ("pauses", self._end_pauses, POLL_SECONDS),
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
    outage = OutageLog(f"{name}: the background work waits for the store")
    while True:
        try:
            await work()
            outage.worked()
        except StoreError as error:
            outage.failed(error)
            await asyncio.sleep(10 * pause)
        except Exception:
            log.exception("%s: the background work failed; trying again", name)
            await asyncio.sleep(10 * pause)
        await asyncio.sleep(pause)


def callback_secret(settings: Settings) -> str:
    """Return the secret that signs callbacks: from the settings, or else from a file in Polar's home folder.

    The file is created with a new secret if it does not exist. Raises UsageError for an invalid secret.
    """
    secret, path = settings.api.callback_secret, settings.home / SECRET_FILE
    if secret is None and path.exists():
        secret = path.read_text().strip()
    elif secret is None:
        write_private(path, webhooks.new_secret(), keep_existing=True)
        secret = path.read_text().strip()  # of another server, if one has started at the same time
    webhooks.sign("check", 0, "", secret)
    return secret


class CallbackSender:
    """Sender of the callbacks that are due, whichever process created them."""

    def __init__(self, store: Store, settings: ApiSettings, secret: str) -> None:
        self._store = store
        self._settings = settings
        self._secret = secret
        # Redirects are not followed: a callback URL must not lead anywhere else.
        self._http = httpx.AsyncClient(
            transport=None if settings.private_callbacks else PublicTransport(),
            follow_redirects=False,
            trust_env=False,
            timeout=settings.callback_timeout_seconds,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def send_due(self) -> int:
        """Send the next batch of callbacks that are due; return the size of the batch."""
        rows = await self._store.callbacks.claim(_BATCH, 2 * self._settings.callback_timeout_seconds + 10)
        await asyncio.gather(*(self._send(row) for row in rows))
        return len(rows)

    async def _send(self, row: CallbackRow) -> None:
        try:
            body = row.body or await self._store.callbacks.fix_body(row.callback_id, await self._body(row))
        except ApiError as error:  # the group or job was pruned meanwhile
            await self._store.callbacks.mark_failed(row.callback_id, str(error), None)
            return
        status: int | None = None
        try:
            status = await self._post(row, body)
            problem = None if 200 <= status < 300 else f"answered {status}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            await self._store.callbacks.mark_delivered(row.callback_id)
        elif status != _GONE and row.attempts < self._settings.callback_attempts:
            pause = self._settings.callback_pause_seconds * 4.0 ** (row.attempts - 1)
            await self._store.callbacks.mark_failed(row.callback_id, problem, pause)
        else:
            log.warning("callback %s of %s is given up: %s", row.callback_id, row.job_id, problem)
            await self._store.callbacks.mark_failed(row.callback_id, problem, None)

    async def _post(self, row: CallbackRow, body: str) -> int:
        """Send a callback once, and return the status of the response."""
        stamp = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": f"polar/{__version__}",
            "webhook-id": row.callback_id,
            "webhook-timestamp": str(stamp),
            "webhook-signature": webhooks.sign(row.callback_id, stamp, body, self._secret),
        }
        # The response body is not read: it is not needed, and may be endless.
        async with self._http.stream("POST", row.url, content=body, headers=headers) as response:
            return response.status_code

    async def _body(self, row: CallbackRow) -> str:
        """Return the callback's JSON body. Raises ApiError if the group or job no longer exists."""
        if row.group_id is not None:
            group = await require("group", row.group_id, find_group(self._store, row.group_id))
            data: Json = group.model_dump(mode="json")
        else:
            data = (await require("job", row.job_id, find_job(self._store, row.job_id))).model_dump(mode="json")
        return CallbackPayload(type=row.kind, timestamp=row.created_at, data=data).model_dump_json()
