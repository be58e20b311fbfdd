"""The rules by which a call is related to earlier calls, each with its reason in words.

The names are stored with the calls. `lineage` decides by the rules of `REASONS`; `rules` recognises harnesses.
"""

from __future__ import annotations

from polar_proxy.sessions.rules import RULES

REASONS = {
    "extends": "Its messages begin with an earlier call's messages and its answer.",
    "branches": "Its messages extend an earlier call's answer that another call has already continued.",
    "by_call_ids": "Several earlier calls have the same messages and answer; ids of tool calls or threads show which "
    "one is extended.",
    "twins": "Several earlier calls have the same messages and answer, and nothing tells them apart; the newest that "
    "was not continued is taken.",
    "sdk_retry_header": "The client's SDK says that it sends this request again.",
    "asked_again_after_failure": "The same request again after the first one failed or lost its client.",
    "asked_again_in_one_run": "The same agent run repeats a request just after its answer, which it did not continue: "
    "usually the connection broke unnoticed.",
    "same_request_again": "The same request while the first is being answered or was just answered, without evidence "
    "that it is a retry; it may be one, or a second run.",
    "partial_answer_kept": "The history keeps a failed answer as far as it arrived, or the items of it that were "
    "complete.",
    "answer_cut": "The history keeps only the beginning of the last answer.",
    "answer_replaced": "Another assistant turn replaces the last answer.",
    "answer_removed": "The conversation continues without the last answer.",
    "harness_says_subagent": "The harness names the call's own thread and the thread that started it.",
    "prompt_from_tool_call": "The first message is what an earlier answer passed to a tool that starts agents.",
    "prompt_from_unknown_tool": "The first message quotes a long argument of an earlier call of another tool.",
    "opening_regenerated": "All assistant turns are there, after a regenerated system prompt or first message.",
    "messages_reworded": "All assistant turns are there; user messages between them were changed.",
    "outputs_changed": "All assistant turns are there; tool outputs between them were changed.",
    "older_turns_dropped": "The last assistant turn that was sampled is an earlier call's answer, but turns before it "
    "are missing.",
    "turns_moved": "The last assistant turn that was sampled is an earlier call's answer; the harness moved or "
    "replaced other messages.",
    "quotes_a_summary": "The first messages contain a summary that an earlier call wrote.",
    "quotes_an_answer": "The first messages quote a long earlier answer, which may be a summary.",
}
"""The rules of `lineage`. Those of `rules` have their reasons there."""


def reason_of(rule: str | None) -> str | None:
    """Return the reason of a stored rule; None if no rule decided, or for a rule of another version of Polar."""
    own = {one.name: one.reason for one in RULES}
    return None if rule is None else REASONS.get(rule) or own.get(rule)
