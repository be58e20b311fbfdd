"""A call is placed by what its messages mean, not by their bytes."""

from __future__ import annotations

from typing import Any

import pytest

from polar_proxy.dialects import OpenAIChat
from polar_proxy.history import Place, SessionHistory
from polar_proxy.types import ChatRequest, Json

SYSTEM: Json = {"role": "system", "content": "be exact"}
USER: Json = {"role": "user", "content": "fix it"}
ANSWER: Json = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls", "wait": 1}'}}
    ],
}
RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}


def place(history: SessionHistory, *messages: Json) -> Place:
    (request,) = OpenAIChat().parse({"model": "m", "messages": list(messages)}).requests
    assert isinstance(request, ChatRequest)
    return history.place(request.messages)


@pytest.fixture
def history() -> SessionHistory:
    """After one call: SYSTEM, USER -> ANSWER."""
    made = SessionHistory()
    made.answered(place(made, SYSTEM, USER), ANSWER, "call_1")
    return made


def _answer(content: Any = None, **function: Any) -> Json:
    call = ANSWER["tool_calls"][0]
    return {**ANSWER, "content": content, "tool_calls": [{**call, "function": {**call["function"], **function}}]}


PARTS = [{"type": "text", "text": "fix "}, {"type": "text", "text": "it", "cache_control": {"type": "ephemeral"}}]
SAME: dict[str, list[Json]] = {
    "as it was": [SYSTEM, USER, ANSWER, RESULT],
    "nothing new": [SYSTEM, USER, ANSWER],
    "content parts": [SYSTEM, {**USER, "content": PARTS}, ANSWER, RESULT],
    "developer": [{**SYSTEM, "role": "developer"}, USER, ANSWER, RESULT],
    "other fields": [SYSTEM, {**USER, "cache_control": {"type": "ephemeral"}}, ANSWER, RESULT],
    "arguments printed again": [SYSTEM, USER, _answer(arguments='{"wait":1,"command":"ls"}'), RESULT],
    "arguments as an object": [SYSTEM, USER, _answer(arguments={"wait": 1, "command": "ls"}), RESULT],
    "empty content": [SYSTEM, USER, _answer(content=""), RESULT],
    "empty parts": [SYSTEM, USER, _answer(content=[]), RESULT],
    "other ids": [SYSTEM, USER, {**ANSWER, "tool_calls": [{**ANSWER["tool_calls"][0], "id": "call_99"}]}, RESULT],
    "reasoning dropped or added": [SYSTEM, USER, {**ANSWER, "reasoning_content": "let me see"}, RESULT],
}
OTHER: dict[str, list[Json]] = {
    "the same prompt again": [SYSTEM, USER],
    "another system prompt": [{**SYSTEM, "content": "be quick"}, USER, ANSWER, RESULT],
    "no system prompt": [USER, ANSWER, RESULT],
    "another user": [SYSTEM, {**USER, "content": "fix that"}, ANSWER, RESULT],
    "another role": [SYSTEM, {**USER, "role": "system"}, ANSWER, RESULT],
    "text moved between messages": [{**SYSTEM, "content": "be exactfix"}, {**USER, "content": " it"}, ANSWER],
    "an image": [SYSTEM, {**USER, "content": [*PARTS, {"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER],
    "another tool": [SYSTEM, USER, _answer(name="sh"), RESULT],
    "other arguments": [SYSTEM, USER, _answer(arguments='{"command": "ls -l", "wait": 1}'), RESULT],
    "another type in the arguments": [SYSTEM, USER, _answer(arguments='{"command": "ls", "wait": "1"}'), RESULT],
    "arguments cut": [SYSTEM, USER, _answer(arguments='{"command": "ls", "wait": '), RESULT],
    "text added": [SYSTEM, USER, _answer(content="I look:"), RESULT],
    "no calls": [SYSTEM, USER, {"role": "assistant", "content": "ls"}, RESULT],
    "a call more": [SYSTEM, USER, {**ANSWER, "tool_calls": ANSWER["tool_calls"] * 2}, RESULT],
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_meaning_continues(history: SessionHistory, case: str) -> None:
    found = place(history, *SAME[case])
    assert (found.edge, found.parent_call_id) == ("continues", "call_1")


@pytest.mark.parametrize("case", OTHER)
def test_another_meaning_is_a_root(history: SessionHistory, case: str) -> None:
    found = place(history, *OTHER[case])
    assert (found.edge, found.parent_call_id) == ("root", None)


def test_the_latest_call_is_the_parent(history: SessionHistory) -> None:
    """Of several calls that the messages contain, the last one is continued; going back continues an earlier one."""
    second = place(history, SYSTEM, USER, ANSWER, RESULT)
    history.answered(second, {"role": "assistant", "content": "done"}, "call_2")
    done: Json = {"role": "assistant", "content": [{"type": "text", "text": "done"}]}
    assert place(history, SYSTEM, USER, ANSWER, RESULT, done, USER).parent_call_id == "call_2"
    assert place(history, SYSTEM, USER, ANSWER, {**RESULT, "content": "b.py"}).parent_call_id == "call_1"


def test_arguments_that_are_no_json_are_compared_as_text(history: SessionHistory) -> None:
    broken = _answer(arguments='{"command": ls')
    history.answered(place(history, USER), broken, "call_3")
    assert place(history, USER, broken, RESULT).parent_call_id == "call_3"
    assert place(history, USER, _answer(arguments='{"command":ls'), RESULT).parent_call_id is None


def test_sessions_know_nothing_of_each_other(history: SessionHistory) -> None:
    assert place(SessionHistory(), SYSTEM, USER, ANSWER, RESULT).edge == "root"
