"""Strategies for hostile JSON: values of every kind, and bodies with wrong fields."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import event
from hypothesis import strategies as st

from polar_proxy.dialects.base import Dialect, ParsedRequest
from polar_proxy.errors import RequestError
from polar_proxy.types import Json


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


DEEP = _nested(400)
"""A value nested deeper than orjson writes (254), and not deeper than it reads (1024)."""

HOSTILE = st.sampled_from(
    [
        *(float("nan"), float("inf"), float("-inf"), -0.0, 1e308, 10**400, -(10**400), 2**63, -(2**63) - 1, 2**64),
        *("", "\ud800", "x\udfff", "\0", "null", {}, [], [[]], [{}], {"": ""}, [None], True, False, None, DEEP),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def assert_refusal(dialect: Dialect, error: RequestError) -> None:
    """Assert that an error is the client's, and can be written."""
    assert 400 <= error.status < 500
    assert orjson.loads(dialect.error_body(error, "req_1"))["error"]["message"]


def parse_or_refuse(dialect: Dialect, body: Json) -> ParsedRequest | None:
    """Return the parsed body, or None after checking the refusal. Other exceptions are faults."""
    try:
        parsed = dialect.parse(body)
    except RequestError as refused:
        event("refused")
        assert_refusal(dialect, refused)
        return None
    event("parsed")
    return parsed


_FIELDS = (
    *("model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop", "n"),
    *("stream", "stream_options", "logprobs", "top_logprobs", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("max_tokens", "max_completion_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "best_of"),
    *("echo", "suffix", "return_token_ids", "chat_template_kwargs", "user", "metadata"),
)


def bodies() -> st.SearchStrategy[Json]:
    """Generate valid OpenAI bodies with a few fields replaced by any value, often one of the right type."""
    right: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    wrong = st.dictionaries(st.sampled_from(_FIELDS), VALUES | _SHAPED, max_size=3)
    return st.builds(lambda changes: {**right, **changes}, wrong) | st.dictionaries(st.text(max_size=8), VALUES)


def objects(**likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """Generate objects with some of these keys, whose values are valid or arbitrary."""
    return st.fixed_dictionaries({}, optional={key: value | VALUES for key, value in likely.items()})


_call = objects(
    id=st.just("c1"),
    type=st.just("function"),
    function=objects(name=st.just("bash"), arguments=st.just("{}"), parameters=st.just({"type": "object"})),
)
_message = objects(
    role=st.sampled_from(["user", "assistant", "tool", "system"]),
    content=st.just("hi") | st.lists(objects(type=st.just("text"), text=st.just("x")), max_size=2),
    tool_calls=st.lists(_call, max_size=2),
    tool_call_id=st.just("c1"),
    name=st.just("n"),
    reasoning_content=st.just("r"),
)
_SHAPED: st.SearchStrategy[Any] = (
    st.lists(_message, max_size=2)
    | st.lists(_call, max_size=2)
    | _call
    | st.lists(st.integers(-1, 2**32) | st.text(max_size=3), max_size=3)
    | objects(include_usage=st.booleans())
    | objects(type=st.sampled_from(["text", "json_object", "json_schema"]), json_schema=objects(schema=st.just({})))
)
