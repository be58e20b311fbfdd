"""Anthropic's error shape, the texts by which its clients recognise a full context, and sealed signatures."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.dialects import wire
from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.wire import seal, unseal
from polar_proxy.errors import RequestError
from polar_proxy.types import Json

DIALECT = AnthropicMessages()
BODY: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "billing_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_error_type_of_each_status(status: int, kind: str) -> None:
    body = json.loads(DIALECT.error_body(RequestError("It broke.", status=status), "call_1"))
    assert body == {"type": "error", "error": {"type": kind, "message": "It broke."}, "request_id": "call_1"}
    event = DIALECT.parse(BODY).encoder("call_1", 1).fail("It broke.", status).decode()
    assert event.startswith("event: error\ndata: ")
    assert event.endswith("\n\n")
    assert json.loads(event.split("\n")[1].removeprefix("data: ")) == body


@pytest.mark.parametrize(
    ("engine_text", "expected"),
    [
        (
            "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens. "
            "Please reduce the length of the input messages.",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 input "
            "tokens, which exceeds this limit even without any output tokens.",
            "prompt is too long: 4097 tokens > 4096 maximum",
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 8000. This model's maximum context length is 4096 "
            "tokens and your request has 2778 input tokens (8000 > 4096 - 2778).",
            "input length and `max_tokens` exceed context limit: 2778 + 8000 > 4096, "
            "decrease input length or `max_tokens` and try again",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (1000 in the "
            "messages, 4000 in the completion).",
            "input length and `max_tokens` exceed context limit: 1000 + 4000 > 4096, "
            "decrease input length or `max_tokens` and try again",
        ),
        ("The conversation is too long.", "prompt is too long: The conversation is too long."),
    ],
)
def test_full_context_error_has_anthropics_text(engine_text: str, expected: str) -> None:
    error = RequestError(engine_text, code="context_length_exceeded")
    body = json.loads(DIALECT.error_body(error, "req_1"))
    assert body["error"] == {"type": "invalid_request_error", "message": expected}


def test_other_errors_keep_their_text() -> None:
    error = RequestError("No images.", code="no_images")
    assert json.loads(DIALECT.error_body(error, "req_1"))["error"]["message"] == "No images."


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_seal_round_trip(text: str) -> None:
    assert unseal(seal(text)) == text


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30), st.data())
def test_damaged_signature_is_none(text: str, data: st.DataObject) -> None:
    sealed = seal(text)
    place = data.draw(st.integers(0, len(sealed) - 1))
    damaged = sealed[:place] + data.draw(st.characters()) + sealed[place + 1 :]
    assert unseal(damaged) in (None, text)
    assert unseal(sealed[:place]) is None
    assert unseal(data.draw(st.text())) is None


def test_signature_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_SEALED_BYTES", 1000)
    assert unseal(seal("x" * 1000)) == "x" * 1000
    assert unseal(seal("x" * 1001)) is None
