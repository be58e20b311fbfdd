"""Signatures of callbacks: the specification's own example, and what a receiver refuses."""

from __future__ import annotations

import time

import orjson
import pytest

from polar_proxy.client import BadCallbackError, verify_callback
from polar_proxy.errors import UsageError
from polar_proxy.webhooks import sign

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = orjson.dumps({"type": "job.ended", "timestamp": 1.5, "data": {"job_id": "job_1"}})


def headers(body: bytes = BODY, *, at: int | None = None, secret: str = SECRET) -> dict[str, str]:
    stamp = int(time.time()) if at is None else at
    signed = sign("cb_1", stamp, body, secret)
    return {"Webhook-Id": "cb_1", "Webhook-Timestamp": str(stamp), "Webhook-Signature": signed}


def test_the_example_of_the_specification() -> None:
    found = sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}', SECRET)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_what_is_signed_is_believed() -> None:
    found = verify_callback(headers(), BODY, SECRET)
    assert (found.type, found.timestamp, found.data) == ("job.ended", 1.5, {"job_id": "job_1"})
    # While a secret is exchanged there are two signatures.
    both = headers()
    both["Webhook-Signature"] = f"v1,AAAA {both['Webhook-Signature']}"
    assert verify_callback(both, BODY, SECRET) == found


def test_what_is_not_believed() -> None:
    other = "whsec_" + "A" * 32
    now = int(time.time())
    for given, body, words in (
        (headers(), BODY + b" ", "its body was changed"),
        (headers(secret=other), BODY, "not signed with this secret"),
        (headers(at=now - 400), BODY, "more than 300 s old"),
        (headers(at=now + 400), BODY, "from the future"),
        ({**headers(at=now - 5), "Webhook-Timestamp": str(now)}, BODY, "its body was changed"),
        ({}, BODY, "not signed"),
        ({**headers(), "Webhook-Timestamp": "soon"}, BODY, "not signed"),
        (headers(b"[]"), b"[]", "cannot be read"),
    ):
        with pytest.raises(BadCallbackError, match=words):
            verify_callback(given, body, SECRET)
    assert verify_callback(headers(at=now - 400), BODY, SECRET, tolerance=500).type == "job.ended"


@pytest.mark.parametrize("secret", ["", "hunter2", "whsec_***", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
def test_a_secret_that_is_none(secret: str) -> None:
    with pytest.raises(UsageError, match="whsec_"):
        verify_callback(headers(), BODY, secret)
