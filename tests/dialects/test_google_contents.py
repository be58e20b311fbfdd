"""Google's contents as messages."""

from __future__ import annotations

import pytest

from polar_proxy.dialects.google.contents import SignedReasoning, encode_signature
from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.errors import RequestError
from polar_proxy.types import Json
from tests.dialects.google_helpers import HI, conversation, parse


def user(*parts: Json) -> Json:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Json) -> Json:
    return {"role": "model", "parts": list(parts)}


def call(name: str = "bash", call_id: str | None = None, **args: object) -> Json:
    made: Json = {"name": name, "args": args}
    return {"functionCall": {**made, "id": call_id} if call_id else made}


def result(text: str, name: str = "bash", call_id: str | None = None) -> Json:
    made: Json = {"name": name, "response": {"output": text}}
    return {"functionResponse": {**made, "id": call_id} if call_id else made}


def results(*contents: Json) -> list[tuple[str, object]]:
    """Return (call id, text) of each tool message."""
    return [(m["tool_call_id"], m["content"]) for m in conversation(*contents) if m["role"] == "tool"]


@pytest.mark.parametrize("key", ["systemInstruction", "system_instruction"])
@pytest.mark.parametrize(
    "value", ["be exact", {"parts": [{"text": "be exact"}], "role": "user"}, {"parts": {"text": "be exact"}}]
)
def test_system_instruction_comes_first(key: str, value: object) -> None:
    messages = parse({"contents": [HI], key: value}).messages
    assert [(m.role, m.content) for m in messages] == [("system", "be exact"), ("user", "hi")]


def test_one_object_is_a_list_of_one() -> None:
    assert parse({"contents": {"parts": {"text": "hi"}}}).messages == parse({"contents": [HI]}).messages


def test_default_role_is_user() -> None:
    assert conversation({"parts": [{"text": "hi"}]}) == [{"role": "user", "content": "hi"}]


def test_consecutive_model_contents_are_one_message() -> None:
    """An SDK's chat stores each chunk of a streamed answer as a content."""
    pieces = [model({"text": piece}) for piece in ("hel", "lo", "")]
    assert conversation(HI, *pieces, {"role": "model"}, HI)[1:-1] == [{"role": "assistant", "content": "hello"}]


def test_images_and_files() -> None:
    (message,) = conversation(
        user(
            {"text": "look"},
            {"inlineData": {"mimeType": "image/png", "data": "-_8="}},
            {"fileData": {"fileUri": "gs://a/b.mp4", "mimeType": "video/mp4"}},
            {"inline_data": {"mime_type": "application/pdf", "data": "AA=="}},
        )
    )
    assert message["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,+/8="}},
        {"type": "video_url", "video_url": {"url": "gs://a/b.mp4"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}},
    ]


def test_code_parts_are_text() -> None:
    code = {"executableCode": {"language": "PYTHON", "code": "1"}}
    messages = conversation(HI, model(code, {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}}))
    assert messages[1]["content"] == "```python\n1\n```" + "```\n1\n```"


def test_calls_and_results_with_ids_in_any_order() -> None:
    calls = model(call(call_id="a", x=1), call(call_id="b", x=2))
    assert results(HI, calls, user(result("two", call_id="b"), result("one", call_id="a"))) == [
        ("b", "two"),
        ("a", "one"),
    ]


def test_calls_and_results_without_ids_match_by_name_and_order() -> None:
    calls = model(call(x=1), call("python"), call(x=2))
    messages = conversation(HI, calls, user(result("p", "python"), result("1"), result("2")))
    ids = [made["id"] for made in messages[1]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [(m["tool_call_id"], m["content"]) for m in messages[2:]] == [(ids[1], "p"), (ids[0], "1"), (ids[2], "2")]


def test_generated_ids_are_stable_as_the_history_grows() -> None:
    turns = [HI, model(call()), user(result("1")), model(call()), user(result("2"))]
    assert conversation(*turns)[: len(conversation(*turns[:3]))] == conversation(*turns[:3])


def test_id_on_one_side_only() -> None:
    first = conversation(HI, model(call()), user(result("1", call_id="mine")))
    assert first[2]["tool_call_id"] == first[1]["tool_calls"][0]["id"]
    assert results(HI, model(call(call_id="a")), user(result("1"))) == [("a", "1")]


def test_drops_gemini_clis_prefix_of_call_ids() -> None:
    messages = conversation(HI, model(call(call_id="bash__call_7")), user(result("1", call_id="bash__call_7")))
    assert messages[1]["tool_calls"][0]["id"] == "call_7"
    assert messages[2]["tool_call_id"] == "call_7"


@pytest.mark.parametrize("call_id", ["a", None])
def test_repeated_result_is_one_message(call_id: str | None) -> None:
    answer = result("1", call_id=call_id)
    once = conversation(HI, model(call(call_id=call_id)), user(answer))
    assert conversation(HI, model(call(call_id=call_id)), user(answer, answer)) == once
    assert conversation(HI, model(call(call_id=call_id)), user(answer), user(answer)) == once


def test_result_repeated_turns_later_is_one_message() -> None:
    answer = result("1", call_id="a")
    contents = [HI, model(call(call_id="a")), user(answer), model({"text": "done"}), user(answer, {"text": "go on"})]
    assert [m["role"] for m in conversation(*contents)] == ["user", "assistant", "tool", "assistant", "user"]


def test_second_result_with_other_text_is_kept() -> None:
    contents = (HI, model(call(call_id="a")), user(result("1", call_id="a"), result("2", call_id="a")))
    assert results(*contents) == [("a", "1"), ("a", "2")]


def test_two_calls_with_equal_results_are_both_answered() -> None:
    assert [text for _, text in results(HI, model(call(), call()), user(result("1"), result("1")))] == ["1", "1"]


def test_id_reused_in_a_later_turn_answers_that_turn() -> None:
    turn = (model(call(call_id="a")), user(result("1", call_id="a")))
    assert results(HI, *turn, *turn) == [("a", "1"), ("a", "1")]


def test_results_directly_follow_the_calls() -> None:
    messages = conversation(HI, model(call(call_id="a")), user({"text": "note"}, result("1", call_id="a")))
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "plain"}, "plain"),
        ({"result": "plain"}, "plain"),
        ({"error": "no such file"}, '{"error":"no such file"}'),
        ({"result": 3}, '{"result":3}'),
        ({"output": "a", "exit": 1}, '{"output":"a","exit":1}'),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_text_of_a_result(response: Json | None, text: str) -> None:
    part = {"functionResponse": {"name": "bash", "id": "a", "response": response}}
    assert results(HI, model(call(call_id="a")), user(part)) == [("a", text)]


