"""A body rebuilt from its stored fields gives the same engine request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from polar_proxy.dialects import get_dialect, recorded_request
from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.base import Dialect, ParsedRequest, ReferencedCall
from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.errors import RequestError
from polar_proxy.types import CallRecord, ChatRequest, EngineRequest, Json, Message
from tests.dialects import hostile_json, test_anthropic_fuzz, test_google_fuzz, test_responses_fuzz
from tests.factories import call

pytestmark = pytest.mark.slow

DIALECTS: list[tuple[Dialect, st.SearchStrategy[Json]]] = [
    (OpenAIChat(), hostile_json.bodies()),
    (OpenAICompletions(), hostile_json.bodies()),
    (OpenAIResponses(), test_responses_fuzz.bodies()),
    (AnthropicMessages(), test_anthropic_fuzz.bodies),
    (GoogleGenerateContent("m"), test_google_fuzz.bodies),
]


def stored(dialect: Dialect, parsed: ParsedRequest) -> list[CallRecord]:
    """Return the records of a parsed body's calls."""
    fields = {"dialect": dialect.name, "tools": parsed.tools, "params": orjson.loads(orjson.dumps(parsed.params))}
    return [
        replace(call("call_1", 0.0, None), messages=messages, model=request.model, **fields)
        for request, messages in zip(parsed.requests, parsed.messages, strict=True)
    ]


def check(dialect: Dialect, body: Json) -> tuple[EngineRequest, ...]:
    parsed = dialect.parse(body)
    for request, record in zip(parsed.requests, stored(dialect, parsed), strict=True):
        assert recorded_request(record) == request
        again = dialect.parse(dialect.rebuild_body(record.messages, record.tools, record.params))
        assert again.messages == (record.messages,)
        assert (again.tools, again.params) == (record.tools, record.params)
    return parsed.requests


@pytest.mark.parametrize(("dialect", "bodies"), DIALECTS, ids=[dialect.name for dialect, _ in DIALECTS])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_accepted_body_can_be_rebuilt(
    dialect: Dialect, bodies: st.SearchStrategy[Json], data: st.DataObject
) -> None:
    try:
        body = orjson.loads(orjson.dumps(data.draw(bodies)))  # as on the wire, which has no NaN
        check(dialect, body)
    except (TypeError, RequestError):
        event("refused")
        return
    event("rebuilt")


_USER: Json = {"role": "user", "content": "hi"}
_SYSTEM: Json = {"role": "system", "content": "be exact"}
_CACHED = [{"type": "text", "text": "be exact", "cache_control": {"type": "ephemeral"}}]
_CLAUDE_TOOL = {"name": "bash", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="no system prompt"),
        pytest.param({"system": "be exact", "tools": [_CLAUDE_TOOL]}, id="system prompt and tools"),
        pytest.param({"system": _CACHED}, id="system blocks"),
        pytest.param({"system": ""}, id="empty system prompt"),
        pytest.param({"system": []}, id="system prompt without blocks"),
        pytest.param({"messages": [_SYSTEM, _USER]}, id="system message"),
        pytest.param({"messages": [_SYSTEM]}, id="system message alone"),
        pytest.param({"messages": [{"role": "system", "content": []}, _USER]}, id="empty system message"),
        pytest.param({"messages": [{"role": "system"}, _USER]}, id="system message without content"),
        pytest.param({"system": "x", "messages": [_SYSTEM, _USER]}, id="both"),
        pytest.param({"system": [], "messages": [_SYSTEM, _USER]}, id="empty and a system message"),
    ],
)
def test_anthropic_system_prompts(changes: Json) -> None:
    check(AnthropicMessages(), {"model": "m", "max_tokens": 5, "messages": [_USER], **changes})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="string"),
        pytest.param({"instructions": "be exact", "input": [{"type": "message", **_USER}]}, id="instructions"),
        pytest.param({"instructions": ""}, id="empty instructions"),
        pytest.param({"input": [{"type": "instructions"}, _USER]}, id="item of type instructions"),
        pytest.param(
            {"instructions": "x", "input": [{"type": "instructions"}, _USER]}, id="instructions and that item"
        ),
        pytest.param({"instructions": "x", "input": [_SYSTEM, _USER]}, id="instructions and a system message"),
    ],
)
def test_responses_instructions(changes: Json) -> None:
    check(OpenAIResponses(), {"model": "m", "input": "hi", **changes})


def test_continued_conversation_is_stored_whole() -> None:
    dialect = OpenAIResponses()
    first = dialect.parse({"model": "m", "instructions": "old", "input": "one"})
    answer = Message("assistant", "two", "hm")
    body = {"model": "m", "previous_response_id": "resp_1", "input": "three", "instructions": "new"}
    (request,) = check(
        dialect, dialect.write_out_references(body, {"call_1": ReferencedCall(first.messages[0], answer)})
    )
    assert isinstance(request, ChatRequest)
    assert [message.content for message in request.messages] == ["new", "one", "two", "three"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"systemInstruction": {"parts": [{"text": "be exact"}]}}, id="camel case"),
        pytest.param({"system_instruction": {"parts": {"text": "be exact"}}}, id="snake case"),
        pytest.param({"systemInstruction": {"parts": []}}, id="empty"),
        pytest.param({"contents": {"parts": {"text": "hi"}}}, id="one object for a list"),
        pytest.param({"tools": {"function_declarations": {"name": "bash"}}}, id="one tool"),
    ],
)
def test_google_system_instructions(changes: Json) -> None:
    check(GoogleGenerateContent("models/x"), {"contents": [test_google_fuzz.HI], **changes})


def test_each_prompt_of_a_list_is_a_call() -> None:
    for prompt in ("a", ["a", "b"], [1, 2], [[1], [2, 3]]):
        assert len(check(OpenAICompletions(), {"model": "m", "prompt": prompt, "n": 2})) in (1, 2)


@pytest.mark.parametrize("name", [dialect.name for dialect, _ in DIALECTS])
def test_get_dialect(name: str) -> None:
    assert get_dialect(name).name == name


@pytest.mark.parametrize(
    "changes",
    [
        {"dialect": "telegraph"},
        {"messages": (b"{",)},
        {"messages": (b"1",)},
        {"messages": ()},
        {"tools": b"1"},
        {"params": {"n": "many"}},
        {"dialect": "anthropic_messages", "messages": (b"{}", b"{}")},
        {"dialect": "openai_completions"},
        {"dialect": "openai_responses", "messages": (b"[]",)},
        {"dialect": "google_generate_content", "messages": (b"1",)},
    ],
)
def test_damaged_record_raises_request_error(changes: dict[str, Any]) -> None:
    user = (orjson.dumps(_USER), orjson.dumps(_USER))
    record = replace(call("call_1", 0.0, None), messages=user, params={"model": "m"})
    assert recorded_request(record)
    with pytest.raises(RequestError):
        recorded_request(replace(record, **changes))
