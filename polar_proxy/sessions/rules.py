"""Rules that recognise the purpose of a call: a side call, a request for a summary, a conversation after a summary.

Rules are data: each has a name, a reason, and the harness and version whose behaviour it recognises.
`tests/sessions/test_rules.py` has an example of each. The name of the rule that decided is stored with the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from polar_proxy.sessions.hashing import text_of
from polar_proxy.sessions.identity import ClientMetadata
from polar_proxy.types import Message

_SEARCHED_CHARS = 4000
"""Number of characters, at each end of a text, in which rules look for their patterns."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Conditions that recognise the purpose of a call; all that are set must hold.

    A long text is searched only at its beginning and its end.
    """

    name: str
    reason: str
    seen: str
    system: str | None = None
    """Pattern in the system prompt."""
    first: str | None = None
    """Pattern in one of the first three user messages; only the first eight messages are examined. More than one user
    message is searched, because a summary may follow the user's own messages."""
    last: str | None = None
    """Pattern in the newest message, if it is a user message. Rules in CONTINUATIONS search the user messages among the
    first three new messages instead. Rules in MASKED search the changed tool outputs instead."""
    tools: bool | None = None
    """Whether the request has tools."""
    request_kind: str | None = None
    """The harness's own name for this kind of request, such as `compaction`."""


SIDE_CALLS = (
    Rule(
        "opencode_title",
        "A small model writes a title for the list of sessions while the main call runs.",
        "opencode 1.18.33",
        system=r"^You are a title generator\. You output ONLY a thread title",
        tools=False,
    ),
    Rule(
        "gemini_router",
        "A classifier chooses the model for the next turn.",
        "Gemini CLI 0.61.0",
        system=r"You are a specialized Task Routing AI|You are the \*\*Lead Orchestrator\*\* for an AI system",
        tools=False,
    ),
    Rule(
        "aider_commit_message",
        "A weak model writes the commit message for an edit that was already made.",
        "aider 0.86.2",
        system=r"generates concise, one-line Git commit messages",
        tools=False,
    ),
    Rule(
        "qwen_memory_extraction",
        "Facts for later sessions are extracted from the history; the run does not see the answer.",
        "Qwen Code 0.24.4",
        system=r"You are now acting as the managed memory extraction subagent",
    ),
    Rule(
        "title",
        "A call without tools asks for a title of the conversation. The agent never reads it.",
        "the pattern that several harnesses share for titles",
        last=r"(?i)^\s*(please )?(generate|create|write) a (short |concise |brief )*title for (this|the) "
        r"(conversation|chat|session)",
        tools=False,
    ),
)

COMPACTION_REQUESTS = (
    Rule(
        "codex_compaction_request",
        "The history with an instruction to write a handoff summary, without tools.",
        "Codex 0.169.0",
        last=r"CONTEXT CHECKPOINT COMPACTION",
    ),
    Rule(
        "codex_says_compaction",
        "Codex names the request in its client metadata.",
        "Codex 0.169.0",
        request_kind="compaction",
    ),
    Rule(
        "claude_compaction_request",
        "The instruction to summarise is appended to the newest message; the tools stay.",
        "Claude Code 2.1.329",
        last=r"CRITICAL: Respond with TEXT ONLY|Your task is to create a detailed summary of (the|this) conversation",
    ),
    Rule(
        "qwen_compaction_request",
        "The history under another system prompt, without tools.",
        "Qwen Code 0.24.4",
        system=r"You are the component that summarizes a conversation when its context window is about to overflow",
    ),
    Rule(
        "gemini_compaction_request",
        "The history under another system prompt, which asks for a state snapshot.",
        "Gemini CLI 0.61.0",
        system=r"distilling chat history into a structured XML <state_snapshot>",
    ),
    Rule(
        "opencode_compaction_request",
        "The transcript as text with an instruction to summarise it, without tools.",
        "opencode 1.18.33",
        system=r"^You are a context summarization agent\.",
        tools=False,
    ),
    Rule(
        "pi_compaction_request",
        "The transcript as text with an instruction to summarise it, without tools.",
        "Pi 0.87.1",
        system=r"^You are a context summarization assistant\.",
        tools=False,
    ),
    Rule(
        "cline_compaction_request",
        "The session as text, to be summarised so that it can continue, without tools.",
        "Cline CLI 3.0.65",
        system=r"^Summarize the provided coding session into a concise continuation note",
        tools=False,
    ),
    Rule(
        "openhands_condenser",
        "The older events as text, to be replaced by a summary.",
        "OpenHands SDK 1.21.0",
        last=r"^You are maintaining a context-aware state summary for an interactive agent\.",
        tools=False,
    ),
    Rule(
        "terminus_handoff",
        "The history with an instruction to hand the work over to another agent.",
        "terminus-2 of harbor 0.24.0",
        last=r"^You are about to hand off your work to another AI agent\.",
    ),
    Rule(
        "responses_compaction_request",
        "The history with the gateway's own instruction to summarise it.",
        "POST /v1/responses/compact of Polar",
        last=r"^The conversation is compacted now: everything above, except the user's messages, is replaced",
    ),
    Rule(
        "aider_summarises_chat",
        "The older part of the chat as text, to be summarised.",
        "aider 0.86.2",
        system=r"^\*Briefly\* summarize this partial conversation about programming\.",
        tools=False,
    ),
)

