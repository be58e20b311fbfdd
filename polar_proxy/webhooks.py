"""Signing and verification of callbacks by the Standard Webhooks specification (https://www.standardwebhooks.com).

The library `standardwebhooks` does both. It accepts any text as a secret, so this module checks secrets first.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime

from pydantic import ValidationError
from standardwebhooks import Webhook, WebhookVerificationError

from polar_proxy.api_models import CallbackPayload
from polar_proxy.errors import PolarError, UsageError

_SECRET_PREFIX = "whsec_"


class BadCallbackError(PolarError):
    """The callback is not authentic (unsigned, signed with another secret, too old, or changed) or not readable."""


def new_secret() -> str:
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign(callback_id: str, timestamp: int, body: str, secret: str) -> str:
    """Return the value of the header `webhook-signature`. Raises UsageError for an invalid secret."""
    return _webhook(secret).sign(callback_id, datetime.fromtimestamp(timestamp, UTC), body)


def verify_callback(headers: Mapping[str, str], body: bytes, secret: str) -> CallbackPayload:
    """Check the signature of a received callback and return its content.

    `body`: the bytes as received, not parsed and serialised again. A callback more than five minutes old is rejected,
    so that nobody can send a recorded callback again later. Polar may deliver a callback several times, always with the
    same header `webhook-id`. Raises BadCallbackError, and UsageError for an invalid secret.
    """
    webhook = _webhook(secret)
    try:
        webhook.verify(body, dict(headers), json_parse=False)
        return CallbackPayload.model_validate_json(body)
    except ValidationError as error:
        raise BadCallbackError(f"The callback cannot be read: {error.errors()[0]['msg']}.") from error
    except (WebhookVerificationError, ValueError) as error:  # ValueError: a header that is malformed
        raise BadCallbackError(f"The callback is not authentic: {error}.") from error


def _webhook(secret: str) -> Webhook:
    """Return the library's signer and verifier for a secret. Raises UsageError for an invalid secret."""
    encoded = secret.removeprefix(_SECRET_PREFIX)
    try:
        valid = secret.startswith(_SECRET_PREFIX) and len(base64.b64decode(encoded, validate=True)) > 0
    except binascii.Error:
        valid = False
    if not valid:
        example = f"{_SECRET_PREFIX}MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
        raise UsageError(f"A callback secret must be {_SECRET_PREFIX} followed by base64, such as {example}.")
    return Webhook(secret)
