"""Signing and verification of callbacks.

The format is that of the Standard Webhooks specification (https://www.standardwebhooks.com): HMAC-SHA256 over
`{webhook-id}.{webhook-timestamp}.{body}`, in base64, as `v1,...` in the header `webhook-signature`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping

from pydantic import ValidationError

from polar_proxy.api_models import CallbackPayload
from polar_proxy.errors import PolarError, UsageError

_SECRET_PREFIX = "whsec_"
_TOLERANCE_SECONDS = 300.0


class BadCallbackError(PolarError):
    """The callback is not authentic: unsigned, signed with another secret, too old, or changed."""


def new_secret() -> str:
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign(callback_id: str, timestamp: int, body: bytes, secret: str) -> str:
    """Return the value of `webhook-signature`. `secret`: `whsec_` and base64. Raises UsageError for an invalid one."""
    signed = f"{callback_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(_key(secret), signed, hashlib.sha256).digest()).decode()


def verify_callback(
    headers: Mapping[str, str],
    body: bytes,
    secret: str,
    *,
    tolerance: float = _TOLERANCE_SECONDS,
    now: float | None = None,
) -> CallbackPayload:
    """Check the signature of a received callback and return its content.

    `body`: the bytes as received, not parsed and serialised again. A callback older or newer than `tolerance` seconds
    is rejected, so that a recorded one cannot be replayed later. A callback is delivered at least once: `webhook-id`
    identifies repeated deliveries. Raises BadCallbackError, and UsageError for an invalid secret.
    """
    given = {name.lower(): value for name, value in headers.items()}
    callback_id, stamp, signatures = (given.get(f"webhook-{name}", "") for name in ("id", "timestamp", "signature"))
    if not (callback_id and stamp.isdecimal() and signatures):
        raise BadCallbackError(
            "The callback is not signed: webhook-id, webhook-timestamp or webhook-signature is missing."
        )
    if abs((time.time() if now is None else now) - int(stamp)) > tolerance:
        raise BadCallbackError(f"The callback {callback_id} is more than {tolerance:g} s old, or from the future.")
    expected = sign(callback_id, int(stamp), body, secret)
    # The header has several signatures while a secret is being replaced.
    if not any(hmac.compare_digest(expected.encode(), one.encode()) for one in signatures.split()):
        raise BadCallbackError(f"The callback {callback_id} is not signed with this secret, or its body was changed.")
    try:
        return CallbackPayload.model_validate_json(body)
    except ValidationError as error:
        raise BadCallbackError(f"The callback {callback_id} cannot be read: {error.errors()[0]['msg']}") from error


def _key(secret: str) -> bytes:
    invalid = UsageError(
        f"A callback secret is {_SECRET_PREFIX} and base64, such as {_SECRET_PREFIX}MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw."
    )
    if not secret.startswith(_SECRET_PREFIX):
        raise invalid
    try:
        return base64.b64decode(secret[len(_SECRET_PREFIX) :], validate=True)
    except binascii.Error:
        raise invalid from None
