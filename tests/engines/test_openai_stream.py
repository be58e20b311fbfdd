"""Recorded answers of a real vLLM server become events with everything that was sampled."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.engines.openai_stream import ChunkDecoder, SseDecoder
from polar_proxy.engines.vllm.client import SeparateChunkDecoder, chat_body, text_body
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, Message, SampleEvent, Sampling, TextRequest, ToolCall

_BASH: dict[str, Any] = {"type": "function", "function": {"name": "bash"}}
SAMPLES = Path(__file__).with_name("vllm_samples")


def sample(name: str) -> dict[str, Any]:
    """A recorded exchange with vLLM 0.32."""
    return json.loads((SAMPLES / f"{name}.json").read_text())


def wire(name: str) -> bytes:
    return b"".join(line.encode() + b"\n\n" for line in sample(name)["sse_lines"])


def parse(raw: bytes, *, cuts: list[int] | None = None, n: int = 1, **sampling: Any) -> list[SampleEvent]:
    decoder, parser = SseDecoder("http://x"), ChunkDecoder(Sampling(n=n, **sampling), "It")
    out: list[SampleEvent] = []
    edges = [0, *sorted(cuts or []), len(raw)]
    for start, end in pairwise(edges):
        if start != end:
            out += parser.feed(decoder.feed(raw[start:end]))
    assert decoder.done
    return out + parser.end()


def reported(name: str) -> dict[int, tuple[list[int], list[float]]]:
    """Return ids and log-probabilities of each choice, taken directly from the recording."""
    out: dict[int, tuple[list[int], list[float]]] = {}
    for line in sample(name)["sse_lines"][:-1]:
        for choice in json.loads(line[6:])["choices"]:
            ids, logprobs = out.setdefault(choice["index"], ([], []))
            ids += choice.get("token_ids") or []
            entry = choice.get("logprobs") or {}
            logprobs += [row["logprob"] for row in entry.get("content", [])] + entry.get("token_logprobs", [])
    return out


STREAMS = [("chat_stream_n2", 2), ("chat_tools_hermes_choice_stream", 1), ("completions_ids_stream", 1)]


@pytest.mark.parametrize(("name", "n"), STREAMS)
@pytest.mark.parametrize("size", [1, 7, 300, 10**9])
def test_no_token_is_lost_however_the_stream_is_cut(name: str, n: int, size: int) -> None:
    raw = wire(name)
    events = parse(raw, cuts=list(range(size, len(raw), size)), n=n)
    assert events[0].prompt_ids is not None
    assert all(event.prompt_ids is None for event in events[1:])
    for index, (ids, logprobs) in reported(name).items():
        mine = [event for event in events if event.index == index]
        assert [token for event in mine for token in event.token_ids] == ids
        assert [value for event in mine for value in event.logprobs] == logprobs
        assert [event.finish_reason is not None for event in mine] == [False] * (len(mine) - 1) + [True]


def test_chunks_are_kept_apart_if_one_read_brings_several() -> None:
    """Some of vLLM's parsers parse other chunks otherwise, so the samples by which they are found keep them."""
    chunks = [json.loads(line[6:]) for line in sample("chat_tools_hermes_choice_stream")["sse_lines"][:-1]]
    sizes = [len(choice.get("token_ids") or ()) for chunk in chunks for choice in chunk["choices"]]
    decoder = SeparateChunkDecoder(Sampling(), "It")
    events = [*decoder.feed(chunks), *decoder.end()]
    assert [len(event.token_ids) for event in events if event.token_ids] == [size for size in sizes if size]


@given(st.lists(st.integers(0, len(wire("chat_stream_n2"))), max_size=12), st.booleans())
def test_answer_does_not_depend_on_the_cuts(cuts: list[int], crlf: bool) -> None:
    raw = wire("chat_stream_n2")
    if crlf:
        raw = raw.replace(b"\n", b"\r\n")
    texts = {}
    for event in parse(raw, cuts=[cut for cut in cuts if cut < len(raw)], n=2):
        texts[event.index] = texts.get(event.index, "") + event.text
    assert texts == {0: "/versions� state.n� Decimalicroype", 1: texts[1]}
    assert texts[1].startswith("�ctest functions")


def test_empty_delta_keeps_its_ids() -> None:
    """The tool parser holds text back while ids flow."""
    events = parse(wire("chat_tools_hermes_choice_stream"), cuts=list(range(400, 9000, 400)))
    held = [event for event in events if event.token_ids and not event.text and not event.tool_calls]
    assert held
    calls = [delta for event in events for delta in event.tool_calls]
    assert (calls[0].name, "".join(call.arguments for call in calls)) == ("get_weather", '{"city": "Paris"}')
    assert events[-1].finish_reason == "tool_calls"
    assert events[-1].token_ids[-1] == 2  # the end of turn


