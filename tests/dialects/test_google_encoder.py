"""Google's encoder: the stream equals the response, and an answer sent back is the sampled one."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from polar_proxy.dialects.base import Answer
from polar_proxy.dialects.google.contents import SignedReasoning, decode_signature, encode_signature, extend_reasoning
from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.types import Json, Message, SampleEvent, ToolCall, ToolDelta, TopLogprob
from tests.dialects.encoding import cut, gather
from tests.dialects.google_helpers import HI, both_forms, gemini_cli_history, parse, parts_of, read_parts

PROMPT = (7, 8, 9)
HISTORIES = ("response", "chunks", "Gemini CLI, stream", "Gemini CLI, response")
"""Ways in which a client sends an answer back."""
THOUGHTS: Json = {"contents": [HI], "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
objects = st.dictionaries(texts, st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts, max_size=3)
arguments = st.one_of(
    objects.map(lambda value: json.dumps(value)),
    objects.map(lambda value: json.dumps(value, indent=1, ensure_ascii=False)),
    st.sampled_from(["{}", "[1]", '"x"', '{"a": ', "", " ", '{"a": 1} {"b": 2}', "[" * 3000, '{"a": 1e999}', "null"]),
)


@st.composite
def choices(draw: st.DrawFn) -> tuple[str, str, list[ToolCall], str]:
    """(reasoning, text, calls, finish reason) of one choice."""
    calls = [
        ToolCall(f"c{number}", f"tool{number}", written)
        for number, written in enumerate(draw(st.lists(arguments, max_size=3)))
    ]
    return draw(texts), draw(texts), calls, draw(st.sampled_from(["stop", "length", "tool_calls"]))


@st.composite
def answers(draw: st.DrawFn, *, n: int = 1) -> list[SampleEvent]:
    """Return the events of n choices, cut at random and mixed."""
    queues = []
    for index in range(n):
        reasoning, text, calls, reason = draw(choices())
        events = [SampleEvent(index, reasoning=piece) for piece in cut(draw, reasoning)]
        events += [SampleEvent(index, text=piece) for piece in cut(draw, text)]
        for number, call in enumerate(calls):
            first, *more = cut(draw, call.arguments)
            events.append(SampleEvent(index, tool_calls=(ToolDelta(number, call.id, call.name, first),)))
            events += [SampleEvent(index, tool_calls=(ToolDelta(number, arguments=piece),)) for piece in more]
        for token in draw(st.lists(st.integers(0, 999), min_size=1, max_size=4)):
            top = ((TopLogprob(token, f"t{token}", -token / 8),),)
            tokens = SampleEvent(index, token_ids=(token,), logprobs=(-token / 8,), tokens=(f"t{token}",), top=top)
            events.insert(draw(st.integers(0, len(events))), tokens)
        queues.append([*events, SampleEvent(index, finish_reason=reason)])
    mixed = [SampleEvent(0, prompt_ids=PROMPT, cached_tokens=2)]
    while any(queues):
        queue = queues[draw(st.integers(0, n - 1))]
        if queue:
            mixed.append(queue.pop(0))
    return mixed


def sampled_message(events: list[SampleEvent]) -> Message:
    """Return choice 0 of the engine's answer."""
    state = gather(events).choices[0]
    return Message(
        "assistant", "".join(state.text), reasoning="".join(state.reasoning) or None, tool_calls=tuple(state.tool_calls)
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(events=st.integers(1, 3).flatmap(lambda n: answers(n=n)), thoughts=st.booleans(), sse=st.booleans())
def test_stream_equals_response_however_events_are_cut(events: list[SampleEvent], thoughts: bool, sse: bool) -> None:
    options = {"responseLogprobs": True, "logprobs": 1, "thinkingConfig": {"includeThoughts": thoughts}}
    chunks, response = both_forms({"contents": [HI], "generationConfig": options}, events, sse=sse)
    *_, last = chunks
    assert last["usageMetadata"] == response["usageMetadata"]
    assert [c["index"] for c in last["candidates"]] == [c["index"] for c in response["candidates"]]
    for chunk in chunks[:-1]:
        assert "usageMetadata" not in chunk
        assert all("finishReason" not in candidate for candidate in chunk["candidates"])
    for candidate in response["candidates"]:
        index = candidate["index"]
        streamed = [c for chunk in chunks for c in chunk["candidates"] if c["index"] == index]
        assert read_parts(parts_of(chunks, index)) == read_parts(candidate["content"]["parts"])
        assert all(c["content"]["role"] == "model" and c["content"]["parts"] for c in streamed)
        assert streamed[-1]["finishReason"] == candidate["finishReason"]
        assert streamed[-1]["avgLogprobs"] == candidate["avgLogprobs"]
        for field in ("chosenCandidates", "topCandidates"):
            pieces: list[Any] = [piece for c in streamed for piece in c.get("logprobsResult", {}).get(field, [])]
            assert pieces == candidate["logprobsResult"][field]
        if not thoughts:
            assert not any(part.get("thought") for part in candidate["content"]["parts"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(events=answers(), thoughts=st.booleans(), how=st.sampled_from(HISTORIES))
@example(
    events=[
        SampleEvent(reasoning="why"),
        SampleEvent(text="so"),
        SampleEvent(text="!", prompt_ids=PROMPT),
        SampleEvent(finish_reason="stop"),
    ],
    thoughts=False,
    how="Gemini CLI, stream",
)
@example(
    events=[
        SampleEvent(text="0", prompt_ids=PROMPT),
        SampleEvent(tool_calls=(ToolDelta(0, "c0", "tool0", ""),)),
        SampleEvent(finish_reason="length"),
    ],
    thoughts=False,
    how="Gemini CLI, stream",
)
def test_answer_sent_back_equals_the_sampled_one(events: list[SampleEvent], thoughts: bool, how: str) -> None:
    """Text, reasoning, names, canonical arguments and ids, whatever a client keeps of the parts."""
    sampled = sampled_message(events)
    chunks, response = both_forms({**THOUGHTS} if thoughts else {"contents": [HI]}, events)
    parts = response["candidates"][0]["content"]["parts"]
    contents: list[Json] = [{"role": "model", "parts": parts}]
    if how == "chunks":
        contents = [candidate["content"] for chunk in chunks for candidate in chunk["candidates"]]
    elif how == "Gemini CLI, stream":
        contents = [{"role": "model", "parts": gemini_cli_history(parts_of(chunks))}]
    elif how == "Gemini CLI, response":
        contents = [{"role": "model", "parts": gemini_cli_history(parts)}]
    found = parse({"contents": [HI, *contents, HI]}).messages[1]
    broken = any(not _object(call.arguments) for call in sampled.tool_calls)
    if sampled.tool_calls and events[-1].finish_reason == "length":  # the arguments of the last call may be cut
        broken = broken or not sampled.tool_calls[-1].arguments.strip()
    if how.startswith("Gemini CLI") and broken:
        event("a call sent as text, and merged with other text, stays text")
        return
    assert found.reasoning == sampled.reasoning
    assert found.content in (sampled.content, sampled.content or None)
    restored = [call if call.arguments.strip() else ToolCall(call.id, call.name, "{}") for call in sampled.tool_calls]
    if sampled.tool_calls and not sampled.tool_calls[-1].arguments.strip() and found.tool_calls[-1].arguments != "{}":
        restored[-1] = sampled.tool_calls[-1]  # cut before its arguments began
    assert [_canonical(call) for call in found.tool_calls] == [_canonical(call) for call in restored]


def _canonical(call: ToolCall) -> tuple[str, str, object]:
    """Return the call with parsed arguments, or unparsed if they are not JSON."""
    try:
        return call.id, call.name, orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return call.id, call.name, call.arguments


def _object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments or "{}"), dict)
    except orjson.JSONDecodeError:
        return False


@given(st.integers(0, 99), texts, st.none() | st.builds(ToolCall, texts, texts, texts))
def test_signature_round_trip(at: int, reasoning: str, call: ToolCall | None) -> None:
    signed = SignedReasoning(at, reasoning, call)
    assert decode_signature(encode_signature(signed)) == signed
    recoded = encode_signature(signed).replace("+", "-").replace("/", "_").rstrip("=")
    assert decode_signature(recoded) == signed


@given(
    st.text(max_size=40) | st.binary(max_size=40).map(lambda data: encode_signature(SignedReasoning())[:9] + data.hex())
)
def test_foreign_signature_is_none(signature: str) -> None:
    assert decode_signature(signature) is None


def test_extend_reasoning_ignores_gaps_and_repetitions() -> None:
    assert extend_reasoning("", SignedReasoning(0, "ab")) == "ab"
    assert extend_reasoning("ab", SignedReasoning(2, "cd")) == "abcd"
    assert extend_reasoning("ab", SignedReasoning(0, "ab")) == "ab"
    assert extend_reasoning("ab", SignedReasoning(0, "abcd")) == "abcd"
    assert extend_reasoning("ab", SignedReasoning(3, "d")) == "ab"


def call_event(number: int, name: str, written: str) -> SampleEvent:
    return SampleEvent(tool_calls=(ToolDelta(number, f"c{number}", name, written),))


def finish(reason: str = "stop") -> SampleEvent:
    return SampleEvent(token_ids=(2,), logprobs=(-0.25,), tokens=("",), finish_reason=reason)


def test_response() -> None:
    first = SampleEvent(text="hé", token_ids=(5,), logprobs=(-0.5,), tokens=("hé",), prompt_ids=PROMPT, cached_tokens=2)
    _, response = both_forms({"contents": [HI]}, [first, finish()])
    assert response == {
        "candidates": [
            {"content": {"role": "model", "parts": [{"text": "hé"}]}, "index": 0, "finishReason": "STOP"},
        ],
        "modelVersion": "m",
        "responseId": "call_1",
        "usageMetadata": {
            "promptTokenCount": 3,
            "candidatesTokenCount": 2,
            "totalTokenCount": 5,
            "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 3}],
            "cachedContentTokenCount": 2,
        },
    }


def test_call_is_sent_whole_when_the_next_begins() -> None:
    dialect = GoogleGenerateContent("m", stream=True, sse=True)
    encoder = dialect.parse({"contents": [HI]}).encoder("call_1", 1)
    assert encoder.feed(0, call_event(0, "bash", '{"a"')) == b""
    assert encoder.feed(0, SampleEvent(tool_calls=(ToolDelta(0, arguments=": 1}"),))) == b""
    sent = encoder.feed(0, call_event(1, "python", "{"))
    assert b'"functionCall":{"name":"bash","args":{"a": 1},"id":"c0"}' in sent
    assert b"python" not in sent


def test_arguments_are_the_sampled_text() -> None:
    """Spaces, order and long numbers are kept, unless a line break would end the event."""
    written = '{"b": 1.50, "a" :12345678901234567890123, "b":2}'
    chunks, _ = both_forms({"contents": [HI]}, [call_event(0, "bash", written), finish("tool_calls")])
    assert len(chunks) == 1
    dialect = GoogleGenerateContent("m", stream=True, sse=True)
    parsed = dialect.parse({"contents": [HI]})
    answer = Answer()
    answer.add(call_event(0, "bash", written))
    answer.add(finish())
    assert written.encode() in parsed.encoder("c", 1).respond([answer])
    chunks, _ = both_forms({"contents": [HI]}, [call_event(0, "bash", '{\n"a":\r\n1}'), finish()])
    assert read_parts(parts_of(chunks))["calls"] == [("c0", "bash", {"a": 1})]


@pytest.mark.parametrize("written", ["[1]", '{"a": ', '"x"', "null", "[" * 3000])
def test_arguments_that_are_not_an_object_become_text(written: str) -> None:
    events = [call_event(0, "bash", written), call_event(1, "bash", '{"a":1}'), finish("tool_calls")]
    for body in both_forms({"contents": [HI]}, events)[0], [both_forms({"contents": [HI]}, events)[1]]:
        assert read_parts(parts_of(body)) == {
            "text": f"bash({written})",
            "thoughts": "",
            "calls": [("c1", "bash", {"a": 1})],
        }


@pytest.mark.parametrize(("reason", "finished"), [("tool_calls", True), ("length", False)])
def test_empty_arguments_are_an_empty_object_unless_cut(reason: str, finished: bool) -> None:
    chunks, _ = both_forms({"contents": [HI]}, [call_event(0, "bash", ""), finish(reason)])
    found = read_parts(parts_of(chunks))
    assert found["calls"] == ([("c0", "bash", {})] if finished else [])
    assert found["text"] == ("" if finished else "bash()")


def test_reasoning_is_signed_on_the_first_text_and_call() -> None:
    """Google puts it there, too. If no part follows, an empty text is signed."""
    events = [
        SampleEvent(reasoning="why"),
        SampleEvent(text="a"),
        SampleEvent(text="b"),
        call_event(0, "bash", "{}"),
        call_event(1, "bash", "{}"),
        finish(),
    ]
    parts = parts_of(both_forms({"contents": [HI]}, events)[0])
    why = encode_signature(SignedReasoning(0, "why"))
    assert [part.get("thoughtSignature") for part in parts] == [why, None, why, None]
    parts = parts_of(both_forms({"contents": [HI]}, [SampleEvent(reasoning="why"), finish("length")])[0])
    assert parts == [{"text": "", "thoughtSignature": why}]
    late = [SampleEvent(text="a"), SampleEvent(reasoning="why"), finish()]
    assert parts_of(both_forms({"contents": [HI]}, late)[0]) == [{"text": "a"}, {"text": "", "thoughtSignature": why}]


def test_thoughts_are_shown_on_request_only() -> None:
    events = [SampleEvent(reasoning="why"), SampleEvent(text="so"), finish()]
    assert read_parts(parts_of(both_forms(THOUGHTS, events)[0]))["thoughts"] == "why"
    assert read_parts(parts_of(both_forms({"contents": [HI]}, events)[0]))["thoughts"] == ""


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stop", "STOP"),
        ("tool_calls", "STOP"),
        ("length", "MAX_TOKENS"),
        ("content_filter", "SAFETY"),
        ("abort", "OTHER"),
    ],
)
def test_finish_reasons(reason: str, expected: str) -> None:
    chunks, response = both_forms({"contents": [HI]}, [SampleEvent(text="a"), finish(reason)])
    assert chunks[-1]["candidates"][0]["finishReason"] == response["candidates"][0]["finishReason"] == expected


