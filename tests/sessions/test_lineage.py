"""Lineage by structure alone: rewinds, retries, twins, threads, restarts."""

from __future__ import annotations

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.sessions.identity import ClientMetadata
from polar_proxy.sessions.lineage import Lineage
from polar_proxy.types import CallStatus, Json, TextRequest
from tests.sessions.conversations import (
    SessionDriver,
    calls,
    edge_parent_rule,
    request,
    result,
    says,
    system,
    tools,
    user,
)

SYSTEM, USER = system("be exact"), user("fix it")
RETRY = ClientMetadata(retry=1)


def long_run(session: SessionDriver, turns: int) -> list[tuple[str, str | None, str | None]]:
    messages, edges = [SYSTEM, USER], []
    for number in range(turns):
        answer = calls(command=f"step {number}")
        edges.append(edge_parent_rule(session.call(list(messages), answer)))
        messages += [answer, result(answer, f"output {number}")]
    return edges


def test_a_run_of_26_turns_continues_turn_by_turn() -> None:
    edges = long_run(SessionDriver(), 26)
    assert [edge for edge, _, _ in edges] == ["root"] + ["continues"] * 25
    assert {rule for _, _, rule in edges[1:]} == {"extends"}


def test_edges_are_the_same_after_a_restart() -> None:
    session = SessionDriver()
    messages = [SYSTEM, USER]
    for number in range(4):
        answer = calls(command=f"step {number}")
        place = session.call(list(messages), answer)
        assert place.edge == ("continues" if number else "root")
        assert place.thread == session.stored[0].call_id
        messages += [answer, result(answer, "ok")]
        session.restart()


def test_other_normalisers_after_a_restart_find_no_wrong_parent() -> None:
    session = SessionDriver()
    place = session.call([SYSTEM, USER], says("done"))
    session.state = SessionDriver("white_space").state
    session.state.rebuild(session.stored)
    assert session.ask(SYSTEM, USER, says("done"), USER).parent_call_id in (None, place.call_id)


def test_rejects_an_unknown_normaliser() -> None:
    with pytest.raises(UsageError, match="unknown normalisers: nothing"):
        SessionDriver("nothing")


def test_a_disabled_normaliser_does_not_apply() -> None:
    session = SessionDriver("white_space")
    session.call([SYSTEM, USER], says("done \n"))
    assert session.ask(SYSTEM, USER, says("done"), USER).edge == "rewinds"
    session = SessionDriver()
    session.call([SYSTEM, USER], says("done \n"))
    assert session.ask(SYSTEM, USER, says("done"), USER).edge == "continues"


# Rewinds


def test_a_cut_answer_is_a_rewind() -> None:
    session = SessionDriver()
    first = session.call([SYSTEM, USER], says("I will look at the file and fix it"))
    found = session.ask(SYSTEM, USER, says("I will look at"), user("go on"))
    assert edge_parent_rule(found) == ("rewinds", first.call_id, "answer_cut")
    assert found.thread == first.thread


def test_a_removed_answer_is_a_rewind() -> None:
    session = SessionDriver()
    answer = calls(command="ls")
    session.call([SYSTEM, USER], answer)
    second = session.call([SYSTEM, USER, answer, result(answer, "a.py")], says(""))
    found = session.ask(SYSTEM, USER, answer, result(answer, "a.py"), user("well?"))
    assert edge_parent_rule(found) == ("rewinds", second.call_id, "answer_removed")


def test_keeping_a_partial_answer_is_a_rewind() -> None:
    """Codex keeps the finished items of a broken stream and asks again."""
    session = SessionDriver()
    part = calls(command="ls")
    first = session.call([SYSTEM, USER], part, status="upstream_error")
    found = session.ask(SYSTEM, USER, part, result(part, "a.py"))
    assert edge_parent_rule(found) == ("rewinds", first.call_id, "partial_answer_kept")


# The same request again


@pytest.mark.parametrize("status", ["client_gone", "upstream_error"])
def test_the_same_request_after_a_failure_is_a_retry(status: CallStatus) -> None:
    session = SessionDriver()
    first = session.call([SYSTEM, USER], says("I w"), status=status)
    session.now += 40
    again = session.call([SYSTEM, USER], says("done"))
    assert edge_parent_rule(again) == ("retries", first.call_id, "asked_again_after_failure")
    assert again.thread == first.thread
    after = session.ask(SYSTEM, USER, says("done"), USER)
    assert edge_parent_rule(after) == ("continues", again.call_id, "extends")


