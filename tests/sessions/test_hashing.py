"""Messages are compared by meaning, not by their bytes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from polar_proxy.sessions.hashing import MessageHasher
from polar_proxy.types import Json, Message
from tests.sessions.conversations import SessionDriver, edge_parent_rule, system, user

SYSTEM = system("be exact")
USER = user("fix it")
ANSWER: Json = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls", "wait": 1}'}}
    ],
}
RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}


@pytest.fixture
def session() -> SessionDriver:
    """A session after one call: SYSTEM, USER -> ANSWER."""
    made = SessionDriver()
    made.call([SYSTEM, USER], ANSWER)
    return made


def _answer(content: Any = None, **function: Any) -> Json:
    call = ANSWER["tool_calls"][0]
    return {**ANSWER, "content": content, "tool_calls": [{**call, "function": {**call["function"], **function}}]}


MARK = {"cache_control": {"type": "ephemeral"}}
IMAGE: Json = {"type": "image_url", "image_url": {"url": "x"}}
PARTS = [{"type": "text", "text": "fix "}, {"type": "text", "text": "it", **MARK}]
SAME: dict[str, list[Json]] = {
    "unchanged": [SYSTEM, USER, ANSWER, RESULT],
    "no new message": [SYSTEM, USER, ANSWER],
    "content parts": [SYSTEM, {**USER, "content": PARTS}, ANSWER, RESULT],
    "developer": [{**SYSTEM, "role": "developer"}, USER, ANSWER, RESULT],
    "other fields": [SYSTEM, {**USER, **MARK}, ANSWER, RESULT],
    "arguments serialised again": [SYSTEM, USER, _answer(arguments='{"wait":1,"command":"ls"}'), RESULT],
    "arguments as an object": [SYSTEM, USER, _answer(arguments={"wait": 1, "command": "ls"}), RESULT],
    "numbers as JavaScript writes them": [SYSTEM, USER, _answer(arguments='{"command": "ls", "wait": 1.0}'), RESULT],
    "empty content": [SYSTEM, USER, _answer(content=""), RESULT],
    "white space as content": [SYSTEM, USER, _answer(content="\n"), RESULT],
    "empty parts": [SYSTEM, USER, _answer(content=[]), RESULT],
    "other ids": [SYSTEM, USER, {**ANSWER, "tool_calls": [{**ANSWER["tool_calls"][0], "id": "call_99"}]}, RESULT],
    "reasoning dropped or added": [SYSTEM, USER, {**ANSWER, "reasoning_content": "let me see"}, RESULT],
    "thinking blocks": [SYSTEM, USER, _answer(content=[{"type": "thinking", "thinking": "hm"}]), RESULT],
    "the result twice": [SYSTEM, USER, ANSWER, RESULT, RESULT],
}
ANOTHER_START: dict[str, list[Json]] = {
    "no system prompt": [USER],
    "another user": [SYSTEM, {**USER, "content": "fix that"}],
    "another role": [SYSTEM, {**USER, "role": "system"}],
    "text moved between messages": [{**SYSTEM, "content": "be exactfix"}, {**USER, "content": " it"}],
    "an image": [SYSTEM, {**USER, "content": [*PARTS, IMAGE]}],
}
ANOTHER_ANSWER: dict[str, Json] = {
    "another tool": _answer(name="sh"),
    "other arguments": _answer(arguments='{"command": "ls -l", "wait": 1}'),
    "another type in the arguments": _answer(arguments='{"command": "ls", "wait": "1"}'),
    "arguments cut": _answer(arguments='{"command": "ls", "wait": '),
    "text added": _answer(content="I look:"),
    "no tool calls": {"role": "assistant", "content": "ls"},
    "one more tool call": {**ANSWER, "tool_calls": ANSWER["tool_calls"] * 2},
}


@pytest.mark.parametrize("case", SAME)
def test_a_conversation_with_the_same_meaning_continues(session: SessionDriver, case: str) -> None:
    found = session.ask(*SAME[case])
    assert edge_parent_rule(found) == ("continues", session.stored[0].call_id, "extends")
    assert not found.ambiguous
    assert found.thread == session.stored[0].thread


@pytest.mark.parametrize("case", ANOTHER_START)
def test_another_conversation_is_a_root(session: SessionDriver, case: str) -> None:
    found = session.ask(*ANOTHER_START[case])
    assert edge_parent_rule(found) == ("root", None, None)
    assert found.thread == found.call_id


@pytest.mark.parametrize("case", ANOTHER_ANSWER)
def test_another_answer_does_not_continue(session: SessionDriver, case: str) -> None:
    found = session.ask(SYSTEM, USER, ANOTHER_ANSWER[case], RESULT)
    assert edge_parent_rule(found) == ("rewinds", session.stored[0].call_id, "answer_replaced")


def test_the_latest_call_is_the_parent(session: SessionDriver) -> None:
    """The last of several calls in the messages is continued. Going back branches off an earlier one."""
    first = session.stored[0].call_id
    second = session.call([SYSTEM, USER, ANSWER, RESULT], {"role": "assistant", "content": "done"})
    done: Json = {"role": "assistant", "content": [{"type": "text", "text": "done"}]}
    third = session.ask(SYSTEM, USER, ANSWER, RESULT, done, USER)
    assert edge_parent_rule(third) == ("continues", second.call_id, "extends")
    back = session.ask(SYSTEM, USER, ANSWER, {**RESULT, "content": "b.py"})
    assert edge_parent_rule(back) == ("continues", first, "branches")


def test_arguments_that_are_not_json_are_compared_as_text(session: SessionDriver) -> None:
    broken = _answer(arguments='{"command": ls')
    called = session.call([USER], broken)
    assert session.ask(USER, broken, RESULT).parent_call_id == called.call_id
    assert session.ask(USER, _answer(arguments='{"command":ls'), RESULT).edge == "rewinds"


def test_sessions_are_independent(session: SessionDriver) -> None:
    assert SessionDriver().ask(SYSTEM, USER, ANSWER, RESULT).edge == "root"


def test_a_turn_in_several_messages_counts_as_one(session: SessionDriver) -> None:
    """Responses and Gemini send the text and the tool calls of one turn as separate items."""
    both = _answer(content="I look:")
    called = session.call([SYSTEM, user("and now?")], both)
    apart = [{"role": "assistant", "content": "I look:"}, ANSWER]
    assert session.ask(SYSTEM, user("and now?"), *apart, RESULT).parent_call_id == called.call_id


def test_content_parts_never_equal_a_text(session: SessionDriver) -> None:
    """A text that looks like another message's parts has another meaning."""
    called = session.call([user('[{"image_url":{"url":"x"},"type":"image_url"}]')], ANSWER)
    found = session.ask({"role": "user", "content": [IMAGE]}, ANSWER, RESULT)
    assert called.call_id != found.parent_call_id or found.rule == "opening_regenerated"


