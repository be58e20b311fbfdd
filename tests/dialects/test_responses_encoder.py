"""The Responses encoder: the stream equals the response, and an answer sent back is the sampled one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from polar_proxy.dialects.base import Answer
from polar_proxy.dialects.custom_tools import CustomInputDecoder, custom_input
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, ToolCall, ToolDelta, TopLogprob
from tests.dialects.encoding import cut, encode

TOOLS: list[Json] = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "ns", "tools": [{"type": "custom", "name": "exec"}]},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client"},
]
BODY: Json = {"model": "m", "input": "hi", "tools": TOOLS}
PROMPT = (7, 8, 9)
USAGE: Json = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 5,
}

_SLOW = [HealthCheck.too_slow, HealthCheck.large_base_example]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_objects = st.dictionaries(texts, texts | st.integers(-9, 9) | st.none() | st.lists(st.booleans(), max_size=2))
_good: dict[str, st.SearchStrategy[Any]] = {
    "bash": _objects,
    "apply_patch": st.fixed_dictionaries({"input": texts}),
    "ns__exec": st.fixed_dictionaries({"input": texts}),
    "local_shell": st.fixed_dictionaries({"command": st.lists(texts, max_size=2)}, optional={"timeout_ms": st.just(5)}),
    "tool_search": _objects,
    "unknown": _objects,
}
_escaped = st.sampled_from([True, False])


@st.composite
def calls(draw: st.DrawFn) -> tuple[ToolCall, ...]:
    out = []
    for number in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(_good)))
        good = draw(_good[name]).copy()
        arguments = json.dumps(good, ensure_ascii=draw(_escaped), separators=draw(st.sampled_from([(",", ":"), None])))
        broken = st.just(arguments[:-1]) | st.just(arguments[:-1] + ',"x":1}')
        out.append(ToolCall(f"c{number}", name, draw(st.just(arguments) | texts | broken)))
    return tuple(out)


@dataclass(frozen=True)
class Sampled:
    """An answer of the engine."""

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...]
    reason: str


answers = st.builds(Sampled, texts, texts, calls(), st.sampled_from(["stop", "length", "tool_calls"]))


@st.composite
def events(draw: st.DrawFn, sampled: Sampled) -> list[SampleEvent]:
    """Return an answer cut into events at random: reasoning, text, calls."""
    out = [SampleEvent(prompt_ids=PROMPT, cached_tokens=2)]
    out += [SampleEvent(reasoning=piece, token_ids=(5,), logprobs=(-0.5,)) for piece in cut(draw, sampled.reasoning)]
    out += [SampleEvent(text=piece) for piece in cut(draw, sampled.text)]
    for number, call in enumerate(sampled.calls):
        pieces = cut(draw, call.arguments)
        out.append(SampleEvent(tool_calls=(ToolDelta(number, call.id, call.name, pieces[0]),)))
        out += [SampleEvent(tool_calls=(ToolDelta(number, arguments=piece),)) for piece in pieces[1:]]
    return [*out, SampleEvent(finish_reason=sampled.reason)]


def both_forms(samples: list[SampleEvent], body: Json = BODY) -> tuple[list[Json], Json, Answer]:
    """Return (the events of the stream, the response, the recorded answer)."""
    encoded = encode(OpenAIResponses(), body, samples)
    assert b"response.completed" not in encoded.before_end
    assert b"response.incomplete" not in encoded.before_end
    streamed = []
    for block in encoded.stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\ndata: ")
        streamed.append(json.loads(data))
        assert name == "event: " + streamed[-1]["type"]
    return streamed, encoded.response, encoded.answer


def assembled(streamed: list[Json]) -> Json:
    """Return the response object that a client assembles from the events. Asserts their order."""
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    kinds = [event["type"] for event in streamed]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    items: list[Json] = []
    now: Json = {}
    for event in streamed[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not now  # one item is open at a time
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            now = {"item": event["item"], "text": "", "done": None}
            continue
        assert event["output_index"] == len(items)
        if kind == "output_item.done":
            item = event["item"]
            assert {key: item[key] for key in ("id", "type")} == {key: now["item"][key] for key in ("id", "type")}
            assert item.get("call_id") == now["item"].get("call_id")
            if now["done"] is not None:
                assert now["done"] == _text_of(item)
            items.append(item)
            now = {}
            continue
        assert event["item_id"] == now["item"]["id"]
        if kind.endswith(".delta"):
            assert event["delta"]
            now["text"] += event["delta"]
        elif kind.endswith(("text.done", "arguments.done", "input.done")):
            now["done"] = event.get("text", event.get("arguments", event.get("input")))
            if event["type"] != "response.custom_tool_call_input.done":
                assert now["text"] == now["done"]
            elif now["text"] != now["done"]:  # the decoded text was not the final input
                assert custom_input(now["done"]) is None
    assert not now
    final: Json = streamed[-1]["response"]
    assert streamed[-1]["type"] == f"response.{final['status']}"
    assert items == final["output"]
    return final


def _text_of(item: Json) -> str:
    if item["type"] == "message":
        return str(item["content"][0]["text"])
    if item["type"] == "reasoning":
        return str(item["summary"][0]["text"])
    return str(item.get("arguments", item.get("input")))


@settings(max_examples=60, deadline=None, suppress_health_check=_SLOW)
@given(data=st.data(), sampled=answers)
def test_stream_equals_response_however_events_are_cut(data: st.DataObject, sampled: Sampled) -> None:
    first, response, _ = both_forms(data.draw(events(sampled)))
    second, again, _ = both_forms(data.draw(events(sampled)))
    one, two = assembled(first), assembled(second)
    assert one["output"] == two["output"] == response["output"] == again["output"]
    assert one == response
    ending = ("incomplete", {"reason": "max_output_tokens"}) if sampled.reason == "length" else ("completed", None)
    assert (response["status"], response["incomplete_details"]) == ending


def canonical(message: Message) -> Any:
    def value(arguments: str) -> Any:
        try:
            return orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return arguments

    found = [(call.id, call.name, value(call.arguments)) for call in message.tool_calls]
    return message.content or "", message.reasoning or "", found


@settings(max_examples=60, deadline=None, suppress_health_check=_SLOW)
@given(data=st.data(), sampled=answers, keeps_ids=st.booleans())
def test_answer_sent_back_equals_the_sampled_one(data: st.DataObject, sampled: Sampled, keeps_ids: bool) -> None:
    streamed, _, answer = both_forms(data.draw(events(sampled)))
    items = assembled(streamed)["output"]
    if not keeps_ids:  # as opencode does; only the id shows that a custom call's text was its whole argument string
        items = [{key: value for key, value in item.items() if key != "id"} for item in items]
        if any(c.name in ("apply_patch", "ns__exec") and custom_input(c.arguments) is None for c in sampled.calls):
            return
    results = [{"type": "function_call_output", "call_id": call.id, "output": "ok"} for call in sampled.calls]
    body = {**BODY, "input": [{"role": "user", "content": "hi"}, *items, *results]}
    (request,) = OpenAIResponses().parse(body).requests
    assert isinstance(request, ChatRequest)
    message = request.messages[1]
    recorded = answer.choices[0].message.to_openai()
    assert canonical(message) == canonical(Message("assistant", sampled.text, sampled.reasoning, sampled.calls))
    assert (message.content or "") == (recorded["content"] or "")
    assert len(request.messages) == 2 + len(sampled.calls)


@st.composite
def mixed(draw: st.DrawFn) -> list[SampleEvent]:
    """Return events of reasoning, text and several calls in any order."""
    sampled = draw(answers)
    queues = [
        [SampleEvent(reasoning=piece) for piece in cut(draw, sampled.reasoning)],
        [SampleEvent(text=piece) for piece in cut(draw, sampled.text)],
    ]
    for number, call in enumerate(sampled.calls):
        arguments = json.dumps({"input": call.arguments})
        first, *rest = cut(draw, arguments)
        queues.append(
            [
                SampleEvent(tool_calls=(ToolDelta(number, call.id, call.name, first),)),
                *(SampleEvent(tool_calls=(ToolDelta(number, arguments=piece),)) for piece in rest),
            ]
        )
    out = []
    while any(queues):
        queue = queues[draw(st.integers(0, len(queues) - 1))]
        if queue:
            out.append(queue.pop(0))
    return [*out, SampleEvent(finish_reason="stop")]


@settings(max_examples=60, deadline=None, suppress_health_check=_SLOW)
@given(samples=mixed())
@example(
    samples=[
        SampleEvent(text="a", tool_calls=(ToolDelta(0, "c0", "bash", "{}"),)),
        SampleEvent(text="\n", tool_calls=(ToolDelta(1, "c1", "bash", "{"),)),
        SampleEvent(text="b", tool_calls=(ToolDelta(2, "c2", "bash", "{}"), ToolDelta(1, arguments="}"))),
        SampleEvent(finish_reason="stop"),
    ]
)
def test_any_order_of_events_is_one_message_again(samples: list[SampleEvent]) -> None:
    streamed, response, answer = both_forms(samples)
    items = assembled(streamed)["output"]
    state = answer.choices[0]
    body = {**BODY, "input": [{"role": "user", "content": "hi"}, *items]}
    (request,) = OpenAIResponses().parse(body).requests
    assert isinstance(request, ChatRequest)
    assert len(request.messages) == 2
    message = request.messages[1]
    assert (message.content or "") == "".join(state.text)
    assert (message.reasoning or "") == "".join(state.reasoning)
    assert sorted(call.id for call in message.tool_calls) == sorted(call.id for call in state.tool_calls)
    assert {item["call_id"] for item in items if "call_id" in item} == {c.id for c in state.tool_calls}
    assert len(response["output"]) <= len(items)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=texts, rest=st.sampled_from(["}", " }", ',"a":1}', "", '"']), ascii_only=st.booleans())
@example(data=None, text="a😀\n", rest="}", ascii_only=True)
def test_custom_input_is_decoded_in_pieces(data: st.DataObject | None, text: str, rest: str, ascii_only: bool) -> None:
    arguments = '{ "input" :' + json.dumps(text, ensure_ascii=ascii_only) + rest
    places = [] if data is None else sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=5)))
    places = list(range(len(arguments))) if data is None else places
    decoder = CustomInputDecoder()
    found = "".join(decoder.feed(arguments[a:b]) for a, b in zip([0, *places], [*places, len(arguments)], strict=True))
    assert found == text
    assert custom_input(arguments) == (text if rest.strip() == "}" else None)


@pytest.mark.parametrize("arguments", ['{"input":"a\\ud800"}', '{"input":"a\\x"}', '{"input":"a\nb"}'])
def test_custom_input_of_another_form_is_sent_unchanged(arguments: str) -> None:
    streamed, _, _ = both_forms(
        [SampleEvent(tool_calls=(ToolDelta(0, "c0", "apply_patch", arguments),)), SampleEvent(finish_reason="stop")]
    )
    (item,) = assembled(streamed)["output"]
    assert item["input"] == arguments


def test_events_before_the_commit() -> None:
    """Deltas are sent at once. The item that is open at the end is closed after the commit."""
    encoder = OpenAIResponses().parse(BODY).encoder("call_1", 1)
    fed = encoder.feed(0, SampleEvent(text="hel", prompt_ids=PROMPT)) + encoder.feed(0, SampleEvent(text="lo"))
    fed += encoder.feed(0, SampleEvent(finish_reason="stop"))
    assert fed.count(b"event: response.output_text.delta") == 2
    assert b".done" not in fed
    answer = Answer()
    answer.add(SampleEvent(text="hello", finish_reason="stop"))
    assert encoder.end([answer]).count(b"event: response.output_item.done") == 1


def test_response() -> None:
    token = SampleEvent(text="hé", token_ids=(5,), logprobs=(-0.5,), prompt_ids=PROMPT, cached_tokens=2)
    last = SampleEvent(token_ids=(2,), logprobs=(-0.25,), finish_reason="stop")
    fields: Json = {
        "instructions": "be exact",
        "tools": TOOLS,
        "tool_choice": "auto",
        "metadata": {"a": "b"},
        "previous_response_id": "resp_0",
        "store": False,
        "temperature": 0.5,
    }
    _, response, _ = both_forms([token, last], {"model": "m", "input": "hi", **fields})
    assert response == {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "completed_at": None,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "output": [
            {
                "id": "msg_1_0",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "hé", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": USAGE,
        "model": "m",
        **fields,
        "tools": [{**TOOLS[0], "description": None, "strict": False}, *TOOLS[1:]],
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "background": False,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "text": {"format": {"type": "text"}},
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


def test_log_probabilities_belong_to_the_text() -> None:
    def event(token: int, spelt: str, **fields: Any) -> SampleEvent:
        other = TopLogprob(token, spelt, -token / 8)
        return SampleEvent(token_ids=(token,), logprobs=(-token / 8,), tokens=(spelt,), top=((other,),), **fields)

    samples = [
        event(1, "<think>"),
        event(2, "ab", reasoning="ab"),
        event(3, "</think>"),
        event(4, "a", text="a"),
        event(5, "b", text="b"),
        event(6, "", finish_reason="stop"),
    ]
    wants = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    streamed, response, _ = both_forms(samples, {**BODY, **wants})
    assert assembled(streamed) == response
    shown = response["output"][1]["content"][0]["logprobs"]
    assert [(item["token"], item["logprob"]) for item in shown] == [("a", -0.5), ("b", -0.625)]
    assert shown[0]["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    deltas = [event["logprobs"] for event in streamed if event["type"] == "response.output_text.delta"]
    assert [item for delta in deltas for item in delta] == shown


@pytest.mark.parametrize(
    ("status", "code"), [(429, "rate_limit_exceeded"), (400, "invalid_prompt"), (502, "server_error")]
)
@pytest.mark.parametrize("begun", [True, False])
def test_error_inside_a_stream(status: int, code: str, begun: bool) -> None:
    encoder = OpenAIResponses().parse(BODY).encoder("call_1", 1)
    written = encoder.feed(0, SampleEvent(text="hel")) if begun else b""
    written += encoder.fail("the engine broke", status)
    streamed = [json.loads(block.split("\ndata: ")[1]) for block in written.decode().split("\n\n")[:-1]]
    assert streamed[0]["type"] == "response.created"
    assert streamed[-1]["type"] == "response.failed"
    assert streamed[-1]["response"]["status"] == "failed"
    assert streamed[-1]["response"]["error"] == {"code": code, "message": "the engine broke"}
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