def test_one_read_makes_one_event_per_choice() -> None:
    assert len(parse(wire("completions_ids_stream"))) == 1
    assert len(parse(wire("chat_stream_n2"), n=2)) == 2


@pytest.mark.parametrize(
    ("name", "n", "text", "calls"),
    [
        ("chat_all", 2, "/versions� state.n� Decimalicroype", []),
        ("chat_tools_hermes_text_plus_call", 1, "I will look. ", ["get_weather"]),
        (
            "chat_tools_hermes_malformed",
            1,
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>',
            [],
        ),
    ],
)
def test_decodes_whole_answers(name: str, n: int, text: str, calls: list[str]) -> None:
    answer = sample(name)["response"]
    parser = ChunkDecoder(Sampling(n=n), "It")
    events = parser.feed([answer]) + parser.end()
    assert events[0].prompt_ids == answer["prompt_token_ids"]
    assert events[0].text == text
    assert [delta.name for delta in events[0].tool_calls] == calls
    for event, choice in zip(events, answer["choices"], strict=True):
        assert event.token_ids == tuple(choice["token_ids"])
        assert len(event.logprobs) == len(event.token_ids)
        assert event.finish_reason == choice["finish_reason"]
    if name == "chat_tools_hermes_malformed":  # requested without log-probabilities
        assert all(map(math.isnan, events[0].logprobs))


def chunk(ids: list[int] | None, logprobs: list[float] | None, *, finish: str | None = None) -> dict[str, Any]:
    content = None if logprobs is None else {"content": [{"token": "x", "logprob": p} for p in logprobs]}
    choice = {"index": 0, "delta": {"content": "x"}, "logprobs": content, "finish_reason": finish}
    return {"choices": [choice if ids is None else choice | {"token_ids": ids}]}


@pytest.mark.parametrize(
    ("ids", "logprobs", "expected"),
    [
        ([7], [-0.5], ([7], [-0.5])),
        ([7], [-9999.0], ([7], [math.nan])),
        ([7, 8], [-0.5], ([7, 8], [math.nan, math.nan])),
        ([7], None, ([7], [math.nan])),
        (None, [-0.5], ([-1], [math.nan])),
        ([], None, ([], [])),
    ],
    ids=["both", "floor", "fewer logprobs", "no logprobs", "no ids", "neither"],
)
def test_missing_evidence_is_marked_unknown(
    ids: list[int] | None, logprobs: list[float] | None, expected: tuple[list[int], list[float]]
) -> None:
    parser = ChunkDecoder(Sampling(logprobs=True), "It")
    events = parser.feed([chunk(ids, logprobs, finish="stop")]) + parser.end()
    assert events[-1].text == "x"
    assert list(events[-1].token_ids) == expected[0]
    assert list(events[-1].logprobs) == pytest.approx(expected[1], nan_ok=True)
    assert len(events[-1].tokens) == len(expected[0])


def test_chunks_of_one_read_keep_their_order_if_one_lacks_log_probabilities() -> None:
    decoder = ChunkDecoder(Sampling(), "It")
    chunks = [chunk([1], [-0.1]), chunk([2, 3], [-0.2]), chunk([4], [-0.4], finish="stop")]
    del chunks[2]["choices"][0]["logprobs"]["content"][0]["token"]  # some servers leave the text out
    (event,) = [*decoder.feed(chunks), *decoder.end()]
    assert event.token_ids == (1, 2, 3, 4)
    assert [None if math.isnan(value) else value for value in event.logprobs] == [-0.1, None, None, -0.4]


def test_server_without_ids_gives_events_without_ids() -> None:
    parser = ChunkDecoder(Sampling(), "It", expect_ids=False)
    events = parser.feed([chunk(None, [-0.5], finish="stop")]) + parser.end()
    assert (events[-1].token_ids, events[-1].logprobs, events[-1].text) == ((), (), "x")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reads_reasoning_under_either_name(name: str) -> None:
    parser = ChunkDecoder(Sampling(), "It")
    deltas = [{name: "a"}, {name: "b"}, {"content": "c"}, {name: "d"}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "token_ids": [1]}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
    events = parser.feed(chunks) + parser.end()
    assert [(event.reasoning, event.text) for event in events] == [("ab", "c"), ("d", "")]
    assert [event.token_ids for event in events] == [(1, 1, 1), (1,)]
    assert events[-1].finish_reason == "abort"


def test_first_chunk_makes_an_event() -> None:
    """It shows that prefill is over."""
    parser = ChunkDecoder(Sampling(), "It")
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}
    assert [event.prompt_ids for event in parser.feed([first])] == [[1, 2]]


