"""Histories as harnesses write them: other white space, prefilled answers, parts of broken streams, moved turns."""

from __future__ import annotations

import pytest

from polar_proxy.types import Json
from tests.sessions.conversations import SessionDriver, calls, edge_parent_rule, result, says, system, user

SYSTEM, USER, MORE = system("be exact"), user("fix it"), user("more")


def text_parts(*texts: str) -> Json:
    return {"role": "assistant", "content": [{"type": "text", "text": text} for text in texts]}


# White space


@pytest.mark.parametrize(
    ("sampled", "returned"),
    [
        (says("\n\nHi."), says("Hi.")),
        (says("Hi."), says("\n\nHi.\n")),
        (says("I look.\n\nNow I write.\n"), text_parts("I look.", "Now I write.")),
        (text_parts("I look.\n", "\nNow I write."), says("I look.\n\n\n\nNow I write.")),
        ({**says("\n\nI look.\n\n"), "reasoning_content": "\nhm\n"}, {**says("I look."), "reasoning_content": "hm"}),
    ],
)
def test_white_space_around_and_between_texts_means_nothing(sampled: Json, returned: Json) -> None:
    session = SessionDriver("reasoning")
    first = session.call([SYSTEM, USER], sampled)
    found = session.ask(SYSTEM, USER, returned, MORE)
    assert edge_parent_rule(found) == ("continues", first.call_id, "extends")
    assert found.base is not None
    assert (found.base.call_id, found.base.end) == (first.call_id, 3)


def test_white_space_around_other_messages_means_nothing() -> None:
    session = SessionDriver()
    answer = calls(command="ls")
    first = session.call([system("be exact\n"), user("\n fix it")], answer)
    found = session.ask(SYSTEM, USER, {**answer, "content": "\n"}, result(answer, "a.py\n"))
    assert edge_parent_rule(found) == ("continues", first.call_id, "extends")


def test_white_space_inside_a_users_text_has_a_meaning() -> None:
    session = SessionDriver()
    session.call([SYSTEM, user("if x:\n    y")], says("done"))
    assert session.ask(SYSTEM, user("if x:\ny")).edge == "root"


def test_answers_that_differ_in_white_space_only_are_told_apart() -> None:
    session = SessionDriver()
    made = [session.call([SYSTEM, USER], says(text)) for text in ("if x:\n    y\n", "if x:\ny\n", "if x: y\n")]
    for number in (1, 0, 2):
        text = ("if x:\n    y", "if x:\ny", "if x: y")[number]
        found = session.ask(SYSTEM, USER, says(text), MORE)
        assert (edge_parent_rule(found), found.ambiguous) == (
            ("continues", made[number].call_id, "by_call_ids"),
            False,
        )


LITELLM: dict[str, tuple[str, Json]] = {
    "reasoning": (
        "<think>\nThe bug is in a.py.\n</think>\n\nLet me look.",
        {"reasoning_content": "\nThe bug is in a.py.\n", "content": "\n\nLet me look."},
    ),
    "reasoning alone": ("<think>Short.</think>", {"reasoning_content": "Short.", "content": ""}),
    "another tag": ("<thinking>hm</thinking>text", {"reasoning_content": "hm", "content": "text"}),
    "empty reasoning": (
        "<think>\n\n</think>\n\nNo thoughts.",
        {"reasoning_content": "\n\n", "content": "\n\nNo thoughts."},
    ),
    "two tags": (
        "<think>one</think>two<think>three</think>four",
        {"reasoning_content": "one", "content": "two<think>three</think>four"},
    ),
    "after white space": ("\n<think>late</think>x", {"content": "\n<think>late</think>x"}),
    "never opened": ("no opening</think>\n\nx", {"content": "no opening</think>\n\nx"}),
    "never closed": ("<think>never closed", {"content": "<think>never closed"}),
}
"""Texts of answers, and what mini-swe-agent 2.4.6 with LiteLLM 1.110.2 sends of them with the next request."""


