"""Fuzz test: every JSON object is parsed or refused with RequestError, and a parsed body can be stored."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json
from tests.dialects.hostile_json import DEEP, VALUES, objects, parse_or_refuse

_VALID: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
_FIELDS = (
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "stream"),
    *("max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "metadata", "context_management"),
)


_names = st.sampled_from(["bash", "t1"])
_types = st.sampled_from(
    [
        *("text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "search_result"),
        *("tool_reference", "server_tool_use", "web_search_tool_result", "compaction", "tool_addition", "other"),
        *("base64", "url", "content", "tool_definition", "auto", "any", "tool", "none", "json_schema", "adaptive"),
    ]
)


def _block(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return objects(
        type=_types,
        text=st.text(max_size=3),
        id=_names,
        name=_names,
        tool_name=_names,
        tool_use_id=_names,
        input=st.just({}),
        content=inner,
        source=inner,
        tool=inner,
        is_error=st.booleans(),
        thinking=st.text(max_size=3),
        signature=st.text(max_size=3),
        data=st.text(max_size=3),
        media_type=st.just("image/png"),
        url=st.text(max_size=3),
    )


_blocks = st.recursive(
    st.text(max_size=3),
    lambda inner: _block(inner) | st.lists(_block(inner), max_size=3),
    max_leaves=4,
)
_message = objects(role=st.sampled_from(["user", "assistant", "system"]), content=_blocks)
_tool = objects(
    type=st.just("custom"),
    name=_names,
    input_schema=st.just({"type": "object"}),
    defer_loading=st.booleans(),
    definition=st.just({"name": "x"}),
)
_shaped: st.SearchStrategy[Any] = (
    st.lists(_message, max_size=3)
    | st.lists(_tool, max_size=2)
    | _blocks
    | objects(type=_types, name=_names, display=st.just("omitted"), format=objects(type=_types, schema=st.just({})))
)
bodies = st.builds(
    lambda changes: {**_VALID, **changes},
    st.dictionaries(st.sampled_from(_FIELDS), VALUES | _shaped, max_size=3),
) | st.dictionaries(st.text(max_size=8), VALUES)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(body=bodies)
def test_parse_raises_only_request_errors(body: Json) -> None:
    dialect = AnthropicMessages()
    parsed = parse_or_refuse(dialect, body)
    if parsed is None:
        return
    (request,) = parsed.requests
    assert isinstance(request, ChatRequest)
    assert all(isinstance(orjson.loads(message), dict) for message in parsed.messages[0])
    assert orjson.dumps([message.to_openai() for message in request.messages])
    assert isinstance(orjson.loads(orjson.dumps(parsed.params)), dict)
    assert AnthropicMessages().parse_count(body).messages == request.messages


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"messages": [{"role": "user", "content": [{"type": "text", "text": DEEP}]}]}, id="deep text"),
        pytest.param({"messages": [{"role": "user", "content": [{"type": "new", "x": DEEP}]}]}, id="deep block"),
        pytest.param({"messages": [{"role": ["user"], "content": "x"}]}, id="role is a list"),
        pytest.param({"messages": [{"role": "user", "content": "\ud800"}]}, id="lone surrogate"),
        pytest.param({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, id="type is a list"),
        pytest.param(
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "b", "input": {"a": DEEP}}]}]},
            id="deep input",
        ),
        pytest.param({"system": [{"type": "text", "text": "x", "y": DEEP}]}, id="deep field of the system prompt"),
        pytest.param({"tools": [{"type": "x", "deep": DEEP}]}, id="deep tool"),
        pytest.param({"metadata": DEEP}, id="deep unknown field"),
        pytest.param({"model": "\ud800"}, id="lone surrogate in the model"),
        pytest.param({"max_tokens": 1e300}, id="integer of 1000 bits"),
        pytest.param({"tool_choice": {"type": {}}}, id="type of a choice is an object"),
    ],
)
def test_rejects_bodies_that_cannot_be_stored(changes: Json) -> None:
    with pytest.raises(RequestError):
        AnthropicMessages().parse({**_VALID, **changes})
