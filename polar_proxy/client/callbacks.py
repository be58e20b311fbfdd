"""Signed callbacks: what the server signs with, and what a receiver checks before it believes one.

The signature is that of the Standard Webhooks specification (https://www.standardwebhooks.com): HMAC-SHA256 over
`{webhook-id}.{webhook-timestamp}.{body}`, in base64, as `v1,...` in the header `webhook-signature`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping

from pydantic import ValidationError

from polar_proxy.api_models import CallbackPayload
from polar_proxy.errors import PolarError, UsageError

PREFIX = "whsec_"
TOLERANCE_SECONDS = 300.0


class BadCallbackError(PolarError):
    """A callback that is not to be believed: not signed with this secret, too old, or changed on its way."""


def signature(callback_id: str, timestamp: int, body: bytes, secret: str) -> str:
    """`v1,...` over exactly these bytes. `secret`: `whsec_` and base64. Raises UsageError for any other."""
    signed = f"{callback_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(_key(secret), signed, hashlib.sha256).digest()).decode()


def verify_callback(
    headers: Mapping[str, str],
    body: bytes,
    secret: str,
    *,
    tolerance: float = TOLERANCE_SECONDS,
    now: float | None = None,
) -> CallbackPayload:
    """What the callback says, once its signature is proved.

    `body`: the bytes as they came, not parsed and written again. A callback older or newer than `tolerance` seconds is
    refused, so that a recorded one cannot be sent again later; within it, `webhook-id` tells those that came before: a
    callback is delivered at least once. Raises BadCallbackError; UsageError for a secret that is none.
    """
    given = {name.lower(): value for name, value in headers.items()}
    callback_id, stamp, signed = (given.get(f"webhook-{name}", "") for name in ("id", "timestamp", "signature"))
    if not (callback_id and stamp.isdecimal() and signed):
        raise BadCallbackError(
            "The callback is not signed: it has no webhook-id, webhook-timestamp or webhook-signature."
        )
    if abs((time.time() if now is None else now) - int(stamp)) > tolerance:
        raise BadCallbackError(f"The callback {callback_id} is more than {tolerance:g} s old, or from the future.")
    expected = signature(callback_id, int(stamp), body, secret)
    # Several signatures stand side by side while a secret is exchanged for another.
    if not any(hmac.compare_digest(expected.encode(), one.encode()) for one in signed.split()):
        raise BadCallbackError(f"The callback {callback_id} is not signed with this secret, or was changed on its way.")
    try:
        return CallbackPayload.model_validate_json(body)
    except ValidationError as error:
        raise BadCallbackError(f"The callback {callback_id} cannot be read: {error.errors()[0]['msg']}") from error


def _key(secret: str) -> bytes:
    wrong = UsageError(f"A callback secret is {PREFIX} and base64, as in {PREFIX}MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw.")
    if not secret.startswith(PREFIX):
        raise wrong
    try:
        return base64.b64decode(secret[len(PREFIX) :], validate=True)
    except binascii.Error:
        raise wrong from None