def test_result_with_an_image() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
    part = {"functionResponse": {"name": "bash", "id": "a", "response": {"output": "see"}, "parts": [image]}}
    ((_, content),) = results(HI, model(call(call_id="a")), user(part))
    assert content == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]


def reasoning(*parts: Json) -> object:
    return conversation(HI, model(*parts), HI)[1].get("reasoning_content")


def test_reasoning_is_restored_from_signatures() -> None:
    signature = encode_signature(SignedReasoning(0, "so be it"))
    assert reasoning({"text": "x", "thoughtSignature": signature}) == "so be it"
    assert reasoning({"text": "shortened", "thought": True}, {"text": "x", "thoughtSignature": signature}) == "so be it"
    first, second = encode_signature(SignedReasoning(0, "so ")), encode_signature(SignedReasoning(3, "be it"))
    assert reasoning({"text": "x", "thoughtSignature": first}, {"text": "y", "thoughtSignature": second}) == "so be it"


def test_repeated_signatures_change_nothing() -> None:
    """Some clients put the first call's signature on every call."""
    signature = encode_signature(SignedReasoning(0, "so be it"))
    assert reasoning(*({**call(), "thoughtSignature": signature} for _ in range(3))) == "so be it"


@pytest.mark.parametrize("foreign", ["skip_thought_signature_validator", "", "!!", "cG9sYXIxLg==", "CsoBAXLI2nw="])
def test_foreign_signatures_are_ignored(foreign: str) -> None:
    assert reasoning({"text": "x", "thoughtSignature": foreign}) is None
    assert reasoning({"text": "why", "thought": True}, {"text": "x", "thoughtSignature": foreign}) == "why"


def test_stores_contents_unchanged() -> None:
    body: Json = {
        "contents": [user({"text": "hi", "unknown": 1})],
        "system_instruction": {"parts": [{"text": "s"}]},
        "tools": [{"googleSearch": {}}],
        "safetySettings": [{"category": "x"}],
        "labels": {"a": "b"},
    }
    parsed = GoogleGenerateContent("m").parse(body)
    assert parsed.messages == (
        (
            b'{"systemInstruction":{"parts":[{"text":"s"}]}}',
            b'{"role":"user","parts":[{"text":"hi","unknown":1}]}',
        ),
    )
    assert parsed.tools == b'[{"googleSearch":{}}]'
    assert parsed.params == {"safetySettings": [{"category": "x"}], "labels": {"a": "b"}}


@pytest.mark.parametrize(
    ("contents", "param"),
    [
        ([], "contents"),
        (None, "contents"),
        ("hi", "contents"),
        (["hi"], "contents[0]"),
        ([{"role": "system", "parts": [{"text": "x"}]}], "contents[0].role"),
        ([{"role": "user", "parts": []}], "contents[0].parts"),
        ([{"role": "user", "parts": [{"text": 1}]}], "contents[0].parts[0].text"),
        ([{"role": "user", "parts": [{"hologram": {}}]}], "contents[0].parts[0]"),
        ([user(call())], "contents[0].parts[0].functionCall"),
        ([HI, model({"functionCall": {"args": {}}})], "contents[1].parts[0].functionCall.name"),
        ([HI, model({"functionCall": {"name": "x", "args": [1]}})], "contents[1].parts[0].functionCall.args"),
        ([HI, user({"functionResponse": {"name": "x", "response": "s"}})], "contents[1].parts[0].functionResponse"),
        ([model({"text": "x", "thoughtSignature": 1})], "contents[0].parts[0].thoughtSignature"),
        ([{"role": "model", "parts": []}], "contents"),
    ],
)
def test_error_names_the_wrong_field(contents: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"contents": contents})
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith(param) or param.startswith(caught.value.param)
    assert str(caught.value)


def test_a_result_inside_a_model_content_ends_the_message_before_it() -> None:
    content = {
        "role": "model",
        "parts": [
            {"text": "I look."},
            {"functionCall": {"name": "bash", "args": {}}},
            {"functionResponse": {"name": "bash", "response": {"output": "a.py"}}},
            {"text": "Done."},
        ],
    }
    call = {"id": "call_1_1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    assert conversation(HI, content, HI)[1:] == [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "a.py", "tool_call_id": "call_1_1", "name": "bash"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "hi"},
    ]
