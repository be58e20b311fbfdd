"""Fuzz test: every JSON object is parsed or refused with RequestError, and a parsed body can be stored and placed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings

from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.errors import RequestError
from polar_proxy.sessions.state import SessionState
from polar_proxy.types import ChatRequest, Json
from tests.dialects.hostile_json import DEEP, bodies, parse_or_refuse

CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("dialect", [OpenAIChat(), OpenAICompletions()], ids=lambda dialect: dialect.name)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(body=bodies())
def test_parse_raises_only_request_errors(dialect: Dialect, body: Json) -> None:
    parsed = parse_or_refuse(dialect, body)
    if parsed is None:
        return
    assert len(parsed.requests) == len(parsed.messages) >= 1
    for request, messages in zip(parsed.requests, parsed.messages, strict=True):
        assert all(isinstance(orjson.loads(message), dict | str | list) for message in messages)
        if isinstance(request, ChatRequest):
            SessionState("session", {}).place("call_1", request, now=0.0)
    assert isinstance(orjson.loads(orjson.dumps(parsed.params)), dict)


def _with(**fields: Any) -> Json:
    return {**CHAT, **fields}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(_with(messages=[{"role": ["user"], "content": "x"}]), id="role is a list"),
        pytest.param(_with(messages=[{"role": {}, "content": "x"}]), id="role is an object"),
        pytest.param(_with(messages=[{"role": "user", "content": [{"type": "text", "text": DEEP}]}]), id="deep text"),
        pytest.param(_with(messages=[{"role": "user", "content": "x", "extra": DEEP}]), id="deep extra field"),
        pytest.param(_with(metadata=DEEP), id="deep unknown field"),
        pytest.param(_with(tools=[{"type": "x", "deep": DEEP}]), id="deep tool"),
        pytest.param(_with(messages=[{"role": "user", "content": "\ud800"}]), id="lone surrogate"),
        pytest.param(_with(model="\ud800"), id="lone surrogate in the model"),
        pytest.param(_with(temperature=10**400), id="integer too large for a float"),
        pytest.param(_with(max_tokens=1e300), id="integer of 1000 bits"),
        pytest.param(_with(user=2**64), id="integer of 65 bits in an unknown field"),
        pytest.param(_with(logit_bias={"one": 1}), id="bias without a token id"),
        pytest.param(_with(logit_bias={"1": True}), id="bias that is not a number"),
        pytest.param(_with(messages=[{"role": "user", "content": [{"type": "text", "text": None}]}]), id="null text"),
        pytest.param(_with(messages=[{"role": "user", "content": [{}]}]), id="part without a type"),
    ],
)
def test_rejects_hostile_chat_bodies(body: Json) -> None:
    with pytest.raises(RequestError):
        OpenAIChat().parse(body)


def test_deep_arguments_are_stored_unchanged() -> None:
    arguments = "[" * 400 + "]" * 400
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    parsed = OpenAIChat().parse(_with(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]))
    (request,) = parsed.requests
    assert isinstance(request, ChatRequest)
    assert request.messages[0].tool_calls[0].arguments == arguments
    assert SessionState("session", {}).place("call_1", request, now=0.0).edge == "root"


def test_accepted_depth_leaves_room_for_wrapping() -> None:
    """A dataset row, which adds some levels, can hold every accepted value."""
    accepted = None
    for depth in range(200, 260):
        value: Any = 1
        for _ in range(depth):
            value = [value]
        try:
            accepted = OpenAIChat().parse(_with(messages=[{"role": "user", "content": "x", "extra": value}]))
        except RequestError:
            break
    else:
        raise AssertionError("no value was too deep")
    assert accepted is not None
    assert orjson.dumps({"calls": [{"messages": [orjson.loads(accepted.messages[0][0])]}]})
