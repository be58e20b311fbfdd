"""Signatures of callbacks: the example of the specification, and what a receiver rejects."""

from __future__ import annotations

import time

import orjson
import pytest

from polar_proxy.client import BadCallbackError, verify_callback
from polar_proxy.errors import UsageError
from polar_proxy.webhooks import new_secret, sign

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = orjson.dumps({"type": "job.ended", "timestamp": 1.5, "data": {"job_id": "job_1"}})


def headers(body: bytes = BODY, *, at: int | None = None, secret: str = SECRET) -> dict[str, str]:
    stamp = int(time.time()) if at is None else at
    signature = sign("cb_1", stamp, body.decode(), secret)
    return {"Webhook-Id": "cb_1", "Webhook-Timestamp": str(stamp), "Webhook-Signature": signature}


def test_signs_the_example_of_the_specification() -> None:
    signature = sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, '{"test": 2432232314}', SECRET)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_accepts_a_signed_callback() -> None:
    found = verify_callback(headers(), BODY, SECRET)
    assert (found.type, found.timestamp, found.data) == ("job.ended", 1.5, {"job_id": "job_1"})
    secret = new_secret()
    assert verify_callback(headers(secret=secret), BODY, secret) == found


def test_accepts_one_of_several_signatures() -> None:
    """The header has two signatures while a secret is being replaced."""
    both = headers()
    both["Webhook-Signature"] = f"v1,AAAA {both['Webhook-Signature']}"
    assert verify_callback(both, BODY, SECRET).type == "job.ended"


def test_rejects_callbacks_that_are_not_authentic() -> None:
    other = "whsec_" + "A" * 32
    now = int(time.time())
    for given, body, message in (
        (headers(), BODY + b" ", "No matching signature"),
        (headers(secret=other), BODY, "No matching signature"),
        (headers(at=now - 400), BODY, "too old"),
        (headers(at=now + 400), BODY, "too new"),
        ({**headers(at=now - 5), "Webhook-Timestamp": str(now)}, BODY, "No matching signature"),
        ({}, BODY, "Missing required headers"),
        ({**headers(), "Webhook-Timestamp": "soon"}, BODY, "not authentic"),
        ({**headers(), "Webhook-Signature": "unversioned"}, BODY, "not authentic"),
        (headers(), b"\xff", "not authentic"),
        (headers(b"[]"), b"[]", "cannot be read"),
    ):
        with pytest.raises(BadCallbackError, match=message):
            verify_callback(given, body, SECRET)


@pytest.mark.parametrize("secret", ["", "hunter2", "whsec_", "whsec_***", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
def test_rejects_invalid_secrets(secret: str) -> None:
    with pytest.raises(UsageError, match="whsec_"):
        verify_callback(headers(), BODY, secret)