@pytest.mark.parametrize("case", LITELLM)
def test_reasoning_that_litellm_moves_out_of_the_text_continues(case: str) -> None:
    text, returned = LITELLM[case]
    session = SessionDriver()
    answer = {**calls(command="ls"), "content": text}
    called = session.call([SYSTEM, USER], answer)
    found = session.ask(SYSTEM, USER, {**answer, "content": None, **returned}, result(answer, "a.py"))
    assert (edge_parent_rule(found), found.ambiguous) == (("continues", called.call_id, "extends"), False)
    assert found.base is not None


def test_answers_that_differ_in_the_reasoning_in_their_text_are_told_apart() -> None:
    session = SessionDriver()
    made = [session.call([SYSTEM, USER], says(f"<think>{thought}</think>\n\nDone.")) for thought in ("a", "b", "c")]
    for number in (1, 0, 2):
        answer = {**says("\n\nDone."), "reasoning_content": "abc"[number]}
        found = session.ask(SYSTEM, USER, answer, MORE)
        assert (found.parent_call_id, found.ambiguous) == (made[number].call_id, False)
        assert found.base is not None
        assert found.base.call_id == made[number].call_id


def test_a_text_after_the_reasoning_that_the_client_changed_does_not_continue() -> None:
    session = SessionDriver()
    session.call([SYSTEM, USER], says("<think>hm</think>\n\nDone."))
    assert session.ask(SYSTEM, USER, {**says("Undone."), "reasoning_content": "hm"}, MORE).rule == "answer_replaced"


# Requests that end with an assistant message


@pytest.mark.parametrize("as_one", [True, False])
def test_a_prefilled_answer_is_continued(as_one: bool) -> None:
    session = SessionDriver()
    first = session.call([SYSTEM, USER, says("The answer is")], says(" 42."))
    assert first.edge == "root"
    turn = [says("The answer is 42.")] if as_one else [says("The answer is"), says("42.")]
    second = session.call([SYSTEM, USER, *turn, MORE], says("yes"))
    assert edge_parent_rule(second) == ("continues", first.call_id, "extends")
    session.restart()
    third = session.ask(SYSTEM, USER, *turn, MORE, says("yes"), user("sure?"))
    assert edge_parent_rule(third) == ("continues", second.call_id, "extends")
    assert third.base is not None
    assert third.base.call_id == second.call_id


def test_a_prefill_in_the_middle_of_a_run_keeps_its_line() -> None:
    session = SessionDriver()
    look = calls(command="ls")
    first = session.call([SYSTEM, USER], look)
    talk = [SYSTEM, USER, look, result(look, "a.py")]
    second = session.call([*talk, says("I see")], says("one file."))
    assert edge_parent_rule(second) == ("continues", first.call_id, "extends")
    third = session.ask(*talk, says("I see one file."), MORE)
    assert edge_parent_rule(third) == ("continues", second.call_id, "extends")


def test_an_answer_that_is_asked_to_go_on_is_continued() -> None:
    session = SessionDriver()
    first = session.call([SYSTEM, USER], says("One, two,"))
    second = session.call([SYSTEM, USER, says("One, two,")], says("three."))
    assert edge_parent_rule(second) == ("continues", first.call_id, "extends")
    found = session.ask(SYSTEM, USER, says("One, two, three."), MORE)
    assert edge_parent_rule(found) == ("continues", second.call_id, "extends")


def test_a_request_that_ends_with_a_cut_answer_keeps_its_line() -> None:
    session = SessionDriver()
    first = session.call([SYSTEM, USER], says("\nI will lo"), status="upstream_error")
    second = session.call([SYSTEM, USER, says("I will lo")], says("ok at it."))
    assert edge_parent_rule(second) == ("rewinds", first.call_id, "partial_answer_kept")
    found = session.ask(SYSTEM, USER, says("I will look at it."), MORE)
    assert edge_parent_rule(found) == ("continues", second.call_id, "extends")


