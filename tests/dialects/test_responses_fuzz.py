"""Fuzz test: every Responses body is parsed or refused with RequestError; a parsed one can be stored, answered and
continued."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from polar_proxy.dialects.base import Answer, ParsedRequest, ReferencedCall
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.dialects.wire import seal
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, ToolDelta
from tests.dialects.hostile_json import DEEP, VALUES, assert_refusal, objects

pytestmark = pytest.mark.slow

_FIELDS = (
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include"),
    *("temperature", "top_p", "max_output_tokens", "top_logprobs", "stream", "store", "metadata", "background"),
    *("previous_response_id", "truncation", "service_tier", "user", "prompt_cache_key", "client_metadata", "n", "stop"),
    *("chat_template_kwargs", "conversation", "prompt", "max_tool_calls"),
)
_ITEM_TYPES = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call"),
    *("apply_patch_call_output", "tool_search_call", "tool_search_output", "additional_tools", "item_reference"),
    *("compaction", "web_search_call", "computer_call", "new"),
)


_tool = objects(
    type=st.sampled_from(["function", "custom", "namespace", "local_shell", "shell", "tool_search", "web_search"]),
    name=st.sampled_from(["bash", "exec"]),
    description=st.just("d"),
    parameters=st.just({"type": "object"}),
    execution=st.just("client"),
    format=st.just({"type": "grammar", "syntax": "lark", "definition": "start: X"}),
    strict=st.booleans(),
)
_tools = st.lists(_tool | objects(type=st.just("namespace"), name=st.just("ns"), tools=st.lists(_tool, max_size=2)))
_part = objects(
    type=st.sampled_from(["input_text", "output_text", "input_image", "input_file", "refusal", "summary_text"]),
    text=st.just("x"),
    image_url=st.just("data:,"),
    refusal=st.just("no"),
)
_content = st.just("hi") | st.lists(_part, max_size=2)
_item = objects(
    type=st.sampled_from(_ITEM_TYPES),
    role=st.sampled_from(["user", "assistant", "system", "developer"]),
    id=st.sampled_from(["msg_1_0", "fc_1_1", "rs_2_0", "other"]),
    content=_content,
    summary=_content,
    encrypted_content=st.sampled_from([seal("hm"), "polar1.x", "gAAA"]),
    call_id=st.just("c1"),
    name=st.just("bash"),
    namespace=st.just("ns"),
    arguments=st.just("{}"),
    input=st.just("text"),
    output=_content,
    action=objects(type=st.just("exec"), command=st.just(["ls"])),
    operation=objects(type=st.just("delete_file"), path=st.just("a")),
    tools=_tools,
)
_choice = objects(
    type=st.sampled_from(["function", "custom", "allowed_tools", "shell"]),
    name=st.sampled_from(["bash", "exec"]),
    mode=st.sampled_from(["auto", "required"]),
    tools=_tools,
)
_shaped: st.SearchStrategy[Any] = (
    st.lists(_item, min_size=1, max_size=3) | _tools | _choice | objects(effort=st.just("none"), format=st.just({}))
)


def bodies() -> st.SearchStrategy[Json]:
    """Generate valid bodies with a few fields replaced by any value, often one of the right type."""
    valid: Json = {"model": "m", "input": "hi"}
    fields: st.SearchStrategy[Json] = st.dictionaries(st.sampled_from(_FIELDS), VALUES | _shaped, max_size=2)
    items = st.lists(_item, min_size=1, max_size=4)
    return st.builds(
        lambda wrong, own, tools: {
            **valid,
            **({"input": own} if own else {}),
            **({"tools": tools} if tools else {}),
            **wrong,
        },
        fields,
        st.none() | items,
        st.none() | _tools,
    )


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=bodies())
def test_parse_raises_only_request_errors(body: Json) -> None:
    dialect = OpenAIResponses()
    try:
        named = dialect.references(body).all
        calls = {call_id: ReferencedCall((), Message("assistant", "x", "hm")) for call_id in named}
        parsed = dialect.parse(dialect.write_out_references(body, calls) if calls else body)
    except RequestError as refused:
        event("refused")
        assert_refusal(dialect, refused)
        return
    event("parsed")
    assert len(parsed.requests) == len(parsed.messages) == 1
    assert all(isinstance(orjson.loads(message), dict) for message in parsed.messages[0])
    assert isinstance(orjson.loads(orjson.dumps(parsed.params)), dict)
    orjson.dumps([message.to_openai() for message in parsed.requests[0].messages])  # type: ignore[union-attr]
    _assert_answerable(parsed)
    _assert_continuable(dialect, body, parsed)


def _assert_answerable(parsed: ParsedRequest) -> None:
    answer = Answer()
    (request,) = parsed.requests
    assert isinstance(request, ChatRequest)
    name = next((tool["function"]["name"] for tool in request.tools), "bash")
    last = SampleEvent(text="x", tool_calls=(ToolDelta(0, "c1", name, "{}"),), finish_reason="stop")
    answer.add(last)
    encoder = parsed.encoder("call_1", 1)
    assert encoder.feed(0, last) + encoder.end([answer])
    assert orjson.loads(encoder.respond([answer]))["id"] == "resp_1"


def _assert_continuable(dialect: OpenAIResponses, body: Json, parsed: ParsedRequest) -> None:
    answer = Message("assistant", "x", "hm")
    new = {**body, "previous_response_id": "resp_1", "input": "next"}
    again = dialect.parse(dialect.write_out_references(new, {"call_1": ReferencedCall(parsed.messages[0], answer)}))
    assert again.messages[0][: len(parsed.messages[0])] == parsed.messages[0]
    assert len(again.messages[0]) == len(parsed.messages[0]) + 3


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"input": [{"role": "user", "content": "x", "extra": DEEP}]}, id="deep extra field"),
        pytest.param({"input": [{"type": "web_search_call", "action": DEEP}]}, id="deep ignored item"),
        pytest.param({"metadata": DEEP}, id="deep metadata"),
        pytest.param({"tools": [{"type": "x", "deep": DEEP}]}, id="deep tool"),
        pytest.param({"input": [{"type": "function_call", "name": "a", "arguments": DEEP}]}, id="deep arguments"),
        pytest.param({"input": [{"type": "function_call_output", "output": DEEP}]}, id="deep output"),
        pytest.param({"input": [{"role": "user", "content": "\ud800"}]}, id="lone surrogate"),
        pytest.param({"instructions": "\ud800"}, id="lone surrogate in the instructions"),
        pytest.param({"max_output_tokens": 1e300}, id="integer of 1000 bits"),
        pytest.param({"user": 2**64}, id="integer of 65 bits"),
    ],
)
def test_rejects_bodies_that_cannot_be_stored(body: Json) -> None:
    with pytest.raises(RequestError):
        OpenAIResponses().parse({"model": "m", "input": "hi", **body})