def test_each_attempt_is_a_retry_of_the_one_before() -> None:
    """Attempt after attempt: each is a retry of the one before."""
    session = SessionDriver()
    places = [session.call([SYSTEM, USER], says(""), status="upstream_error") for _ in range(5)]
    last = session.call([SYSTEM, USER], says("done"))
    assert [place.edge for place in (*places, last)] == ["root"] + ["retries"] * 5
    assert [place.parent_call_id for place in (*places[1:], last)] == [place.call_id for place in places]
    assert session.ask(SYSTEM, USER, says("done"), USER).parent_call_id == last.call_id


def test_the_retry_header_makes_a_repeated_request_a_retry() -> None:
    session = SessionDriver()
    first = session.call([SYSTEM, USER], says("done"))
    again = session.ask(SYSTEM, USER, metadata=RETRY)
    assert edge_parent_rule(again) == ("retries", first.call_id, "sdk_retry_header")


def test_the_retry_header_on_a_new_request_has_no_effect() -> None:
    assert edge_parent_rule(SessionDriver().ask(SYSTEM, USER, metadata=RETRY)) == ("root", None, None)


def test_a_repeated_request_without_evidence_is_a_second_call() -> None:
    session = SessionDriver()
    first = session.ask(SYSTEM, USER)
    twin = session.ask(SYSTEM, USER)
    assert (edge_parent_rule(twin), twin.ambiguous) == (("root", None, "same_request_again"), True)
    assert twin.thread != first.thread
    session.answer(first, says("done"))
    session.answer(twin, says("done"))
    third = session.ask(SYSTEM, USER)
    assert third.ambiguous  # just answered
    session.answer(third, says("done"))
    session.now += 60
    later = session.ask(SYSTEM, USER)
    assert (edge_parent_rule(later), later.ambiguous) == (("root", None, None), False)


@pytest.mark.parametrize("first", [2, 3, 4])
def test_a_summary_after_the_first_turns_compacts(first: int) -> None:
    """OpenHands keeps the first events and the newest ones, with the summary between them."""
    session = SessionDriver()
    talk, answers = [SYSTEM, USER], []
    for number in range(4):
        answers.append(calls(command=f"step {number}"))
        session.call(list(talk), answers[-1], tools=tools("bash"))
        talk += [answers[-1], result(answers[-1], "done")]
    order = user("You are maintaining a context-aware state summary for an interactive agent.\n<EVENT id='2'>")
    summary = "The user wants the failing test fixed; steps 1 and 2 are done and nothing is broken."
    asked = session.call([order], says(summary))
    kept = [*talk[:first], user(summary), *talk[-2:]]
    assert edge_parent_rule(session.ask(*kept, tools=tools("bash"))) == ("compacts", asked.call_id, "quotes_a_summary")


def test_a_second_compaction_that_keeps_the_last_turn_compacts() -> None:
    """Pi and Cline keep the newest turn after the summary. The turn before it is in no call that this one continues."""
    session = SessionDriver()
    first, second, third = (calls(command=f"step {number}") for number in range(3))
    order = system("You are a context summarization assistant. Your task is to read the conversation")

    def summarised(number: int) -> tuple[Lineage, Json]:
        text = f"The user wants the failing test fixed; {number} steps are done and nothing is broken."
        opening = "The conversation history before this point was compacted into the following summary:\n\n"
        return session.call([order, user(f"conversation {number}")], says(text)), user(opening + text)

    session.call([SYSTEM, USER], first)
    session.call([SYSTEM, USER, first, result(first, "one")], second)
    asked, summary = summarised(1)
    kept = session.call([SYSTEM, summary, second, result(second, "two")], third)
    assert edge_parent_rule(kept) == ("compacts", asked.call_id, "pi_compacted")
    asked, summary = summarised(2)
    kept = session.call([SYSTEM, summary, third, result(third, "three")], says("It is done."))
    assert (edge_parent_rule(kept), kept.ambiguous) == (("compacts", asked.call_id, "pi_compacted"), False)
    moved = session.ask(SYSTEM, user("Be brief."), summary, third, result(third, "three"), says("It is done."), USER)
    assert (moved.edge, moved.parent_call_id) == ("continues", kept.call_id)


def test_a_summary_shown_as_the_agents_own_turn_compacts() -> None:
    """opencode asks a fixed question and shows the summary as its answer."""
    session = SessionDriver()
    session.call([SYSTEM, USER], calls(command="ls"), tools=tools("bash"))
    prompt = system("You are a context summarization agent. You are given a conversation")
    summary = says("The user wants the failing test fixed; nothing has been done yet but to look around.")
    asked = session.call([prompt, user("Here is the conversation so far: ...")], summary)
    after = session.ask(SYSTEM, user("What did we do so far?"), summary, user("Continue."), tools=tools("bash"))
    assert edge_parent_rule(after) == ("compacts", asked.call_id, "opencode_compacted")