def test_finish_reason_is_sent_after_the_commit_only() -> None:
    for sse in (True, False):
        dialect = GoogleGenerateContent("m", stream=True, sse=sse)
        encoder = dialect.parse({"contents": [HI]}).encoder("call_1", 1)
        fed = encoder.feed(0, SampleEvent(text="a")) + encoder.feed(0, finish())
        assert b"finishReason" not in fed
        assert not fed.endswith(b"]")


@pytest.mark.parametrize("begun", [True, False])
def test_error_inside_a_stream(begun: bool) -> None:
    dialect = GoogleGenerateContent("m", stream=True, sse=True)
    parsed = dialect.parse({"contents": [HI]})
    error = parsed.encoder("c", 1).fail("broke", 502)
    assert error == b'data: {"error":{"code":502,"message":"broke","status":"UNAVAILABLE"}}\n\n'
    encoder = GoogleGenerateContent("m", stream=True).parse({"contents": [HI]}).encoder("c", 1)
    written = encoder.feed(0, SampleEvent(text="a")) if begun else b""
    elements = json.loads(written + encoder.fail("broke", 502))
    assert elements[-1]["error"]["message"] == "broke"
    assert len(elements) == (2 if begun else 1)


ENUM: Json = {
    "contents": [HI],
    "generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a é", "b"]}},
}


