"""References of a Responses body to recorded calls: `previous_response_id` and items named by their ids."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.dialects.base import ReferencedCall
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, ToolCall, ToolDelta
from tests.dialects.encoding import encode

DIALECT = OpenAIResponses()
USER: Json = {"role": "user", "content": "hi"}
TOOLS: list[Json] = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch"},
    {"type": "local_shell"},
]
ANSWER = Message(
    "assistant",
    "let me see",
    "hm",
    (
        ToolCall("c0", "bash", '{"a":1}'),
        ToolCall("c1", "apply_patch", '{"input": "x"}'),
        ToolCall("c2", "local_shell", '{"command":["ls"]}'),
    ),
)
FIRST = (orjson.dumps({"type": "instructions", "content": "be exact"}), orjson.dumps(USER))
CALLS = {"call_1": ReferencedCall(FIRST, ANSWER)}


def ref(identity: str) -> Json:
    return {"type": "item_reference", "id": identity}


def conversation(*items: Json, calls: dict[str, ReferencedCall] = CALLS, **fields: Any) -> tuple[Message, ...]:
    body = {"model": "m", "tools": TOOLS, "input": list(items), **fields}
    assert DIALECT.references(body).all <= set(calls) | {"call_2"}
    (request,) = DIALECT.parse(DIALECT.write_out_references(body, calls)).requests
    assert isinstance(request, ChatRequest)
    return request.messages


def streamed_ids(message: Message, order: str) -> list[str]:
    """Return the item ids of an answer that was streamed in `order`: r reasoning, t text, c tool calls."""
    events = {
        "r": [SampleEvent(reasoning=message.reasoning or "")],
        "t": [SampleEvent(text=str(message.content))],
        "c": [
            SampleEvent(tool_calls=(ToolDelta(number, call.id, call.name, call.arguments),))
            for number, call in enumerate(message.tool_calls)
        ],
    }
    sampled = [event for part in order for event in events[part]]
    body = {"model": "m", "input": "hi", "tools": TOOLS}
    encoded = encode(DIALECT, body, [*sampled, SampleEvent(finish_reason="stop")])
    last = orjson.loads(encoded.stream.rsplit(b"\ndata: ", 1)[1])
    return [item["id"] for item in last["response"]["output"]]


@pytest.mark.parametrize("order", ["rtc", "rct", "tcr", "crt"])
def test_references_to_all_items_give_the_recorded_answer_in_any_streaming_order(order: str) -> None:
    ids = streamed_ids(ANSWER, order)
    assert len(ids) == len(set(ids)) == 5
    assert conversation(USER, *map(ref, ids)) == (Message("user", "hi"), ANSWER)


def test_references_to_some_items_give_these_only() -> None:
    assert conversation(USER, ref("fc_1_0"))[1] == Message("assistant", None, None, ANSWER.tool_calls[:1])
    assert conversation(USER, ref("msg_1_0"), ref("bt_1_2"))[1] == Message(
        "assistant", "let me see", None, ANSWER.tool_calls[2:]
    )


def test_type_of_a_reference_is_optional() -> None:
    assert conversation(USER, {"id": "msg_1_0"})[1].content == "let me see"


def test_an_item_is_not_repeated() -> None:
    """The input has it in full, by a reference to it or to another piece of its text, or by the previous response."""
    whole: Json = {"type": "message", "role": "assistant", "id": "msg_1_0", "content": "let me see"}
    once = (Message("user", "hi"), Message("assistant", "let me see"))
    assert conversation(USER, whole, ref("msg_1_0")) == once
    assert conversation(USER, ref("msg_1_0"), ref("msg_1_0"), ref("msg_1_1")) == once
    assert conversation(ref("msg_1_0"), previous_response_id="resp_1") == (Message("user", "hi"), ANSWER)


def test_input_items_are_referred_to_by_the_ids_of_their_list() -> None:
    assert conversation(ref("in_1_1")) == (Message("user", "hi"),)


def test_references_of_several_answers() -> None:
    calls = {**CALLS, "call_2": ReferencedCall((), Message("assistant", "two"))}
    found = conversation(USER, ref("msg_1_0"), {"role": "user", "content": "go on"}, ref("msg_2_0"), calls=calls)
    assert [message.content for message in found] == ["hi", "let me see", "go on", "two"]


BROKEN = {"call_1": ReferencedCall(FIRST, ANSWER, "the engine broke")}


@pytest.mark.parametrize(
    ("identity", "calls"),
    [
        ("fc_1_3", CALLS),
        ("rs_2_0", CALLS),
        ("in_1_0", CALLS),
        ("in_1_2", CALLS),
        ("in_1_999999", CALLS),
        ("xx_1_0", CALLS),
        ("msg_1_0", {}),
        ("msg_1_0", BROKEN),
    ],
)
def test_unknown_item_is_not_found(identity: str, calls: dict[str, ReferencedCall]) -> None:
    with pytest.raises(RequestError, match="Items are not persisted") as caught:
        DIALECT.write_out_references({"model": "m", "input": [USER, ref(identity)]}, calls)
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "input", None)


@given(st.text(max_size=40) | st.sampled_from(["", "msg_", "msg_1_0000000", "msg_1_-1", "rs_../_0", "x" * 100_000]))
def test_a_hostile_id_is_not_found(identity: str) -> None:
    body = {"model": "m", "input": [USER, ref(identity)]}
    with pytest.raises(RequestError) as caught:
        DIALECT.write_out_references(body, dict.fromkeys(DIALECT.references(body).all, BROKEN["call_1"]))
    assert caught.value.status == 404
    assert len(str(caught.value)) < 300


def test_a_broken_previous_response_is_refused_with_its_reason() -> None:
    with pytest.raises(RequestError, match="ended early \\(the engine broke\\)") as caught:
        conversation(USER, previous_response_id="resp_1", calls=BROKEN)
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("output", "known"),
    [
        ({"type": "function_call_output", "call_id": "c0"}, True),
        ({"type": "custom_tool_call_output", "call_id": "c1"}, True),
        ({"type": "local_shell_call_output", "id": "c2"}, True),
        ({"type": "function_call_output", "call_id": "c3"}, False),
        ({"type": "local_shell_call_output", "id": "c3"}, False),
    ],
)
def test_tool_output_must_answer_a_call_of_the_continued_response(output: Json, known: bool) -> None:
    """A body that continues nothing may have such outputs: agents that shorten their history send them."""
    item = {**output, "output": "ok"}
    if known:
        assert conversation(item, previous_response_id="resp_1")[-1].role == "tool"
    else:
        with pytest.raises(RequestError) as caught:
            conversation(item, previous_response_id="resp_1")
        assert (caught.value.param, caught.value.code) == ("input[0]", "tool_call_not_found")
    assert conversation(USER, item)[-1].role == "tool"
