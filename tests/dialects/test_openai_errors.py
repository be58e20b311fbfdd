"""Errors in OpenAI's shape, as a response and inside a stream."""

from __future__ import annotations

import json

import pytest

from polar_proxy.dialects import get_dialect
from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.errors import RequestError
from polar_proxy.types import Json

BODY: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
both = pytest.mark.parametrize("dialect", [OpenAIChat(), OpenAICompletions()], ids=lambda dialect: dialect.name)


@both
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (502, "server_error"),
    ],
)
def test_error_body(dialect: Dialect, status: int, kind: str) -> None:
    error = RequestError("it is wrong", status=status, param="stop", code="wrong")
    assert json.loads(dialect.error_body(error, "req_1")) == {
        "error": {"message": "it is wrong", "type": kind, "param": "stop", "code": "wrong"}
    }


LONG = "n" * 10_000
QUOTING: dict[str, Json] = {
    "openai_chat": {"tool_choice": {"type": "function", "function": {"name": LONG}}},
    "anthropic_messages": {"tool_choice": {"type": "tool", "name": LONG}, "max_tokens": 1},
    "openai_responses": {"input": [{"role": "assistant", "content": [{"type": "file", "file": {}, LONG: LONG}]}]},
}


@pytest.mark.parametrize("name", QUOTING)
def test_an_error_quotes_only_the_beginning_of_a_long_value(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        get_dialect(name).parse({**BODY, **QUOTING[name]})
    assert len(str(refused.value)) < 300


@both
def test_error_inside_a_stream(dialect: Dialect) -> None:
    written = dialect.parse(BODY).encoder("call_1", 1).fail("the engine broke", 502)
    assert written.startswith(b"data: ")
    assert written.endswith(b"\n\n")
    assert b"[DONE]" not in written
    error = json.loads(written.removeprefix(b"data: "))["error"]
    assert (error["message"], error["type"]) == ("the engine broke", "server_error")
