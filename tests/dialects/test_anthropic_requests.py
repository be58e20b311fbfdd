"""Anthropic requests as engine requests: messages, tools, settings."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.wire import seal
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, ToolCall

DIALECT = AnthropicMessages()
USER: Json = {"role": "user", "content": "hi"}
BASH: Json = {"name": "bash", "description": "Runs it.", "input_schema": {"type": "object"}}
FETCH: Json = {"name": "fetch", "input_schema": {"type": "object"}, "defer_loading": True}


def parse(**fields: Any) -> ChatRequest:
    (request,) = DIALECT.parse({"model": "m", "max_tokens": 9, "messages": [USER], **fields}).requests
    assert isinstance(request, ChatRequest)
    return request


def messages(*raw: Json, **fields: Any) -> tuple[Message, ...]:
    """Return the messages parsed from `raw`, without a user message added at the end."""
    return parse(messages=[*raw, USER], **fields).messages[:-1]


def user(*blocks: Json) -> tuple[Message, ...]:
    return messages({"role": "user", "content": list(blocks)})


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


@pytest.mark.parametrize("mark", [{}, {"cache_control": {"type": "ephemeral"}}])
def test_a_string_and_a_block_are_the_same_message(mark: Json) -> None:
    assert user(text("hi", **mark)) == messages(USER) == (Message("user", "hi"),)


def test_system_as_string_or_blocks() -> None:
    assert parse(system="Be brief.").messages[0] == Message("system", "Be brief.")
    assert parse(system=[text("Be brief.")]).messages[0] == Message("system", "Be brief.")
    two = parse(system=[text("a", cache_control={"type": "ephemeral"}), text("b")]).messages[0]
    assert two == Message("system", [text("a"), text("b")])
    assert [message.role for message in parse(system="").messages] == ["user"]


def test_system_message_keeps_its_place() -> None:
    found = messages(
        USER, {"role": "system", "content": [text("Mind the gap.")]}, {"role": "assistant", "content": "ok"}
    )
    assert found == (Message("user", "hi"), Message("system", "Mind the gap."), Message("assistant", "ok"))


def test_tool_results_come_first_and_in_order() -> None:
    found = user(
        text("a"),
        {"type": "tool_result", "tool_use_id": "t2", "content": "two"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("one"), text("more")]},
        {"type": "tool_result", "tool_use_id": "t0"},
        text("b"),
    )
    assert found == (
        Message("tool", "two", tool_call_id="t2"),
        Message("tool", [text("one"), text("more")], tool_call_id="t1"),
        Message("tool", "", tool_call_id="t0"),
        Message("user", [text("a"), text("b")]),
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("no such file", "Error: no such file"),
        ("Error: no such file", "Error: no such file"),
        ([text("no")], "Error: no"),
        (None, "Error"),
        ("", "Error"),
    ],
)
def test_tool_error_is_marked_in_the_text(content: Any, expected: str) -> None:
    (found,) = user({"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True})
    assert found.content == expected


def test_assistant_message() -> None:
    turn: Json = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "of another provider"},
            text("I "),
            text("look."),
            {"type": "tool_use", "id": "t", "name": "bash", "input": {"b": [1, 2.5], "a": "é"}},
        ],
    }
    call = ToolCall("t", "bash", '{"b":[1,2.5],"a":"é"}')
    assert messages(turn) == (Message("assistant", "I look.", "hm", (call,)),)


def test_consecutive_assistant_messages_are_one() -> None:
    use: Json = {"type": "tool_use", "id": "t", "name": "bash", "input": {}}
    raw = [{"role": "assistant", "content": [block]} for block in (text("a"), use)]
    assert messages(*raw) == (Message("assistant", "a", None, (ToolCall("t", "bash", "{}"),)),)


@pytest.mark.parametrize(
    ("block", "reasoning"),
    [
        ({"type": "thinking", "thinking": "shown", "signature": seal("shown")}, "shown"),
        ({"type": "thinking", "thinking": "changed", "signature": seal("sampled")}, "changed"),
        ({"type": "thinking", "thinking": "", "signature": seal("sampled")}, "sampled"),
        ({"type": "thinking", "thinking": "", "signature": "EqQBCkgIARABGAI="}, None),
        ({"type": "redacted_thinking", "data": seal("sampled")}, "sampled"),
        ({"type": "redacted_thinking", "data": "EqQBCkgIARABGAI="}, None),
    ],
)
def test_reasoning_is_restored(block: Json, reasoning: str | None) -> None:
    (found,) = messages({"role": "assistant", "content": [block, text("x")]})
    assert (found.content, found.reasoning) == ("x", reasoning)


def test_images_and_documents() -> None:
    (found,) = user(
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "body"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}},
        {"type": "search_result", "title": "R", "source": "https://example.com", "content": [text("found")]},
    )
    assert found.content == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        text("title: T"),
        text("body"),
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBE"}},
        text("R\nhttps://example.com"),
        text("found"),
    ]


def test_image_inside_a_tool_result() -> None:
    image: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    (found,) = user({"type": "tool_result", "tool_use_id": "t", "content": [text("see"), image]})
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert found == Message("tool", [text("see"), part], tool_call_id="t")


def test_server_tool_is_a_call_and_a_result() -> None:
    turn: Json = {
        "role": "assistant",
        "content": [
            text("Searching."),
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "hit", "url": "u"}]},
            text("Found."),
        ],
    }
    assert messages(turn) == (
        Message("assistant", "Searching.", None, (ToolCall("s1", "web_search", '{"query":"x"}'),)),
        Message("tool", '{"type":"hit","url":"u"}', tool_call_id="s1"),
        Message("assistant", "Found."),
    )


def test_unknown_blocks_are_shown_without_cache_control() -> None:
    assert user({"type": "new_thing", "a": 1, "cache_control": {"type": "ephemeral"}})[0].content == (
        '{"type":"new_thing","a":1}'
    )
    assert user({"type": "container_upload", "file_id": "f"}, text("x"))[0].content == "x"
    assert messages(
        {"role": "assistant", "content": [{"type": "compaction", "content": "So far: ..."}, text("ok")]}
    ) == (Message("assistant", "So far: ...ok"),)


# Tools


def test_offers_the_clients_tools() -> None:
    request = parse(tools=[BASH, {"type": "custom", **FETCH, "defer_loading": False}, {"type": "web_search_20250305"}])
    assert request.tools == (
        {
            "type": "function",
            "function": {"name": "bash", "description": "Runs it.", "parameters": {"type": "object"}},
        },
        {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}},
    )


def test_refuses_two_tools_of_one_name() -> None:
    with pytest.raises(RequestError, match="Tool names must be unique"):
        parse(tools=[BASH, {**FETCH, "name": BASH["name"]}])


REFERENCE: Json = {
    "type": "tool_result",
    "tool_use_id": "t",
    "content": [{"type": "tool_reference", "tool_name": "fetch"}, {"type": "tool_reference", "tool_name": "gone"}],
}
LOADED = '<functions>\n<function>{"name":"fetch","parameters":{"type":"object"}}</function>\n</functions>'


def test_deferred_tool_is_shown_where_it_is_loaded() -> None:
    """It is not added at the top, so the prompt before the result does not change."""
    before = parse(tools=[BASH], messages=[USER])
    after = parse(tools=[BASH, FETCH], messages=[USER, {"role": "user", "content": [REFERENCE]}])
    assert after.tools == before.tools
    assert after.messages[:1] == before.messages
    assert after.messages[1].content == LOADED + "\nTool gone is not available."


def test_tool_addition_and_removal_inside_a_message() -> None:
    tool: Json = {"type": "tool_reference", "name": "fetch"}
    added: Json = {"type": "tool_addition", "tool": tool}
    inline: Json = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": {"name": "x", "input_schema": {}}},
    }
    raw: Json = {"role": "system", "content": [added, inline, {"type": "tool_removal", "tool": tool}]}
    (_, found, _) = parse(tools=[FETCH], messages=[USER, raw, USER]).messages
    assert found.content == [
        text(LOADED),
        text('<functions>\n<function>{"name":"x","parameters":{}}</function>\n</functions>'),
        text("The tool fetch is no longer available."),
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any"}, ("required", None)),
        ({"type": "none"}, ("none", None)),
        (
            {"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
            ({"type": "function", "function": {"name": "bash"}}, False),
        ),
        (None, (None, None)),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[Any, bool | None]) -> None:
    request = parse(tools=[BASH], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == expected


def test_forced_deferred_tool_is_offered() -> None:
    request = parse(tools=[FETCH], tool_choice={"type": "tool", "name": "fetch"})
    assert [tool["function"]["name"] for tool in request.tools] == ["fetch"]


# Settings


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        ({"type": "enabled", "budget_tokens": 8192}, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        (None, {}),
    ],
)
def test_thinking(thinking: Any, kwargs: Json) -> None:
    assert parse(thinking=thinking).template_kwargs == kwargs


def test_unused_fields_are_tolerated_and_stored() -> None:
    extra: Json = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "container": "c",
        "mcp_servers": [{"type": "url"}],
        "output_config": {"effort": "high"},
        "speed": "fast",
        "betas": ["x"],
    }
    parsed = DIALECT.parse({"model": "m", "max_tokens": 9, "messages": [USER], **extra})
    assert parsed.params == {"model": "m", "max_tokens": 9, **extra}


def test_stores_the_raw_conversation() -> None:
    system = [text("Be brief.", cache_control={"type": "ephemeral"})]
    parsed = DIALECT.parse({"model": "m", "max_tokens": 9, "system": system, "messages": [USER], "tools": [BASH]})
    assert [orjson.loads(item) for item in parsed.messages[0]] == [{"role": "system", "content": system}, USER]
    assert parsed.tools == orjson.dumps([BASH])


def test_claude_code_requests_extend_each_other() -> None:
    """Claude Code moves its cache marks and changes a block to a string. The parsed messages stay the same."""
    mark = {"cache_control": {"type": "ephemeral"}}
    result: Json = {"type": "tool_result", "tool_use_id": "t", "content": "ok"}
    use: Json = {"type": "tool_use", "id": "t", "name": "bash", "input": {"a": 1}}
    first = parse(messages=[{"role": "user", "content": [text("hi", **mark)]}]).messages
    later: list[Json] = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{**result, **mark}]},
    ]
    second = parse(messages=later).messages
    third = parse(messages=[*later[:2], {"role": "user", "content": [result]}, USER]).messages
    assert second[:1] == first
    assert third[:3] == second


def test_token_count_parses_the_same_conversation() -> None:
    body: Json = {
        "model": "m",
        "system": "s",
        "messages": [USER, {"role": "assistant", "content": "Sure,"}],
        "tools": [BASH],
    }
    request = AnthropicMessages().parse_count(body)
    assert [message.role for message in request.messages] == ["system", "user", "assistant"]
    assert len(request.tools) == 1
    assert AnthropicMessages().count_body(7) == b'{"input_tokens":7}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "b", "input": "x"}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": 1}, "system"),
        ({"system": [{"type": "text", "text": None}]}, "system[0].text"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}, "tools": [BASH]}, "tool_choice"),
        ({"thinking": "on"}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_error_names_the_field(fields: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
