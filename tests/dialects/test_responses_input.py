"""Responses input items as messages: the items of an answer become one message, and no content is dropped."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest

from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.dialects.wire import seal, unseal
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Json, Message, ToolCall

USER: Json = {"role": "user", "content": "hi"}
HI = Message("user", "hi")
PNG = "data:image/png;base64,AAAA"


def messages(*items: Json, **fields: Any) -> tuple[Message, ...]:
    (request,) = OpenAIResponses().parse({"model": "m", "input": list(items), **fields}).requests
    assert isinstance(request, ChatRequest)
    return request.messages


def message_item(text: str, identity: str | None = None) -> Json:
    item: Json = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return item if identity is None else {**item, "id": identity}


def call_item(call_id: str, identity: str | None = None) -> Json:
    item: Json = {"type": "function_call", "call_id": call_id, "name": "bash", "arguments": "{}"}
    return item if identity is None else {**item, "id": identity}


def reasoning_item(text: str, **fields: Any) -> Json:
    return {"type": "reasoning", "summary": [], "encrypted_content": seal(text), **fields}


def output(call_id: str, value: Any = "ok") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def call(call_id: str) -> ToolCall:
    return ToolCall(call_id, "bash", "{}")


def test_messages_of_each_form() -> None:
    found = messages(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}], "id": "msg_6cc2-0"},
        {"type": "message", "role": "assistant", "content": "plain", "phase": "commentary"},
        {"type": "message", "role": "user", "content": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": None},
    )
    assert found == (
        Message("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        Message("user", "one"),
        Message("assistant", "plain"),
        Message("user", ""),
        Message("assistant", "no"),
        Message("user", ""),
    )


def test_first_system_messages_become_one() -> None:
    """Chat templates of open models have no developer role, and many have no second system message."""
    parts = [{"type": "input_text", "text": "two"}, {"type": "input_text", "text": "three"}]
    found = messages(
        {"role": "system", "content": "one"},
        {"role": "developer", "content": parts},
        USER,
        {"role": "developer", "content": "later"},
        instructions="zero",
    )
    assert found == (Message("system", "zero\n\none\n\ntwo\n\nthree"), HI, Message("system", "later"))


def test_images_and_files() -> None:
    content = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": PNG, "detail": "high", "file_id": None},
        {"type": "input_file", "file_data": "data:text/plain;base64,AA==", "filename": "a.txt"},
    ]
    (message,) = messages({"role": "user", "content": content})
    assert message.content == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,AA==", "filename": "a.txt"}},
    ]


def test_items_of_one_answer_are_one_message() -> None:
    found = messages(
        USER,
        reasoning_item("hm"),
        message_item("let me see"),
        call_item("c1"),
        call_item("c2"),
        output("c1"),
        output("c2"),
        message_item("done"),
    )
    assert found == (
        HI,
        Message("assistant", "let me see", "hm", (call("c1"), call("c2"))),
        Message("tool", "ok", tool_call_id="c1"),
        Message("tool", "ok", tool_call_id="c2"),
        Message("assistant", "done"),
    )


def test_polars_ids_separate_two_answers() -> None:
    """Codex keeps the items of a broken stream and retries: the next answer is separate."""
    found = messages(USER, message_item("a", "msg_1_0"), call_item("c1", "fc_2_0"), call_item("c2", "fc_3_0"))
    assert found[1:] == (
        Message("assistant", "a"),
        Message("assistant", None, None, (call("c1"),)),
        Message("assistant", None, None, (call("c2"),)),
    )


def test_polars_ids_join_one_answer() -> None:
    found = messages(
        USER,
        call_item("c1", "fc_1_0"),
        output("c1"),
        call_item("c2", "fc_1_1"),
        message_item("b", "msg_1_2"),
        output("c2"),
    )
    assert found[1] == Message("assistant", "b", None, (call("c1"), call("c2")))
    assert [message.role for message in found] == ["user", "assistant", "tool", "tool"]


def test_order_decides_without_ids() -> None:
    found = messages(
        USER,
        message_item("a"),
        message_item("b"),
        call_item("c1"),
        message_item("c"),
        reasoning_item("hm"),
        output("c1"),
        call_item("c2"),
    )
    assert found[1:] == (
        Message("assistant", "a"),
        Message("assistant", "bc", "hm", (call("c1"),)),
        Message("tool", "ok", tool_call_id="c1"),
        Message("assistant", None, None, (call("c2"),)),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        (None, ""),
        ([{"type": "input_text", "text": "a"}], "a"),
        (
            [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG}],
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PNG}}],
        ),
        ({"content": "x", "ok": True}, '{"content":"x","ok":true}'),
        ([{"stdout": "a", "stderr": ""}], '[{"stdout":"a","stderr":""}]'),
    ],
)
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output", "shell_call_output"])
def test_tool_outputs(kind: str, value: Any, expected: Any) -> None:
    found = messages(USER, call_item("c1"), {"type": kind, "call_id": "c1", "output": value, "id": "fco_1"})
    assert found[2] == Message("tool", expected, tool_call_id="c1")


def test_outputs_of_built_in_tools() -> None:
    found = messages(
        USER,
        {"type": "local_shell_call_output", "id": "c1", "output": '{"stdout":""}'},
        {"type": "apply_patch_call_output", "call_id": "c2", "status": "failed", "output": None},
    )
    assert found[1:] == (
        Message("tool", '{"stdout":""}', tool_call_id="c1"),
        Message("tool", "failed", tool_call_id="c2"),
    )


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (reasoning_item("hm\n"), "hm\n"),
        (reasoning_item("hm", content=None), "hm"),
        ({"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}, "hm"),
        ({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []}, "hm"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABfromelsewhere"}, None),
        ({"type": "reasoning", "summary": [], "encrypted_content": "polar1.broken"}, None),
        ({"type": "reasoning"}, None),
    ],
)
def test_reasoning(item: Json, expected: str | None) -> None:
    assert messages(USER, item, message_item("a")) == (HI, Message("assistant", "a", expected))


def test_seal_round_trip() -> None:
    assert unseal(seal("é\n" * 1000)) == "é\n" * 1000
    assert len(seal("é\n" * 1000)) < 200
    bomb = base64.b64encode(b"polar1." + zlib.compress(bytes((64 << 20) + 1))).decode()
    assert unseal(bomb) is None


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "t"}]},
        {"type": "context_compaction", "encrypted_content": None},
        {"type": "ghost_snapshot", "commit": "abc"},
    ],
)
def test_ignored_items_are_stored(item: Json) -> None:
    assert messages(USER, item) == (HI,)
    parsed = OpenAIResponses().parse({"model": "m", "input": [USER, item]})
    assert json.loads(parsed.messages[0][1]) == item


def test_reference_needs_its_item() -> None:
    reference = {"type": "item_reference", "id": "msg_1_0"}
    assert messages(USER, message_item("a", "msg_1_0"), reference) == (HI, Message("assistant", "a"))
    with pytest.raises(RequestError) as caught:
        messages(USER, reference)
    assert (caught.value.status, caught.value.param) == (404, "input")


def test_compaction_of_another_provider_is_refused() -> None:
    assert messages({"type": "compaction", "encrypted_content": seal("summary")}, USER)[0] == Message("user", "summary")
    with pytest.raises(RequestError, match=r"input\[0\]"):
        messages({"type": "compaction", "encrypted_content": "gAAAA"}, USER)


def test_arguments_become_a_string() -> None:
    for arguments, expected in ((None, ""), ({"a": 1}, '{"a":1}'), ("not json", "not json")):
        (_, message) = messages(USER, {**call_item("c1"), "arguments": arguments})
        assert message.tool_calls[0].arguments == expected


WRONG: list[tuple[Json, str]] = [
    *(({"type": "message", "role": role}, "input[1].role") for role in (None, "king", "tool", 1, [])),
    *(({"role": "user", "content": value}, "input[1].content") for value in (1, True, {})),
    *(
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}, part]}, "input[1].content[1]")
        for part in (None, "x", {}, {"type": 1}, {"type": "hologram"}, {"type": "input_image", "file_id": "f"})
    ),
    ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
    ({"role": "assistant", "content": [{"type": "input_image", "image_url": PNG}]}, "input[1].content"),
    ({"type": "function_call", "arguments": "{}"}, "input[1].name"),
    ({"type": "function_call", "name": "a", "namespace": 1}, "input[1].namespace"),
    ({"type": "custom_tool_call", "name": "a", "input": {}}, "input[1].input"),
    ({"type": "local_shell_call", "action": None}, "input[1].action"),
    ({"type": "function_call_output", "output": [{"type": "hologram"}]}, "input[1].output[0]"),
    ({"type": "reasoning", "summary": "x", "content": 1}, "input[1].content"),
    ({"type": 1}, "input[1].type"),
    ({"type": ["message"]}, "input[1].type"),
    ({"type": "additional_tools", "tools": {}}, "input[1].tools"),
    ({"type": "additional_tools", "tools": [{}]}, "input[1].tools[0]"),
    ({"type": "compaction_trigger"}, "input[1]"),
    ({"type": "image_generation_call", "result": "AAAA"}, "input[1]"),
    ({"type": "computer_call_output", "output": {"type": "computer_screenshot"}}, "input[1]"),
    ({"type": "not yet invented", "content": [{"type": "text", "text": "x"}]}, "input[1]"),
    ({}, "input[1]"),
    ({"text": "x"}, "input[1]"),
]


@pytest.mark.parametrize(("item", "param"), WRONG, ids=[f"{param}-{i}" for i, (_, param) in enumerate(WRONG)])
def test_error_names_the_wrong_item(item: Json, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages(USER, item)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in str(caught.value)