def test_a_repeated_request_in_one_run_is_a_retry() -> None:
    """The connection broke unnoticed: the whole answer was sent, and the run asks again."""
    session = SessionDriver()
    answer = calls(command="ls")
    session.call([SYSTEM, USER], answer)
    talk = [SYSTEM, USER, answer, result(answer, "a.txt")]
    second = session.call(talk, calls(command="cat a.txt"))
    again = session.ask(*talk)
    assert (edge_parent_rule(again), again.ambiguous) == (("retries", second.call_id, "asked_again_in_one_run"), True)
    answer = calls(command="cat a.txt")
    session.answer(again, answer)
    session.call([*talk, answer, result(answer, "hello")], says("done"))
    assert session.ask(*talk).edge == "continues"


def test_a_repeated_request_without_tool_calls_is_a_retry_if_the_session_has_one_run() -> None:
    session = SessionDriver()
    session.call([SYSTEM, USER], says("first"))
    talk = [SYSTEM, USER, says("first"), USER]
    second = session.call(talk, says("second"))
    assert edge_parent_rule(session.ask(*talk)) == ("retries", second.call_id, "asked_again_in_one_run")
    two = SessionDriver()
    two.call([SYSTEM, USER], says("first"))
    two.call([SYSTEM, USER], says("first"))
    two.call(talk, says("second"))
    assert two.ask(*talk).edge == "continues"


def test_several_answers_to_one_conversation_continue_the_same_parent() -> None:
    """A client samples several answers one after the other. Each is a call, and later ones are not ambiguous."""
    session = SessionDriver()
    answer = calls(command="ls")
    first = session.call([SYSTEM, USER], answer)
    places = []
    for number in range(3):
        places.append(session.call([SYSTEM, USER, answer, result(answer, "x")], says(f"idea {number}")))
        session.now += 60
    assert [(p.edge, p.parent_call_id, p.ambiguous) for p in places] == [("continues", first.call_id, False)] * 3


# Parallel runs under one key, without a session id


def test_call_ids_distinguish_parallel_runs_of_one_task() -> None:
    session = SessionDriver()
    threads: list[set[str]] = []
    runs = [[SYSTEM, USER] for _ in range(3)]
    for turn in range(4):
        placed = [session.ask(*run) for run in runs]
        for number, (run, place) in enumerate(zip(runs, placed, strict=True)):
            answer = calls(command="ls")  # all say the same: only the random ids differ
            session.answer(place, answer)
            run += [answer, result(answer, "a.py")]
            threads.append({place.thread}) if turn == 0 else threads[number].add(place.thread)
            if turn:
                assert (place.edge, place.ambiguous) == ("continues", False)
    assert all(len(own) == 1 for own in threads)
    assert len(set.union(*threads)) == 3


def test_indistinguishable_runs_are_ambiguous() -> None:
    session = SessionDriver()
    first = session.call([SYSTEM, USER], says("done"))
    session.now += 60
    second = session.call([SYSTEM, USER], says("done"))
    follow = session.call([SYSTEM, USER, says("done"), user("more")], says("yes"))
    assert (edge_parent_rule(follow), follow.ambiguous) == (("continues", second.call_id, "twins"), True)
    other = session.ask(SYSTEM, USER, says("done"), user("else"))
    assert (other.parent_call_id, other.ambiguous) == (first.call_id, True)


def test_session_ids_of_the_harness_distinguish_runs() -> None:
    session = SessionDriver()
    one, two = ClientMetadata(thread="t1"), ClientMetadata(thread="t2")
    first = session.call([SYSTEM, USER], says("done"), metadata=one)
    second = session.call([SYSTEM, USER], says("done"), metadata=two)
    assert (edge_parent_rule(second), second.ambiguous, second.thread) == (("root", None, None), False, "t2")
    for metadata, parent in ((one, first), (two, second)):
        found = session.ask(SYSTEM, USER, says("done"), user("more"), metadata=metadata)
        assert (found.parent_call_id, found.ambiguous, found.thread) == (parent.call_id, False, metadata.thread)


# Sub-agents


def test_the_harness_names_a_subagent() -> None:
    session = SessionDriver()
    main, child = ClientMetadata(thread="t1"), ClientMetadata(thread="a1", parent_thread="t1", subagent="agent")
    first = session.call([SYSTEM, USER], calls("Task", prompt="look around"), metadata=main)
    started = session.call([system("you search"), user("look around")], says("found"), metadata=child)
    assert (edge_parent_rule(started), started.thread) == (("subagent", first.call_id, "harness_says_subagent"), "a1")
    more = session.ask(system("you search"), user("look around"), says("found"), user("sure?"), metadata=child)
    assert (edge_parent_rule(more), more.thread) == (("continues", started.call_id, "extends"), "a1")


