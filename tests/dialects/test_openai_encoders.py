"""The encoders of Chat Completions and Completions: the stream equals the response."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_proxy.dialects.base import Answer, Dialect
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.types import Json, SampleEvent, ToolDelta, TopLogprob
from tests.dialects.encoding import encode, gather

pytestmark = pytest.mark.slow

BODY: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = (7, 8, 9)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def choices(draw: st.DrawFn, index: int) -> list[SampleEvent]:
    """Return the events of one choice: tokens, text, reasoning and tool calls, cut at random."""
    events: list[SampleEvent] = []
    for reasoning in draw(st.lists(texts, max_size=2)):
        events.append(SampleEvent(index, reasoning=reasoning))
    for text in draw(st.lists(texts, max_size=4)):
        events.append(SampleEvent(index, text=text))
    for number in range(draw(st.integers(0, 2))):
        pieces = draw(st.lists(texts, min_size=1, max_size=3))
        first = ToolDelta(number, f"c{index}{number}", f"tool{number}", pieces[0])
        events.append(SampleEvent(index, tool_calls=(first,)))
        events += [SampleEvent(index, tool_calls=(ToolDelta(number, arguments=piece),)) for piece in pieces[1:]]
    for token in draw(st.lists(st.integers(0, 999), min_size=1, max_size=6)):
        events.append(
            SampleEvent(
                index,
                token_ids=(token,),
                logprobs=(-token / 8,),
                tokens=(f"t{token}",),
                top=((TopLogprob(token, f"t{token}", -token / 8),),),
            )
        )
    reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    return [*events, SampleEvent(index, finish_reason=reason)]


@st.composite
def answers(draw: st.DrawFn, *, n: int) -> list[SampleEvent]:
    """Return the events of n choices, mixed; the first one has the prompt."""
    queues = [draw(choices(index)) for index in range(n)]
    mixed: list[SampleEvent] = [SampleEvent(0, prompt_ids=PROMPT, cached_tokens=2)]
    while any(queues):
        queue = queues[draw(st.integers(0, n - 1))]
        if queue:
            mixed.append(queue.pop(0))
    return mixed


def both_forms(dialect: Dialect, body: Json, events: list[SampleEvent]) -> tuple[list[Json], Json]:
    """Return (the chunks of the stream, the response)."""
    encoded = encode(dialect, body, events)
    lines = encoded.stream.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    return chunks, encoded.response


def assembled(chunks: list[Json]) -> dict[int, Json]:
    """Return the choices that a client assembles from chat chunks."""
    out: dict[int, Json] = {}
    calls: dict[int, dict[int, Json]] = defaultdict(dict)
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta, index = choice["delta"], choice["index"]
            assert (index in out) != (delta.get("role") == "assistant")  # the role comes once, with the first chunk
            now = out.setdefault(
                index,
                {"content": "", "reasoning": "", "finish_reason": None, "token_ids": [], "logprobs": []},
            )
            assert now["finish_reason"] is None  # no chunk after the last one
            now["content"] += delta.get("content", "")
            now["reasoning"] += delta.get("reasoning_content", "")
            now["finish_reason"] = choice["finish_reason"]
            now["token_ids"] += choice.get("token_ids", [])
            now["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            for piece in delta.get("tool_calls", []):
                call = calls[index].get(piece["index"])
                if call is None:
                    call = calls[index][piece["index"]] = {
                        "id": piece["id"],
                        "type": piece["type"],
                        "function": {"name": piece["function"]["name"], "arguments": ""},
                    }
                call["function"]["arguments"] += piece["function"]["arguments"]
    for index, streamed in calls.items():
        out[index]["tool_calls"] = [streamed[number] for number in sorted(streamed)]
    return out


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.integers(1, 3).flatmap(lambda n: answers(n=n)), usage=st.booleans())
def test_chat_stream_equals_response(events: list[SampleEvent], usage: bool) -> None:
    options = {
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "stream_options": {"include_usage": usage},
    }
    chunks, response = both_forms(OpenAIChat(), {**BODY, **options, "stream": True, "n": 3}, events)
    if usage:
        assert chunks[-1]["choices"] == []
        assert chunks.pop()["usage"] == response["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    found = assembled(chunks)
    assert sorted(found) == [choice["index"] for choice in response["choices"]]
    for choice in response["choices"]:
        streamed, message = found[choice["index"]], choice["message"]
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning"] == message.get("reasoning_content", "")
        assert streamed.get("tool_calls", []) == message.get("tool_calls", [])
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["token_ids"] == choice["token_ids"]
        assert streamed["logprobs"] == choice["logprobs"]["content"]
    assert chunks[0]["prompt_token_ids"] == response["prompt_token_ids"] == list(PROMPT)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.integers(1, 2).flatmap(lambda n: answers(n=n)))
def test_completions_stream_equals_response(events: list[SampleEvent]) -> None:
    body = {"model": "m", "prompt": "hi", "stream": True, "logprobs": 1, "return_token_ids": True, "n": 2}
    chunks, response = both_forms(OpenAICompletions(), body, events)
    for choice in response["choices"]:
        streamed = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in streamed) == choice["text"]
        assert [token for c in streamed for token in c.get("token_ids", [])] == choice["token_ids"]
        assert streamed[-1]["finish_reason"] == choice["finish_reason"]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            pieces: list[Any] = [piece for c in streamed if c["logprobs"] for piece in c["logprobs"][field]]
            assert pieces == choice["logprobs"][field]


TOKEN = SampleEvent(text="hé", token_ids=(5,), logprobs=(-0.5,), tokens=("hé",), prompt_ids=PROMPT, cached_tokens=2)
END = SampleEvent(token_ids=(2,), logprobs=(-0.25,), tokens=("",), finish_reason="stop")


def test_tokens_are_sent_on_request_only() -> None:
    chunks, response = both_forms(OpenAIChat(), BODY, [TOKEN, END])
    choice = response["choices"][0]
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in response
    assert all("token_ids" not in c and c["logprobs"] is None for chunk in chunks for c in chunk["choices"])


def test_response() -> None:
    _, response = both_forms(OpenAIChat(), {**BODY, "logprobs": True}, [TOKEN, END])
    assert response == {
        "id": "chatcmpl-call_1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hé", "refusal": None},
                "logprobs": {
                    "content": [
                        {"token": "hé", "logprob": -0.5, "bytes": [104, 195, 169], "top_logprobs": []},
                        {"token": "", "logprob": -0.25, "bytes": [], "top_logprobs": []},
                    ],
                    "refusal": None,
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_finish_reason_is_sent_after_the_commit_only() -> None:
    """`feed` must hold the finish reason back."""
    for dialect, body in ((OpenAIChat(), BODY), (OpenAICompletions(), {"model": "m", "prompt": "hi"})):
        encoder = dialect.parse(body).encoder("call_1", 1)
        fed = encoder.feed(0, TOKEN) + encoder.feed(0, END)
        assert b'"stop"' not in fed
        assert b"[DONE]" not in fed


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parallel_calls_in_any_order(order: tuple[int, int]) -> None:
    deltas = (ToolDelta(0, "c0", "bash", '{"a":'), ToolDelta(1, "c1", "python", "{}"))
    last = SampleEvent(tool_calls=(ToolDelta(0, arguments="1}"),), finish_reason="tool_calls")
    answer = gather([*(SampleEvent(tool_calls=(deltas[number],)) for number in order), last])
    assert [(c.id, c.name, c.arguments) for c in answer.choices[0].tool_calls] == [
        ("c0", "bash", '{"a":1}'),
        ("c1", "python", "{}"),
    ]


def test_choice_index_counts_through_the_prompts() -> None:
    dialect = OpenAICompletions()
    parsed = dialect.parse({"model": "m", "prompt": ["a", "b"], "n": 2})
    answers = [Answer(), Answer()]
    encoder = parsed.encoder("call_1", 1)
    written = b""
    for number, answer in enumerate(answers):
        for index in range(2):
            event = SampleEvent(index, text=f"{number}{index}", prompt_ids=PROMPT, finish_reason="stop")
            answer.add(event)
            written += encoder.feed(number, event)
    response = json.loads(encoder.respond(answers))
    assert [(c["index"], c["text"]) for c in response["choices"]] == [(0, "00"), (1, "01"), (2, "10"), (3, "11")]
    streamed = [json.loads(line[6:])["choices"][0] for line in written.decode().split("\n\n")[:-1]]
    assert [(c["index"], c["text"]) for c in streamed] == [(c["index"], c["text"]) for c in response["choices"]]
    assert response["usage"]["prompt_tokens"] == 2 * len(PROMPT)


def test_tokens_of_reasoning_are_counted() -> None:
    thought = SampleEvent(reasoning="hm", token_ids=(1, 2), logprobs=(-1.0, -1.0), prompt_ids=PROMPT)
    chunks, response = both_forms(
        OpenAIChat(), {**BODY, "stream": True, "stream_options": {"include_usage": True}}, [thought, END]
    )
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert chunks[-1]["usage"] == response["usage"]
