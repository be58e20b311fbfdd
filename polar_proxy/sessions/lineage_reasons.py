"""The rules by which `lineage.py` decides how a call relates to an earlier call (the call's edge), each with its
reason. The name of the rule is stored with the call.

Rules that recognise the purpose of a call by its texts are in `rules.py`.
"""

from __future__ import annotations

from polar_proxy.sessions.rules import RULES

LINEAGE_REASONS = {
    "extends": "Its messages begin with an earlier call's messages and answer.",
    "branches": (
        "Its messages begin with an earlier call's messages and answer, but another call has already continued that "
        "answer."
    ),
    "by_call_ids": (
        "Several earlier calls have the same messages and answer; threads, ids of tool calls, or white space and "
        "reasoning show which one is extended."
    ),
    "twins": (
        "Several earlier calls have the same messages and answer, and nothing tells them apart (ambiguous: "
        "the newest that was not continued is taken)."
    ),
    "sdk_retry_header": "The client's SDK says that it sends this request again.",
    "asked_again_after_failure": "It repeats an earlier request that failed or lost its client.",
    "asked_again_in_one_run": (
        "The same agent run repeats a request just after its answer, which it did not continue: usually the "
        "connection broke unnoticed (ambiguous: it may want a second sample)."
    ),
    "same_request_again": (
        "It repeats a request that is being answered or was just answered, without evidence of a retry "
        "(ambiguous: it may be a retry, or a second run)."
    ),
    "partial_answer_kept": (
        "The history keeps the part of a failed answer that had arrived, or only the complete items of the answer."
    ),
    "answer_cut": "The history keeps only the beginning of the last answer.",
    "answer_replaced": "Another assistant turn replaces the last answer.",
    "answer_removed": "The conversation continues without the last answer.",
    "harness_says_subagent": "The harness names the call's own thread and the thread that started it.",
    "prompt_from_tool_call": "The first message is what an earlier answer passed to a tool that starts agents.",
    "prompt_from_unknown_tool": (
        "The first message quotes a long argument of an earlier call of another tool (ambiguous)."
    ),
    "opening_regenerated": (
        "All assistant turns of an earlier call are there, after a regenerated system prompt or first message."
    ),
    "messages_reworded": "All assistant turns of an earlier call are there; user messages between them were changed.",
    "outputs_changed": (
        "All assistant turns of an earlier call are there; tool outputs between them were changed (ambiguous)."
    ),
    "older_turns_dropped": (
        "The last assistant turn that was sampled is an earlier call's answer, but turns before it are missing."
    ),
    "turns_moved": (
        "The last assistant turn that was sampled is an earlier call's answer, and the turns before it are there: "
        "the harness moved or replaced other messages."
    ),
    "quotes_a_summary": "The first messages contain a summary that an earlier call wrote.",
    "quotes_an_answer": "The first messages quote a long earlier answer, which may be a summary (ambiguous).",
}
"""The reason of each rule, by the rule's name. "ambiguous" means that the call may have another edge or parent."""

_REASONS = LINEAGE_REASONS | {rule.name: f"{rule.reason} Seen in {rule.seen}." for rule in RULES}


def reason_of(rule: str | None) -> str | None:
    """Return the reason of a rule. If `rule` is None, or this version has no such rule, return None."""
    return _REASONS.get(rule or "")