def test_a_subagent_may_start_with_its_parents_history() -> None:
    session = SessionDriver()
    main, child = ClientMetadata(thread="t1"), ClientMetadata(thread="a1", parent_thread="t1", subagent="collab_spawn")
    first = session.call([SYSTEM, USER], says("I spawn"), metadata=main)
    started = session.call([SYSTEM, USER, says("I spawn"), user("you are the child")], says("yes"), metadata=child)
    assert (edge_parent_rule(started), started.thread) == (("subagent", first.call_id, "harness_says_subagent"), "a1")


def test_a_subagent_by_its_prompt() -> None:
    """Qwen Code and Gemini CLI send no metadata, but the prompt that the parent wrote is the child's first message."""
    session = SessionDriver()
    first = session.call([SYSTEM, USER], calls("agent", prompt="Find all the callers of foo()"))
    child = session.call([system("you search"), user("Find all the callers of foo()")], says("none"))
    assert (edge_parent_rule(child), child.ambiguous) == (("subagent", first.call_id, "prompt_from_tool_call"), False)
    assert child.thread != first.thread


def test_a_prompt_from_an_unknown_tool_is_ambiguous() -> None:
    session = SessionDriver()
    text = "Look at every file of the package and write down which functions are never called by anything"
    session.call([SYSTEM, USER], calls("bash", command=f"some-agent '{text}'"))
    session.call([SYSTEM, user("two")], calls("consult", question=text))
    found = session.ask(system("another program"), user(text))
    assert (found.edge, found.rule, found.ambiguous) == ("root", "prompt_from_unknown_tool", True)


# Rewritten histories


def test_a_regenerated_opening_continues() -> None:
    session = SessionDriver()
    answer = calls(command="ls")
    session.call([SYSTEM, USER], answer)
    second = session.call([SYSTEM, USER, answer, result(answer, "a")], says("done"))
    opening = [system("be exact. branch: main, 2 files changed"), user("reminder: it is late"), USER]
    found = session.ask(*opening, answer, result(answer, "a"), says("done"), user("more"))
    assert (edge_parent_rule(found), found.ambiguous) == (("continues", second.call_id, "opening_regenerated"), False)


def test_a_short_answer_alone_is_weak_evidence() -> None:
    session = SessionDriver()
    session.call([SYSTEM, USER], says("ok"))
    found = session.ask(system("another"), user("conversation"), says("ok"), user("more"))
    assert (found.rule, found.ambiguous) == ("opening_regenerated", True)


def test_reworded_messages_continue() -> None:
    session = SessionDriver()
    session.call([SYSTEM, USER], says("I have read it all, and here is what I think of it"))
    messages = [SYSTEM, USER, says("I have read it all, and here is what I think of it"), user("summary v1")]
    second = session.call(messages, says("that is all"))
    found = session.ask(*messages[:3], user("summary v2"), says("that is all"), user("more"))
    assert edge_parent_rule(found) == ("continues", second.call_id, "messages_reworded")


def test_outputs_changed_in_an_unknown_way_are_ambiguous() -> None:
    session = SessionDriver()
    answer = calls(command="cat a")
    session.call([SYSTEM, USER], answer)
    second = session.call([SYSTEM, USER, answer, result(answer, "long output")], says("done"))
    found = session.ask(SYSTEM, USER, answer, result(answer, "shortened"), says("done"), user("more"))
    assert (edge_parent_rule(found), found.ambiguous) == (("continues", second.call_id, "outputs_changed"), True)


def test_dropped_turns_compact() -> None:
    session = SessionDriver()
    messages = [SYSTEM, USER]
    for number in range(3):
        answer = calls(command=f"step {number}")
        last = session.call(list(messages), answer)
        messages += [answer, result(answer, "ok")]
    found = session.ask(SYSTEM, user("(older messages left out)"), *messages[-2:])
    assert edge_parent_rule(found) == ("compacts", last.call_id, "older_turns_dropped")


def test_raw_prompts_are_roots() -> None:
    session = SessionDriver()
    for prompt in ("one", (1, 2, 3)):
        assert session.state.place(f"p{prompt}", TextRequest("m", prompt), now=0.0).edge == "root"


def test_tools_are_no_part_of_the_conversation() -> None:
    session = SessionDriver()
    answer = calls(command="ls")
    first = session.call([SYSTEM, USER], answer, tools=tools("bash"))
    found = session.ask(SYSTEM, USER, answer, result(answer, "x"), tools=tools("bash", "found_later"))
    assert found.parent_call_id == first.call_id
    assert request(SYSTEM).tools == ()
