"""Anthropic's encoder: the stream equals the response, and an answer sent back is the sampled one."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.types import ChatRequest, Json, SampleEvent, ToolCall, ToolDelta
from tests.dialects.anthropic_events import BROKEN, OBJECTS, TEXTS, calls, cut, read_stream
from tests.dialects.encoding import encode, gather

DIALECT = AnthropicMessages()
WITHOUT_THINKING: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
BODY: Json = {**WITHOUT_THINKING, "thinking": {"type": "adaptive"}}
EAGER: Json = {
    **BODY,
    "tools": [{"name": name, "input_schema": {}, "eager_input_streaming": True} for name in ("bash", "edit", "Read")],
}


def both_forms(body: Json, events: list[SampleEvent]) -> tuple[Json, Json]:
    """Return (the message of the stream, the message of the response)."""
    encoded = encode(DIALECT, body, events)
    assert b"message_delta" not in encoded.before_end, "the end is sent before the commit"
    return read_stream(encoded.stream), encoded.response


def sent_back(content: list[Json]) -> Any:
    """Return the message parsed from an answer that a client sends back."""
    history = [*BODY["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "on"}]
    (request,) = DIALECT.parse({**BODY, "messages": history}).requests
    assert isinstance(request, ChatRequest)
    return request.messages[1]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), reasoning=TEXTS, text=TEXTS, tool_calls=calls(OBJECTS | BROKEN), omit=st.booleans())
def test_stream_equals_response_however_events_are_cut(
    data: st.DataObject, reasoning: str, text: str, tool_calls: tuple[ToolCall, ...], omit: bool
) -> None:
    body = {**BODY, "thinking": {"type": "adaptive", "display": "omitted" if omit else "summarized"}}
    streamed, response = both_forms(body, data.draw(cut(reasoning, text, tool_calls)))
    assert streamed == response
    assert response["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 2,
    }


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    reasoning=TEXTS,
    text=TEXTS,
    tool_calls=calls(OBJECTS),
    omit=st.booleans(),
    body=st.sampled_from([BODY, EAGER]),
)
def test_answer_sent_back_equals_the_sampled_one(
    data: st.DataObject, reasoning: str, text: str, tool_calls: tuple[ToolCall, ...], omit: bool, body: Json
) -> None:
    request = {**body, "thinking": {"type": "adaptive", "display": "omitted" if omit else "summarized"}}
    for message in both_forms(request, data.draw(cut(reasoning, text, tool_calls))):
        found = sent_back(message["content"])
        assert (found.content or "", found.reasoning or "") == (text, reasoning)
        assert [(call.id, call.name, json.loads(call.arguments)) for call in found.tool_calls] == [
            (call.id, call.name, json.loads(call.arguments)) for call in tool_calls
        ]
        assert message["stop_reason"] == ("tool_use" if tool_calls else "end_turn")


@settings(max_examples=30, deadline=None)
@given(arguments=BROKEN, text=TEXTS)
def test_arguments_that_are_not_an_object_become_text(arguments: str, text: str) -> None:
    event = SampleEvent(
        text=text, tool_calls=(ToolDelta(0, "c", "bash", arguments),), prompt_ids=(1,), finish_reason="tool_calls"
    )
    streamed, response = both_forms(BODY, [event])
    assert streamed == response
    (block,) = response["content"]
    assert block["text"] == (text + "\n" if text else "") + f"bash({arguments})"
    assert response["stop_reason"] == "end_turn"


def test_input_is_the_sampled_text() -> None:
    """Long numbers are not rounded."""
    arguments = '{ "n": 123456789012345678901234567890, "x": 1.0 }'
    answer = gather([SampleEvent(tool_calls=(ToolDelta(0, "c", "bash", arguments),), finish_reason="tool_calls")])
    assert arguments.encode() in DIALECT.parse(BODY).encoder("call_1", 1).respond([answer])


@pytest.mark.parametrize("arguments", ["", "  "])
def test_empty_arguments_are_an_empty_input(arguments: str) -> None:
    events = [SampleEvent(tool_calls=(ToolDelta(0, "c", "bash", arguments),), finish_reason="tool_calls")]
    streamed, response = both_forms(BODY, events)
    assert streamed == response
    assert response["content"] == [{"type": "tool_use", "id": "c", "name": "bash", "input": {}}]


@pytest.mark.parametrize("body", [BODY, EAGER])
def test_parallel_calls_in_any_order(body: Json) -> None:
    events = [
        SampleEvent(tool_calls=(ToolDelta(1, "c1", "edit", "{"),), prompt_ids=(1,)),
        SampleEvent(tool_calls=(ToolDelta(0, "c0", "bash", '{"a":'),)),
        SampleEvent(tool_calls=(ToolDelta(1, arguments="}"), ToolDelta(0, arguments="1}"))),
        SampleEvent(finish_reason="tool_calls"),
    ]
    streamed, response = both_forms(body, events)
    assert streamed == response
    assert [(block["id"], block["input"]) for block in response["content"]] == [("c0", {"a": 1}), ("c1", {})]


def test_keeps_reasoning_after_text_and_text_after_calls() -> None:
    events = [
        SampleEvent(text="a", prompt_ids=(1,)),
        SampleEvent(reasoning="b"),
        SampleEvent(tool_calls=(ToolDelta(0, "c", "bash", "{}"),)),
        SampleEvent(text="d", finish_reason="tool_calls"),
    ]
    for message in both_forms(BODY, events) + both_forms(EAGER, events):
        found = sent_back(message["content"])
        assert (found.content, found.reasoning, found.tool_calls[0].name) == ("ad", "b", "bash")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (SampleEvent(text="x", finish_reason="stop"), ("end_turn", None)),
        (SampleEvent(finish_reason="stop"), ("end_turn", None)),
        (SampleEvent(text="x", finish_reason="length"), ("max_tokens", None)),
        (SampleEvent(text="x", finish_reason="stop", stop_sequence="##"), ("stop_sequence", "##")),
        (SampleEvent(text="x", finish_reason="content_filter"), ("refusal", None)),
        (SampleEvent(tool_calls=(ToolDelta(0, "c", "b", "{}"),), finish_reason="tool_calls"), ("tool_use", None)),
        # Some engines report `stop` after a call.
        (SampleEvent(tool_calls=(ToolDelta(0, "c", "b", "{}"),), finish_reason="stop"), ("tool_use", None)),
        (SampleEvent(tool_calls=(ToolDelta(0, "c", "b", "[]"),), finish_reason="tool_calls"), ("end_turn", None)),
        (SampleEvent(tool_calls=(ToolDelta(0, "c", "b", '{"a'),), finish_reason="length"), ("max_tokens", None)),
    ],
)
def test_stop_reasons(event: SampleEvent, expected: tuple[str, str | None]) -> None:
    for message in both_forms(BODY, [event]):
        assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_response() -> None:
    event = SampleEvent(text="hé", prompt_ids=(1, 2), token_ids=(5, 2), logprobs=(-1.0, -1.0), finish_reason="stop")
    _, response = both_forms(BODY, [event])
    assert response == {
        "id": "msg_call_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hé"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 2,
        },
    }


def test_eager_arguments_are_streamed() -> None:
    encoder = DIALECT.parse(EAGER).encoder("call_1", 1)
    opened = encoder.feed(0, SampleEvent(tool_calls=(ToolDelta(0, "c", "bash", ""),), prompt_ids=(1,)))
    assert b"tool_use" not in opened
    first = encoder.feed(0, SampleEvent(tool_calls=(ToolDelta(0, arguments=' {"a'),)))
    assert orjson.dumps(' {"a') in first
    assert b"content_block_start" in first
    assert encoder.feed(0, SampleEvent(tool_calls=(ToolDelta(0, arguments='":1}'),))) == (
        b"event: content_block_delta\ndata: "
        + orjson.dumps(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "input_json_delta", "partial_json": '":1}'},
            }
        )
        + b"\n\n"
    )


@pytest.mark.parametrize("thinking", [{}, {"thinking": None}, {"thinking": {"type": "disabled"}}])
def test_thinking_that_was_not_requested_is_not_sent(thinking: Json) -> None:
    events = [SampleEvent(reasoning="hm", prompt_ids=(1,)), SampleEvent(text="a", finish_reason="stop")]
    for message in both_forms({**WITHOUT_THINKING, **thinking}, events):
        assert message["content"] == [{"type": "text", "text": "a"}]


def test_text_and_later_calls_wait_for_an_incomplete_eager_call() -> None:
    events = [
        SampleEvent(tool_calls=(ToolDelta(0, "c0", "bash", '{"a":'),), prompt_ids=(1,)),
        SampleEvent(text="between"),
        SampleEvent(tool_calls=(ToolDelta(1, "c1", "edit", "{}"),)),
        SampleEvent(tool_calls=(ToolDelta(0, arguments=" 1}"),)),
        SampleEvent(finish_reason="tool_calls"),
    ]
    encoder = DIALECT.parse(EAGER).encoder("call_1", 1)
    before = [encoder.feed(0, event) for event in events[:3]]
    assert b"between" not in b"".join(before)
    after = encoder.feed(0, events[3]) + encoder.end([gather(events)])
    content = read_stream(b"".join(before) + after)["content"]
    assert [block["type"] for block in content] == ["tool_use", "text", "tool_use"]
    assert [block.get("input") for block in content] == [{"a": 1}, None, {}]


def test_an_eager_call_that_stays_incomplete_is_closed_before_the_text_after_it() -> None:
    events = [
        SampleEvent(tool_calls=(ToolDelta(0, "c0", "bash", '{"a": 1'),), prompt_ids=(1,)),
        SampleEvent(text="after", finish_reason="length"),
    ]
    stream = encode(DIALECT, EAGER, events).stream.decode()
    first_stop = stream.index("content_block_stop")
    assert stream.index('{\\"a\\": 1') < first_stop < stream.index("after")
