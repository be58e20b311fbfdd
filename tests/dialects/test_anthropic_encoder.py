"""Answers on Anthropic's wire: streamed and whole alike, and back in the history as they were sampled."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_proxy.dialects.anthropic import AnthropicMessages
from polar_proxy.types import ChatRequest, Json, SampleEvent, ToolCall, ToolDelta
from tests.dialects.anthropic_events import BROKEN, OBJECTS, TEXTS, calls, cut, decoded, heard

DIALECT = AnthropicMessages()
BODY: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
EAGER: Json = {
    **BODY,
    "tools": [{"name": name, "input_schema": {}, "eager_input_streaming": True} for name in ("bash", "edit", "Read")],
}


def through(body: Json, events: list[SampleEvent]) -> tuple[Json, Json]:
    """(the message of the stream, the message in one piece) for the same events."""
    parsed = DIALECT.parse(body)
    encoder = DIALECT.encoder(parsed, "call_1", 1)
    fed = b"".join(encoder.feed(0, event) for event in events)
    assert b"message_delta" not in fed, "that an answer is finished is told after the commit"
    answer = heard(events)
    return decoded(fed + encoder.end([answer])), json.loads(DIALECT.encoder(parsed, "call_1", 1).respond([answer]))


def said_again(content: list[Json]) -> Any:
    """The canonical message of an answer that a client sends back."""
    history = [*BODY["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "on"}]
    (request,) = DIALECT.parse({**BODY, "messages": history}).requests
    assert isinstance(request, ChatRequest)
    return request.messages[1]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), reasoning=TEXTS, text=TEXTS, tool_calls=calls(OBJECTS | BROKEN), omit=st.booleans())
def test_any_cut_of_the_events_is_the_same_answer(
    data: st.DataObject, reasoning: str, text: str, tool_calls: tuple[ToolCall, ...], omit: bool
) -> None:
    body = {**BODY, "thinking": {"type": "adaptive", "display": "omitted" if omit else "summarized"}}
    streamed, whole = through(body, data.draw(cut(reasoning, text, tool_calls)))
    assert streamed == whole
    assert whole["usage"] == {
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
def test_an_answer_comes_back_as_it_was_sampled(
    data: st.DataObject, reasoning: str, text: str, tool_calls: tuple[ToolCall, ...], omit: bool, body: Json
) -> None:
    asked = {**body, "thinking": {"type": "adaptive", "display": "omitted" if omit else "summarized"}}
    for message in through(asked, data.draw(cut(reasoning, text, tool_calls))):
        back = said_again(message["content"])
        assert (back.content or "", back.reasoning or "") == (text, reasoning)
        assert [(call.id, call.name, json.loads(call.arguments)) for call in back.tool_calls] == [
            (call.id, call.name, json.loads(call.arguments)) for call in tool_calls
        ]
        assert message["stop_reason"] == ("tool_use" if tool_calls else "end_turn")


@settings(max_examples=30, deadline=None)
@given(arguments=BROKEN, text=TEXTS)
def test_nothing_is_lost_of_a_call_that_is_no_object(arguments: str, text: str) -> None:
    event = SampleEvent(
        text=text, tool_calls=(ToolDelta(0, "c", "bash", arguments),), prompt_ids=(1,), finish_reason="tool_calls"
    )
    streamed, whole = through(BODY, [event])
    assert streamed == whole
    (block,) = whole["content"]
    assert block["text"] == (text + "\n" if text else "") + f"bash({arguments})"
    assert whole["stop_reason"] == "end_turn"


def test_an_input_is_the_text_that_was_sampled() -> None:
    """Numbers that no float holds are not rounded on the way to a client that does not stream."""
    arguments = '{ "n": 123456789012345678901234567890, "x": 1.0 }'
    answer = heard([SampleEvent(tool_calls=(ToolDelta(0, "c", "bash", arguments),), finish_reason="tool_calls")])
    assert arguments.encode() in DIALECT.encoder(DIALECT.parse(BODY), "call_1", 1).respond([answer])


@pytest.mark.parametrize("arguments", ["", "  "])
def test_no_arguments_are_an_empty_input(arguments: str) -> None:
    events = [SampleEvent(tool_calls=(ToolDelta(0, "c", "bash", arguments),), finish_reason="tool_calls")]
    streamed, whole = through(BODY, events)
    assert streamed == whole
    assert whole["content"] == [{"type": "tool_use", "id": "c", "name": "bash", "input": {}}]


@pytest.mark.parametrize("body", [BODY, EAGER])
def test_parallel_calls_in_any_order(body: Json) -> None:
    events = [
        SampleEvent(tool_calls=(ToolDelta(1, "c1", "edit", "{"),), prompt_ids=(1,)),
        SampleEvent(tool_calls=(ToolDelta(0, "c0", "bash", '{"a":'),)),
        SampleEvent(tool_calls=(ToolDelta(1, arguments="}"), ToolDelta(0, arguments="1}"))),
        SampleEvent(finish_reason="tool_calls"),
    ]
    streamed, whole = through(body, events)
    assert streamed == whole
    assert [(block["id"], block["input"]) for block in whole["content"]] == [("c0", {"a": 1}), ("c1", {})]


def test_reasoning_behind_text_and_text_behind_calls_are_kept() -> None:
    events = [
        SampleEvent(text="a", prompt_ids=(1,)),
        SampleEvent(reasoning="b"),
        SampleEvent(tool_calls=(ToolDelta(0, "c", "bash", "{}"),)),
        SampleEvent(text="d", finish_reason="tool_calls"),
    ]
    for message in through(BODY, events) + through(EAGER, events):
        back = said_again(message["content"])
        assert (back.content, back.reasoning, back.tool_calls[0].name) == ("ad", "b", "bash")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (SampleEvent(text="x", finish_reason="stop"), ("end_turn", None)),
        (SampleEvent(finish_reason="stop"), ("end_turn", None)),
        (SampleEvent(text="x", finish_reason="length"), ("max_tokens", None)),
        (SampleEvent(text="x", finish_reason="stop", stop_sequence="##"), ("stop_sequence", "##")),
        (SampleEvent(text="x", finish_reason="content_filter"), ("refusal", None)),
        (SampleEvent(tool_calls=(ToolDelta(0, "c", "b", "{}"),), finish_reason="tool_calls"), ("tool_use", None)),
        # Some engines say `stop` behind a call.
        (SampleEvent(tool_calls=(ToolDelta(0, "c", "b", "{}"),), finish_reason="stop"), ("tool_use", None)),
        (SampleEvent(tool_calls=(ToolDelta(0, "c", "b", "[]"),), finish_reason="tool_calls"), ("end_turn", None)),
        (SampleEvent(tool_calls=(ToolDelta(0, "c", "b", '{"a'),), finish_reason="length"), ("max_tokens", None)),
    ],
)
def test_stop_reasons(event: SampleEvent, expected: tuple[str, str | None]) -> None:
    for message in through(BODY, [event]):
        assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_the_whole_answer() -> None:
    event = SampleEvent(text="hé", prompt_ids=(1, 2), token_ids=(5, 2), logprobs=(-1.0, -1.0), finish_reason="stop")
    _, whole = through(BODY, [event])
    assert whole == {
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


def test_eager_arguments_go_out_as_they_come() -> None:
    encoder = DIALECT.encoder(DIALECT.parse(EAGER), "call_1", 1)
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