# Broken streams


def reasoning(text: str) -> Json:
    return {"role": "assistant", "content": "", "reasoning_content": text}


def test_codex_keeps_complete_items_of_each_broken_stream() -> None:
    """Codex 0.169.0: three streams break, the fourth attempt succeeds. Recorded from the program."""
    session = SessionDriver()
    look, again = calls(command="echo one"), calls(command="echo two")
    talk = [SYSTEM, USER, look, result(look, "one")]
    session.call([SYSTEM, USER], look)
    broken = "upstream_error"
    first = session.call(talk, {**says("Now I"), "reasoning_content": "thinking"}, status=broken)
    second = session.call([*talk, reasoning("thinking")], says("Half of it, and then"), status=broken)
    assert edge_parent_rule(second) == ("rewinds", first.call_id, "partial_answer_kept")
    third = session.call([*talk, reasoning("thinking")], {**again, "content": "More."}, status=broken)
    assert edge_parent_rule(third) == ("retries", second.call_id, "asked_again_after_failure")
    kept = [*talk, reasoning("thinking"), reasoning("aha"), says("More.")]
    fourth = session.call(kept, says("All done."))
    assert edge_parent_rule(fourth) == ("rewinds", third.call_id, "partial_answer_kept")
    assert not fourth.ambiguous
    found = session.ask(*kept, says("All done."), MORE)
    assert edge_parent_rule(found) == ("continues", fourth.call_id, "extends")


def test_the_attempt_whose_part_is_kept_is_rewound() -> None:
    """Two attempts broke. The history keeps items of the older one."""
    session = SessionDriver()
    look, other = calls(command="ls"), calls(command="pwd")
    first = session.call([SYSTEM, USER], {**look, "content": "I look."}, status="upstream_error")
    session.call([SYSTEM, USER], other, status="upstream_error")
    found = session.ask(SYSTEM, USER, look, result(look, "a.py"))
    assert (edge_parent_rule(found), found.ambiguous) == (
        ("rewinds", first.call_id, "partial_answer_kept"),
        False,
    )


# Assistant messages that no call answered


AIDER_RULES = "\n\n# *SEARCH/REPLACE block* Rules:\nEvery block must use this format."
AIDER_EXAMPLES = [user("Change get_factorial() to use math.factorial"), says("I add an import:\n\nfactorial.py")]
AIDER_FILES = [user("I have *added these files*"), says("Ok, any changes I propose will be to those files.")]


def aider(*done: Json, ask: str) -> list[Json]:
    """Return a request of aider 0.86.2: what is done comes before the files of the chat."""
    return [system("Act as an expert developer."), *AIDER_EXAMPLES, *done, *AIDER_FILES, user(ask + AIDER_RULES)]


def test_aiders_second_message_continues() -> None:
    session = SessionDriver()
    first = session.call(aider(ask="fix it"), says("\nI fixed it.\n"))
    committed = [user("I committed the changes with git hash 1a2b3c4"), says("Ok.")]
    done = [user("fix it"), says("I fixed it."), *committed]
    second = session.call(aider(*done, ask="and now?"), says("Done as well."))
    assert (edge_parent_rule(second), second.ambiguous) == (("continues", first.call_id, "turns_moved"), False)
    assert second.thread == first.thread
    done += [user("and now?"), says("Done as well."), *committed]
    third = session.ask(*aider(*done, ask="last one"))
    assert edge_parent_rule(third) == ("continues", second.call_id, "turns_moved")
    assert third.base is None


def test_messages_that_the_harness_wrote_are_no_answers() -> None:
    """Two conversations with the same examples have nothing in common."""
    session = SessionDriver()
    session.call(aider(ask="fix it"), says("I fixed it."))
    assert edge_parent_rule(session.ask(*aider(ask="do something else"))) == ("root", None, None)