COMPACTED = (
    Rule(
        "responses_compacted",
        "The user's messages, then the summary after the gateway's own preamble.",
        "POST /v1/responses/compact of Polar",
        first=r"^The conversation up to here was compacted\. This is its summary:",
    ),
    Rule(
        "claude_compacted",
        "The summary replaces the conversation, in a first message that says so.",
        "Claude Code 2.1.329",
        first=r"This session is being continued from a previous conversation that ran out of context",
    ),
    Rule(
        "codex_compacted",
        "A rewritten history: the user's messages, then the summary after a fixed preamble.",
        "Codex 0.169.0",
        first=r"Another language model started to solve this problem and produced a summary",
    ),
    Rule(
        "pi_compacted",
        "The summary comes first, then what was kept of the conversation.",
        "Pi 0.87.1",
        first=r"The conversation history before this point was compacted into the following summary:",
    ),
    Rule(
        "cline_compacted",
        "The summary comes first, then the newest turns.",
        "Cline CLI 3.0.65",
        first=r"^Context summary:\n",
    ),
    Rule(
        "snapshot_compacted",
        "A state snapshot comes first, acknowledged by the agent.",
        "Qwen Code 0.24.4, Gemini CLI 0.61.0",
        first=r"<state_snapshot>",
    ),
    Rule(
        "opencode_compacted",
        "A fixed question comes first, and the summary is its answer.",
        "opencode 1.18.33",
        first=r"^\s*What did we do so far\?",
    ),
    Rule(
        "terminus_takes_over",
        "A new conversation begins with the handoff of the previous agent.",
        "terminus-2 of harbor 0.24.0",
        first=r"^You are picking up work from a previous AI agent on this task",
    ),
)

CONTINUATIONS = (
    Rule(
        "claude_cut_off",
        "The stream ended early: the text that arrived is kept, and a user message asks to continue.",
        "Claude Code 2.1.329",
        last=r"Your response above was cut off mid-stream",
    ),
    Rule(
        "qwen_continuation_prompt",
        "The stream ended early: the end of what arrived is quoted in a user message.",
        "Qwen Code 0.24.4",
        last=r"<previous_response_suffix>",
    ),
)

MASKED = (
    Rule(
        "gemini_masks_old_outputs",
        "Old tool outputs are replaced in place once the history is large, which shortens the conversation.",
        "Gemini CLI 0.61.0",
        last=r"<tool_output_masked>",
    ),
    Rule(
        "old_outputs_cleared",
        "Old tool outputs are replaced in place by a fixed text, which shortens the conversation.",
        "opencode 1.18.33, Claude Code 2.1.329",
        last=r"\[Old tool result content cleared",
    ),
)

RULES = (*SIDE_CALLS, *COMPACTION_REQUESTS, *COMPACTED, *CONTINUATIONS, *MASKED)

AGENT_TOOLS = frozenset(
    {"agent", "task", "spawn_agent", "invoke_agent", "delegate", "delegate_to_agent", "dispatch_agent", "subagent"}
    | {"codebase_investigator", "cli_help", "generalist", "browser_agent", "new_task", "use_subagents"}
    | {"delegate_task"}
)
"""Names, in lower case, of the tools that start agents in Claude Code, Qwen Code, opencode, Codex, Gemini CLI,
OpenHands, Cline and Hermes."""


@dataclass(slots=True)
class RequestTexts:
    """The parts of a request that rules examine."""

    system: str
    first: tuple[str, ...]
    last: str
    has_tools: bool

    @classmethod
    def of(cls, messages: Sequence[Message], *, has_tools: bool) -> RequestTexts:
        system: list[str] = []
        first: list[str] = []
        for message in messages[:8]:
            if message.role in ("system", "developer"):
                system.append(text_of(message))
            elif message.role == "user" and len(first) < 3:
                first.append(_ends_of(text_of(message)))
        newest = messages[-1] if messages else None
        return cls(
            system=_ends_of("\n".join(system)),
            first=tuple(first),
            last=_ends_of(text_of(newest)) if newest is not None and newest.role == "user" else "",
            has_tools=has_tools,
        )


def match(rules: Iterable[Rule], texts: RequestTexts, metadata: ClientMetadata) -> Rule | None:
    for rule in rules:
        if (
            (rule.tools is None or rule.tools == texts.has_tools)
            and (rule.request_kind is None or rule.request_kind == metadata.request)
            and (rule.system is None or _finder(rule.system)(texts.system))
            and (rule.first is None or any(map(_finder(rule.first), texts.first)))
            and (rule.last is None or _finder(rule.last)(texts.last))
        ):
            return rule
    return None


def match_changed(rules: Iterable[Rule], changed: Iterable[Message]) -> Rule | None:
    """Return the first rule whose `last` pattern is in one of the messages that changed."""
    texts = [_ends_of(text_of(message)) for message in changed]
    return next((rule for rule in rules if rule.last and any(map(_finder(rule.last), texts))), None)


@cache
def _finder(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Return the search function for a pattern. A pattern anchored at the beginning is tried only there."""
    compiled = re.compile(pattern)
    return compiled.match if pattern.startswith("^") and "|" not in pattern else compiled.search


def _ends_of(text: str) -> str:
    return text if len(text) <= 2 * _SEARCHED_CHARS else text[:_SEARCHED_CHARS] + "\n" + text[-_SEARCHED_CHARS:]
