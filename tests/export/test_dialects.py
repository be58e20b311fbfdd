"""Datasets have OpenAI messages and tools, whatever dialect the agent spoke."""

from __future__ import annotations

import orjson
import pytest

from polar_proxy.dialects import recorded_request
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.export.conversations import ConversationReader, conversation
from polar_proxy.export.datasets import DATASET_FORMATS, SessionExport
from polar_proxy.store import json_codec
from polar_proxy.traces.builders import build
from polar_proxy.types import CallRecord, ChatRequest, Json
from tests.export.dialect_requests import BODIES, recorded

CHAT = BODIES["openai_chat"]


def row(form: str, call: CallRecord) -> Json:
    built = build([call])
    (made,) = DATASET_FORMATS[form](SessionExport({}, [call], built.traces, built.excluded))
    read: Json = orjson.loads(json_codec.dumps_object(made))
    return read


@pytest.mark.parametrize("name", BODIES)
def test_every_dialect_gives_the_same_conversation(name: str) -> None:
    call = recorded(name)
    made = row("chat-jsonl", call)
    messages = list(CHAT["messages"])
    if name == "google_generate_content":  # its results name their function
        messages[3] = {**messages[3], "name": "bash"}
    assert made["messages"] == [*messages, call.choices[0].message.to_openai()]
    assert made["tools"] == CHAT["tools"]
    assert "unparsed" not in made
    (listed,) = row("jsonl", call)["calls"]
    assert (listed["messages"], listed["tools"]) == (messages, CHAT["tools"])


@pytest.mark.parametrize("name", BODIES)
def test_exported_conversation_is_a_valid_request(name: str) -> None:
    """The exported body of Chat Completions gives the engine the same request."""
    call = recorded(name)
    request, exported = recorded_request(call), conversation(call)
    assert isinstance(request, ChatRequest)
    (parsed,) = OpenAIChat().parse({"model": "m", **exported}).requests
    assert isinstance(parsed, ChatRequest)
    assert (parsed.messages, parsed.tools) == (request.messages, request.tools)


@pytest.mark.parametrize("prompt", ["Once", [1, 2, 3]])
def test_raw_prompt_has_the_role_prompt(prompt: str | list[int]) -> None:
    call = recorded("openai_completions", {"model": "m", "prompt": prompt})
    made = row("chat-jsonl", call)
    assert made["messages"] == [{"role": "prompt", "content": prompt}, call.choices[0].message.to_openai()]
    assert "tools" not in made


def test_unreadable_request_is_written_raw_with_the_reason() -> None:
    broken = {"role": "unknown role"}
    call = recorded("openai_chat", messages=(orjson.dumps(broken), b"{"))
    made = row("chat-jsonl", call)
    assert made["messages"] == [broken, "{", call.choices[0].message.to_openai()]
    assert made["tools"] == CHAT["tools"]
    assert "damaged" in made["unparsed"]
    assert "messages[0].role" in row("chat-jsonl", recorded("openai_chat", messages=call.messages[:1]))["unparsed"]
    assert "unparsed" in row("jsonl", call)["calls"][0]
    assert "telegraph" in row("chat-jsonl", recorded("openai_chat", dialect="telegraph"))["unparsed"]


@pytest.mark.parametrize("name", BODIES)
def test_reader_of_a_session_equals_the_reading_of_each_call(name: str) -> None:
    """Later calls repeat messages of earlier ones, which are then not parsed again."""
    call = recorded(name)
    shorter = recorded(name, messages=call.messages[:2])
    reader = ConversationReader()
    for one in (shorter, call, recorded("openai_completions", {"model": "m", "prompt": "Once"}), call, shorter):
        assert reader.read(one) == conversation(one)