def test_usage_chunk_reports_cached_tokens() -> None:
    parser = ChunkDecoder(Sampling(), "It")
    assert parser.feed([chunk([7], [-0.5])])[0].cached_tokens is None
    events = parser.feed([chunk([8], [-0.5], finish="stop")])
    events += parser.feed([{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 5}}}]) + parser.end()
    assert [(event.cached_tokens, event.finish_reason) for event in events] == [(5, "stop")]


def test_choice_that_ends_early_does_not_wait_for_others() -> None:
    parser = ChunkDecoder(Sampling(n=2), "It")
    one = chunk([7], [-0.5], finish="stop")
    assert [event.finish_reason for event in parser.feed([one])] == ["stop"]
    with pytest.raises(EngineError, match="broke off"):
        parser.end()


@pytest.mark.parametrize(("code", "kind"), [(400, RequestError), (500, EngineError), (429, EngineError)])
def test_error_chunk_at_the_start(code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="no"):
        ChunkDecoder(Sampling(), "It").feed([{"error": {"message": "no", "code": code}}])


def test_error_chunk_in_the_middle_is_an_engine_error() -> None:
    parser = ChunkDecoder(Sampling(), "It")
    parser.feed([chunk([7], [-0.5])])
    with pytest.raises(EngineError):
        parser.feed([{"error": {"message": "no", "code": 400}}])


def test_skips_comments_and_other_fields() -> None:
    decoder = SseDecoder("http://x")
    assert decoder.feed(b': ping\n\nevent: x\ndata: {"a":\ndata: 1}\n\n') == [{"a": 1}]
    assert decoder.feed(b"data: [DONE]\n\n") == []
    assert decoder.done


def test_malformed_json_error_shows_the_data() -> None:
    with pytest.raises(EngineError, match="malformed JSON"):
        SseDecoder("http://x").feed(b'data: {"a": 1}\n\ndata: {"a": \n\n')


@pytest.mark.parametrize(
    ("changes", "enforced"),
    [
        ({}, True),
        ({"tools": (_BASH,)}, False),
        ({"tools": (_BASH,), "tool_choice": "auto"}, False),
        ({"tools": (_BASH,), "tool_choice": "required"}, False),
        ({"tools": (_BASH,), "tool_choice": "none"}, True),
    ],
)
def test_response_format_is_not_enforced_while_tools_may_be_called(changes: dict[str, Any], enforced: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    body = chat_body(ChatRequest("m", (Message("user", "hi"),), response_format=form, **changes), stream=True)
    assert body.get("response_format") == (form if enforced else None)
    assert ("tools" in body) == ("tools" in changes)


def test_chat_body_requests_ids_and_logprobs() -> None:
    request = ChatRequest("ignored", (Message("user", "hi"),), Sampling(n=2, stop=("x",), top_logprobs=3))
    body = chat_body(request, stream=True)
    assert orjson.loads(orjson.dumps(body)) == {
        "messages": [{"role": "user", "content": "hi"}],
        "n": 2,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 3,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_arguments_that_are_not_json_are_sent_as_a_json_string() -> None:
    """vLLM parses arguments, and a template prints a string as it is."""
    calls = tuple(ToolCall("c", "f", arguments) for arguments in ('{"a": 1}', '{"a": ', ""))
    body = chat_body(ChatRequest("m", (Message("assistant", None, tool_calls=calls),)), stream=False)
    sent = [call["function"]["arguments"] for call in body["messages"][0]["tool_calls"]]
    assert sent[0] == '{"a": 1}'
    assert [json.loads(arguments) for arguments in sent] == [{"a": 1}, '{"a": ', ""]


def test_text_body_requests_ids_and_logprobs() -> None:
    body = text_body(TextRequest("", (1, 2), Sampling(temperature=0.0)), stream=False)
    assert body == {"prompt": [1, 2], "temperature": 0.0, "logprobs": 0, "return_token_ids": True}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_ids_that_are_sent_twice_must_agree(count: int, chat: bool, logprobs: bool) -> None:
    def chunk(*named: int) -> dict[str, Any]:
        names = [f"token_id:{number}" for number in named]
        entries = [{"token": name, "logprob": -1.0, "bytes": None} for name in names]
        evidence: Any = {"content": entries} if chat else {"tokens": names, "token_logprobs": [-1.0] * count}
        ids = list(range(7, 7 + count))
        return {"choices": [{"index": 0, "text": "a", "token_ids": ids, "logprobs": evidence, "finish_reason": "stop"}]}

    agreeing = ChunkDecoder(Sampling(logprobs=logprobs), "It")
    agreeing.feed([chunk(*range(7, 7 + count))])
    (event,) = agreeing.end()
    assert event.token_ids == tuple(range(7, 7 + count))
    with pytest.raises(EngineError, match="two ids for one token"):
        ChunkDecoder(Sampling(logprobs=logprobs), "It").feed([chunk(*range(8, 8 + count))])
