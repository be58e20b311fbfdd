"""Telling the callback URLs of jobs: signed, again until they are taken, by one sender at a time.

The form is that of the Standard Webhooks specification (https://www.standardwebhooks.com): `webhook-id`,
`webhook-timestamp` and `webhook-signature`, the last over the bytes as they are sent. What is sent is made at the first
attempt and is the same at each later one.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from pathlib import Path

import httpx

from polar_proxy import __version__
from polar_proxy.api import serializers
from polar_proxy.api.auth import write_private
from polar_proxy.api_models import CallbackPayload
from polar_proxy.client.callbacks import PREFIX, signature
from polar_proxy.client.errors import ApiError
from polar_proxy.config import ApiSettings, Settings
from polar_proxy.store import Store
from polar_proxy.store.callbacks import CallbackRow
from polar_proxy.types import Json

SECRET_FILE = "callback-secret"
_AT_ONCE = 16
_GONE = 410
"""The receiver wants no more of them, as the specification has it."""

log = logging.getLogger(__name__)


def callback_secret(settings: Settings) -> str:
    """That of the settings; else the one in the home's file, which is made where it is missing. Raises UsageError."""
    if settings.api.callback_secret is not None:
        secret = settings.api.callback_secret
    else:
        secret = _kept_secret(settings.home / SECRET_FILE)
    signature("check", 0, b"", secret)
    return secret


def _kept_secret(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        secret = PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()
        write_private(path, secret)
        return secret


class CallbackSender:
    """Sends what is due, whichever process wrote it down."""

    def __init__(self, store: Store, settings: ApiSettings, secret: str) -> None:
        self._store = store
        self._settings = settings
        self._secret = secret
        # A receiver that redirects has moved, or wants to send us elsewhere: neither is followed.
        self._http = httpx.AsyncClient(
            follow_redirects=False, trust_env=False, timeout=settings.callback_timeout_seconds
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def send_due(self) -> int:
        """Sends at most so many at once; returns how many were due."""
        rows = await self._store.callbacks.claim(_AT_ONCE, 2 * self._settings.callback_timeout_seconds + 10)
        await asyncio.gather(*(self._send(row) for row in rows))
        return len(rows)

    async def _send(self, row: CallbackRow) -> None:
        try:
            body = row.body or await self._store.callbacks.fix_body(row.callback_id, await self._body(row))
        except ApiError as error:  # its group was pruned since
            await self._store.callbacks.mark_failed(row.callback_id, str(error), None)
            return
        problem, again = await self._post(row, body.encode())
        if problem is None:
            await self._store.callbacks.mark_delivered(row.callback_id)
        elif again and row.attempts < self._settings.callback_attempts:
            pause = self._settings.callback_pause_seconds * 4.0 ** (row.attempts - 1)
            await self._store.callbacks.mark_failed(row.callback_id, problem, pause)
        else:
            log.warning("callback %s of %s is given up: %s", row.callback_id, row.job_id, problem)
            await self._store.callbacks.mark_failed(row.callback_id, problem, None)

    async def _post(self, row: CallbackRow, body: bytes) -> tuple[str | None, bool]:
        """What stood against it (None: it was taken), and whether it may be sent again."""
        stamp = int(time.time())
        headers = {
            "content-type": "application/json",
            "user-agent": f"polar/{__version__}",
            "webhook-id": row.callback_id,
            "webhook-timestamp": str(stamp),
            "webhook-signature": signature(row.callback_id, stamp, body, self._secret),
        }
        try:
            # The answer's body is nobody's concern, and may be endless.
            async with self._http.stream("POST", row.url, content=body, headers=headers) as answer:
                status = answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}", True
        if 200 <= status < 300:
            return None, False
        return f"answered {status}", status != _GONE

    async def _body(self, row: CallbackRow) -> str:
        """Raises ApiError where what it is about is gone."""
        if row.group_id is not None:
            data: Json = (await serializers.group_detail(self._store, row.group_id)).model_dump(mode="json")
        else:
            data = (await serializers.job_detail(self._store, row.job_id)).model_dump(mode="json")
        return CallbackPayload(type=row.kind, timestamp=row.created_at, data=data).model_dump_json()