@pytest.mark.parametrize("size", [2, 16, 17, 40])
def test_a_turn_in_many_messages_counts_as_one(session: SessionDriver, size: int) -> None:
    word = {"role": "assistant", "content": "so "}
    whole = {"role": "assistant", "content": "so " * size}
    called = session.call([SYSTEM, user("and now?")], whole)
    asked = session.ask(SYSTEM, user("and now?"), *[word] * size, user("on"))
    assert (asked.edge, asked.parent_call_id) == ("continues", called.call_id)


HOSTILE_TEXTS = {
    "unclosed contexts": "<session_context>" * 6_000,
    "white space": " " * 100_000 + "# *SEARCH/REPLACE block* Rules:",
    "reminders": " \n# *SEARCH/REPLACE block* Rules: " * 3_000,
    "unclosed billing line": "x-anthropic-billing-header:" + "cch=" * 25_000,
    "billing lines": "x-anthropic-billing-header:" * 4_000,
    "dates": "Today's date is The current date and time is: " * 2_000,
    "unclosed reasoning": "<think>" * 6_000 + "</think" * 6_000,
    "closed reasoning": "x</think>" * 10_000,
}


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_normalising_takes_time_linear_in_the_text(role: str, text: str) -> None:
    started = time.thread_time()
    MessageHasher().digest(Message(role, text))
    assert time.thread_time() - started < 1


def test_hashing_takes_time_linear_in_the_messages_of_a_turn() -> None:
    started = time.thread_time()
    MessageHasher().chain([Message("assistant", "word " * 200)] * 4_000)
    assert time.thread_time() - started < 2