@pytest.mark.parametrize(("pieces", "text"), [(['"a ', '\\u00e9"'], "a é"), (["b"], "b"), (['"a'], '"a'), (["1"], "1")])
@pytest.mark.parametrize("sse", [True, False])
def test_an_enumerations_value_is_sent_without_its_quotes(pieces: list[str], text: str, sse: bool) -> None:
    events = [SampleEvent(text=piece) for piece in pieces] + [SampleEvent(finish_reason="stop")]
    chunks, response = both_forms(ENUM, events, sse=sse)
    assert [part["text"] for part in parts_of(chunks)] == [text]
    assert [part["text"] for part in response["candidates"][0]["content"]["parts"]] == [text]


def test_tokens_of_thoughts_are_counted_apart() -> None:
    events = [
        SampleEvent(reasoning="hm", token_ids=(1, 2), logprobs=(-1.0, -1.0), prompt_ids=(5,)),
        SampleEvent(text="a", token_ids=(3,), logprobs=(-1.0,), finish_reason="stop"),
    ]
    chunks, response = both_forms({"contents": [HI]}, events)
    usage = response["usageMetadata"]
    assert (usage["thoughtsTokenCount"], usage["candidatesTokenCount"], usage["totalTokenCount"]) == (2, 1, 4)
    assert chunks[-1]["usageMetadata"] == usage
