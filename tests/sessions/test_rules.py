"""An example for every rule, and for every normaliser of texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polar_proxy.dialects.openai_responses.compaction import INSTRUCTION
from polar_proxy.sessions.hashing import NORMALISERS
from polar_proxy.sessions.identity import ClientMetadata
from polar_proxy.sessions.lineage import Lineage
from polar_proxy.sessions.rules import RULES, Rule
from polar_proxy.types import Json
from tests.sessions.conversations import SessionDriver, calls, result, says, system, tools, user

SYSTEM, USER = system("You are a coding agent."), user("Fix the failing test")
SUMMARY = "The user wants the failing test fixed; the cause is an off-by-one error in the loop of parse()."


def side(prompt: str, *, last: str = "Fix the failing test") -> Callable[[], Lineage]:
    def ask() -> Lineage:
        session = SessionDriver()
        session.call([SYSTEM, USER], calls(command="ls"), tools=tools("bash"))
        return session.ask(*([system(prompt)] if prompt else []), user(last))

    return ask


def summarise(prompt: str | None, order: str, *, metadata: ClientMetadata | None = None) -> Callable[[], Lineage]:
    """The whole history with an instruction to summarise it. `prompt` replaces the system prompt."""

    def ask() -> Lineage:
        session = SessionDriver()
        answer = calls(command="ls")
        session.call([SYSTEM, USER], answer, tools=tools("bash"))
        history = [system(prompt) if prompt else SYSTEM, USER, answer, result(answer, "a.py"), user(order)]
        return session.ask(*history, metadata=metadata or ClientMetadata())

    return ask


def compacted(*opening: Json) -> Callable[[], Lineage]:
    """A conversation that begins with the summary."""

    def ask() -> Lineage:
        session = SessionDriver()
        answer = calls(command="ls")
        session.call([SYSTEM, USER], answer)
        request = [SYSTEM, USER, answer, result(answer, "a.py"), user("CONTEXT CHECKPOINT COMPACTION")]
        summary = session.call(request, says(SUMMARY))
        found = session.ask(SYSTEM, *opening)
        assert (found.parent_call_id, found.thread) == (summary.call_id, summary.thread)
        assert not found.ambiguous
        return found

    return ask


def cut(kept: list[Json]) -> Callable[[], Lineage]:
    def ask() -> Lineage:
        session = SessionDriver()
        session.call([SYSTEM, USER], says("I will look at"), status="upstream_error")
        return session.ask(SYSTEM, USER, *kept)

    return ask


def masked(text: str) -> Callable[[], Lineage]:
    def ask() -> Lineage:
        session = SessionDriver()
        one, two = calls(command="cat a"), calls(command="cat b")
        session.call([SYSTEM, USER], one)
        session.call([SYSTEM, USER, one, result(one, "long " * 99)], two)
        return session.ask(SYSTEM, USER, one, result(one, text), two, result(two, "short"))

    return ask


EXAMPLES: dict[str, tuple[str, Callable[[], Lineage]]] = {
    "opencode_title": (
        "side_call",
        side("You are a title generator. You output ONLY a thread title. Nothing else."),
    ),
    "gemini_router": ("side_call", side("\nYou are a specialized Task Routing AI. Your sole function is ...")),
    "aider_commit_message": (
        "side_call",
        side("You are an expert software engineer that generates concise, one-line Git commit messages based on"),
    ),
    "qwen_memory_extraction": (
        "side_call",
        summarise("You are now acting as the managed memory extraction subagent for an AI coding assistant.", "go"),
    ),
    "title": ("side_call", side("", last="Generate a short title for this conversation:\nFix the failing test")),
    "codex_compaction_request": (
        "continues",
        summarise(None, "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary"),
    ),
    "codex_says_compaction": (
        "continues",
        summarise(None, "summarise", metadata=ClientMetadata(thread="t", request="compaction")),
    ),
    "claude_compaction_request": (
        "continues",
        summarise(None, "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."),
    ),
    "qwen_compaction_request": (
        "subagent",
        summarise(
            "You are the component that summarizes a conversation when its context window is about to overflow.",
            "First, reason in your <analysis> block.",
        ),
    ),
    "gemini_compaction_request": (
        "subagent",
        summarise("responsible for distilling chat history into a structured XML <state_snapshot>.", "Generate."),
    ),
    "opencode_compaction_request": (
        "subagent",
        side("You are a context summarization agent. You are given a conversation"),
    ),
    "pi_compaction_request": ("subagent", side("You are a context summarization assistant. Your task is to read")),
    "cline_compaction_request": (
        "subagent",
        side("Summarize the provided coding session into a concise continuation note with detailed next steps."),
    ),
    "openhands_condenser": (
        "subagent",
        side("", last="You are maintaining a context-aware state summary for an interactive agent.\nYou will be given"),
    ),
    "terminus_handoff": (
        "continues",
        summarise(None, "You are about to hand off your work to another AI agent."),
    ),
    "responses_compaction_request": ("continues", summarise(None, INSTRUCTION)),
    "aider_summarises_chat": (
        "subagent",
        side("*Briefly* summarize this partial conversation about programming.\nInclude less detail"),
    ),
    "claude_compacted": (
        "compacts",
        compacted(user("This session is being continued from a previous conversation that ran out of context. 1. ...")),
    ),
    "codex_compacted": (
        "compacts",
        compacted(
            USER, user("Another language model started to solve this problem and produced a summary: " + SUMMARY)
        ),
    ),
    "responses_compacted": (
        "compacts",
        compacted(USER, user("The conversation up to here was compacted. This is its summary:\n\n...")),
    ),
    "pi_compacted": (
        "compacts",
        compacted(user("The conversation history before this point was compacted into the following summary:\n\n...")),
    ),
    "cline_compacted": ("compacts", compacted(user("Context summary:\n\n1. ...\n\n## Files\nRead:\n- none"))),
    "snapshot_compacted": (
        "compacts",
        compacted(user("<state_snapshot>...</state_snapshot>"), says("Got it. Thanks for the additional context!")),
    ),
    "opencode_compacted": (
        "compacts",
        compacted(user("What did we do so far?"), says(SUMMARY), user("Continue")),
    ),
    "terminus_takes_over": (
        "compacts",
        compacted(user("You are picking up work from a previous AI agent on this task:\n...")),
    ),
    "claude_cut_off": (
        "rewinds",
        cut([says("I will"), user("Your response above was cut off mid-stream. Resume directly from where it stops")]),
    ),
    "qwen_continuation_prompt": (
        "rewinds",
        cut([user("Go on.\n<previous_response_suffix>\nI will look\n</previous_response_suffix>")]),
    ),
    "gemini_masks_old_outputs": (
        "compacts",
        masked("<tool_output_masked>\nOutput too large.\n</tool_output_masked>"),
    ),
    "old_outputs_cleared": ("compacts", masked("[Old tool result content cleared]")),
}


def test_every_rule_has_an_example() -> None:
    assert set(EXAMPLES) == {rule.name for rule in RULES}
    assert len(EXAMPLES) == len(RULES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_rule_decides_its_example(name: str) -> None:
    edge, ask = EXAMPLES[name]
    found = ask()
    assert (found.rule, found.edge) == (name, edge)
    assert found.parent_call_id is not None
    assert not found.ambiguous


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_has_a_reason_and_a_source(rule: Rule) -> None:
    assert min(len(rule.reason), len(rule.seen)) > 5


def test_no_rule_applies_to_an_ordinary_run() -> None:
    session = SessionDriver()
    answer = calls(command="ls")
    session.call([SYSTEM, USER], answer, tools=tools("bash"))
    found = session.ask(SYSTEM, USER, answer, result(answer, "CONTEXT CHECKPOINT COMPACTION <state_snapshot>"))
    assert (found.edge, found.rule) == ("continues", "extends")


def test_a_summary_without_a_request_for_it_is_an_ambiguous_root() -> None:
    session = SessionDriver()
    session.call([SYSTEM, USER], says("x"))
    found = session.ask(
        SYSTEM, user("This session is being continued from a previous conversation that ran out of context")
    )
    assert (found.edge, found.parent_call_id, found.ambiguous) == ("root", None, True)


RULES_REMINDER = "# *SEARCH/REPLACE block* Rules:\n\nEvery block must use this format: ..."
TEXTS: dict[str, tuple[list[Json], list[Json]]] = {
    "claude_billing_line": (
        [system("x-anthropic-billing-header: cc_version=2.1.329; cch=aaa;You are Claude Code"), USER],
        [system("x-anthropic-billing-header: cc_version=2.1.329; cch=bbb;You are Claude Code"), USER],
    ),
    "gemini_session_context": (
        [user("<session_context>\na.py\n</session_context>"), USER],
        [user("<session_context>\na.py\nb.py\n</session_context>"), USER],
    ),
    "aider_rules_reminder": ([user("Fix it\n\n" + RULES_REMINDER)], [user("Fix it")]),
    "launch_datetime": (
        [system("The current date and time is: 2026-11-21T05:00:00.123456\nBe exact"), USER],
        [system("The current date and time is: 2026-11-21T06:00:00.654321\nBe exact"), USER],
    ),
    "launch_date": (
        [user("Today's date is 2026-11-21.\nFix it")],
        [user("Today's date is 2026-11-22.\nFix it")],
    ),
    "cache_marks": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}, "cache_control": {"a": "b"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    "string_or_blocks": ([USER], [{**USER, "content": [{"type": "text", "text": USER["content"]}]}]),
}


def test_every_text_normaliser_has_an_example() -> None:
    in_answers = {"reasoning_in_text"}  # test_histories.py
    assert {item.name for item in NORMALISERS if item.pattern is not None} - in_answers <= set(TEXTS)
    assert all(len(item.reason) > 5 and len(item.seen) > 5 for item in NORMALISERS)


@pytest.mark.parametrize("name", TEXTS)
def test_normaliser_makes_its_example_equal(name: str) -> None:
    before, after = TEXTS[name]
    answer = says("done")
    for off, rule in (((), "extends"), ((name,), "opening_regenerated")):
        session = SessionDriver(*off)
        session.call(before, answer)
        assert session.ask(*after, answer, user("more")).rule == rule
