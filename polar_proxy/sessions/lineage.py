"""Which edge a request has: the decision itself, from what is known of the session. Reads only, changes nothing.

In this order, the first that holds:

1. the same request again (`retries`, or a twin that is marked ambiguous);
2. a side call, by rule;
3. its messages extend an earlier call's messages and answer (`continues`), or its messages without the answer
   (`rewinds`);
4. its assistant turns extend an earlier call's, but what stands between them was changed;
5. nothing is extended: a sub-agent, a compaction, or a `root`.

What cannot be told is `ambiguous`, with the rule as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polar_proxy.sessions import rules
from polar_proxy.sessions.call_index import AnswerNode, CallIndex, CallNode, QuoteKind
from polar_proxy.sessions.client_metadata import ClientMetadata
from polar_proxy.sessions.hashing import AssistantTurn, HashChain, ids_digest, text_of
from polar_proxy.sessions.rules import RequestTexts
from polar_proxy.types import Edge, Message

_OPENING = 20_000
"""Characters of each of the first messages in which quotes are looked for."""


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """A request to place."""

    messages: tuple[Message, ...]
    chain: HashChain
    view: RequestTexts
    hints: ClientMetadata
    now: float

    def compatible(self, known: CallNode) -> bool:
        """Not known to be of another thread by the harness's own word."""
        return known.client_thread is None or self.hints.thread is None or known.client_thread == self.hints.thread

    def quotes(self, known: CallNode, *kinds: QuoteKind) -> bool:
        return quoted(self.opening(), known, *kinds)

    def opening(self) -> str:
        """Where a quote would stand. To look for many, take it once."""
        texts = [text_of(message)[:_OPENING] for message in self.messages[:6] if message.role != "system"]
        return "\n\0\n".join(texts)  # as one, which is searched faster than six


def quoted(opening: str, known: CallNode, *kinds: QuoteKind) -> bool:
    """Whether an opening holds what this call's answer said."""
    return any(quote.text in opening for quote in known.quotes if quote.kind in kinds)


def _quoted_anywhere(opening: str, memory: CallIndex, kind: QuoteKind) -> bool:
    """Whether an opening holds what any recent answer said."""
    return any(quote.text in opening for known in memory.quotable for quote in known.quotes if quote.kind == kind)


@dataclass(frozen=True, slots=True)
class Decision:
    edge: Edge
    parent: CallNode | None = None
    rule: str | None = None
    ambiguous: bool = False
    own_thread: bool = False
    """It begins a line of conversation instead of going on with its parent's."""
    compaction: bool = False
    retried: CallNode | None = None


def decide(memory: CallIndex, asking: PlacementQuery, window: float) -> Decision:
    found = _again(memory, asking, window)
    if found is not None:
        return found
    extended = _extended(memory, asking)
    if (rule := rules.match(rules.SIDE_CALLS, asking.view, asking.hints)) is not None:
        parent = extended.parent if extended else _thread_parent(memory, asking)
        return Decision("side_call", parent, rule.name, own_thread=True)
    request = rules.match(rules.COMPACTION_REQUESTS, asking.view, asking.hints)
    if extended is not None:
        if request is not None:
            # Its own system prompt makes it a conversation of its own, though the turns are all there.
            own = extended.rule in ("opening_regenerated", "messages_reworded", "outputs_changed")
            edge: Edge = "subagent" if own else extended.edge
            return Decision(edge, extended.parent, request.name, extended.ambiguous and not own, own, True)
        if extended.parent is not None and extended.parent.compaction and extended.rule == "opening_regenerated":
            # The summary is told as the agent's own first turn.
            name = compacted.name if (compacted := rules.match(rules.COMPACTED, asking.view, asking.hints)) else None
            return Decision("compacts", extended.parent, name or "quotes_a_summary")
        leaves = extended.edge == "rewinds" or extended.rule == "branches"
        if leaves and (summary := _summarised(memory, asking)) is not None:
            return Decision("compacts", summary, "quotes_a_summary")
        return _forked(memory, asking, extended)
    return _fresh(memory, asking, request)


def _again(memory: CallIndex, asking: PlacementQuery, window: float) -> Decision | None:
    """The same messages as an earlier call's, to the ids of tool calls (which tell parallel runs apart)."""
    same = [known for known in memory.asked.get(asking.chain.keys[-1], ()) if asking.compatible(known)]
    if not same:
        return None
    ids = ids_digest(turn.ids for turn in asking.chain.turns)
    same = [known for known in same if known.ids == ids]
    if not same:
        return None
    failed = [known for known in same if known.failed and not known.asked_again]
    newest = failed[-1] if failed else same[-1]
    if asking.hints.retry > 0 or failed:
        rule = "sdk_retry_header" if asking.hints.retry > 0 else "asked_again_after_failure"
        return Decision("retries", newest, rule, compaction=newest.compaction, retried=newest)
    if (first := _asked_in_this_run(memory, asking, same, window)) is not None:
        return Decision("retries", first, "asked_again_in_one_run", True, compaction=first.compaction, retried=first)
    twin = same[0]
    while twin.edge == "retries" and twin.parent_call_id in memory.by_id:
        twin = memory.by_id[twin.parent_call_id]
    parent = memory.by_id.get(twin.parent_call_id) if twin.parent_call_id else None
    open_question = any(known.state == "running" or asking.now - known.at < window for known in same)
    return Decision(
        "root" if twin.edge == "retries" else twin.edge,
        parent,
        "same_request_again" if open_question else twin.rule,
        open_question,
        own_thread=parent is None or twin.edge in ("subagent", "side_call"),
        compaction=twin.compaction,
    )


def _asked_in_this_run(
    memory: CallIndex, asking: PlacementQuery, same: Sequence[CallNode], window: float
) -> CallNode | None:
    """The call of this very run that just answered the same, where the run has not gone on from its answer.

    That it is the same run is known by the ids of its tool calls, which no two answers share, or because the session
    has no other run in it."""
    turns = asking.chain.turns
    if not turns:
        return None
    ids = ids_digest(turn.ids for turn in turns) if any(turn.ids for turn in turns) else None
    if ids is None and not _alone(memory):
        return None
    mine = [known for known in same if ids is None or known.ids == ids]
    if not mine or any(known.continued for known in mine):
        return None
    newest = mine[-1]
    return newest if newest.state != "running" and asking.now - newest.at < window else None


def _extended(memory: CallIndex, asking: PlacementQuery) -> Decision | None:
    """The earlier call that this one goes on from: the deepest that its messages, or its assistant turns, contain."""
    keys = asking.chain.keys
    end = asked = 0
    for index in range(len(keys) - 1, 0, -1):
        if keys[index] in memory.ends:
            end = index
            break
        if not asked and index < len(asking.messages) and keys[index] in memory.asked:
            asked = index
    asked_before = [known for known in memory.asked.get(keys[asked], ()) if asking.compatible(known)] if asked else []
    for turn in reversed(asking.chain.turns):
        if turn.end <= max(end, asked if asked_before else 0):
            break
        if turn.assistant_chain in memory.assistant_chains:
            return _rewritten(memory.assistant_chains[turn.assistant_chain], asking, turn, max(end, asked))
    if asked_before and not _opens_anew(asking, asked):
        return _rewound(asked_before, asking, asked)
    if not end:
        return None
    parent, sure = choose_parent(memory.ends[keys[end]], asking, end)
    if parent.state not in ("ok", "no_tokens", "running"):
        return Decision("rewinds", parent, "partial_answer_kept", not sure)
    several = len({id(known) for known, _ in memory.ends[keys[end]]}) > 1
    rule = "twins" if not sure else "by_call_ids" if several else "branches" if parent.continued else "extends"
    return Decision("continues", parent, rule, not sure)


def _opens_anew(asking: PlacementQuery, same: int) -> bool:
    """What follows the first `same` messages is a summary (Codex keeps what the user said in front of it)."""
    return (
        rules.match(rules.COMPACTED, RequestTexts.of(asking.messages[same : same + 3], None), asking.hints) is not None
    )


def choose_parent(
    found: Sequence[tuple[CallNode, AnswerNode]], asking: PlacementQuery, end: int
) -> tuple[CallNode, bool]:
    """Of calls whose conversations mean the same the one that is extended, and whether that is sure."""
    left = list(found)
    turns = asking.chain.turns
    position = next((number for number, turn in enumerate(turns) if turn.end == end), None)
    tests: list[Callable[[CallNode, AnswerNode], bool]] = [lambda known, _: asking.compatible(known)]
    if position is not None:
        own = turns[position].ids
        before = ids_digest(turn.ids for turn in turns[:position])
        tests += [lambda _, heard: bool(own) and heard.ids == own, lambda known, _: known.ids == before]
    for test in tests:
        if len({id(known) for known, _ in left}) == 1:
            return left[-1][0], True
        passed = [pair for pair in left if test(*pair)]
        left = passed or left
    calls = list({id(known): known for known, _ in left}.values())
    if len(calls) == 1:
        return calls[0], True
    unfinished = [known for known in calls if not known.continued]
    return (unfinished or calls)[-1], False


def _rewound(candidates: Sequence[CallNode], asking: PlacementQuery, asked: int) -> Decision:
    """The conversation of an earlier call, but not its answer."""
    ids = ids_digest(turn.ids for turn in asking.chain.turns if turn.end <= asked)
    left = [known for known in candidates if known.ids == ids] or list(candidates)
    left = [known for known in left if known.failed] or [known for known in left if not known.continued] or left
    parent = left[-1]
    rest = asking.messages[asked:]
    rule = rules.match_changed(rules.CONTINUATIONS, [message for message in rest[:3] if message.role == "user"])
    if rule is not None:
        return Decision("rewinds", parent, rule.name, len(left) > 1)
    if rest[0].role != "assistant":
        return Decision("rewinds", parent, "answer_removed", len(left) > 1)
    kept = text_of(rest[0]).rstrip()
    cut = bool(kept) and not rest[0].tool_calls and len(kept) < len(parent.text) and parent.text.startswith(kept)
    return Decision("rewinds", parent, "answer_cut" if cut else "answer_replaced", len(left) > 1)


def _rewritten(
    found: Sequence[tuple[CallNode, AnswerNode]], asking: PlacementQuery, turn: AssistantTurn, same: int
) -> Decision:
    """All assistant turns of an earlier call, in messages that differ after the first `same`."""
    parent, sure = choose_parent(found, asking, turn.end)
    changed = asking.messages[same : turn.end]
    outputs = [message for message in changed if message.role == "tool"]
    if (rule := rules.match_changed(rules.MASKED, outputs)) is not None:
        return Decision("compacts", parent, rule.name, not sure)
    until = next((turn.end - 1 - same for turn in asking.chain.turns if turn.end > same), len(changed))
    segment = changed[:until]
    if same == 0 or not any(turn.end <= same for turn in asking.chain.turns):
        # One short turn may be said in two conversations that have nothing to do with each other.
        weak = len(asking.chain.turns) == 1 and not turn.ids and turn.length < 40
        return Decision("continues", parent, "opening_regenerated", not sure or weak)
    if any(message.role == "tool" for message in segment):
        return Decision("continues", parent, "outputs_changed", True)
    return Decision("continues", parent, "messages_reworded", not sure)


def _summarised(memory: CallIndex, asking: PlacementQuery) -> CallNode | None:
    """A summary that was made and not used yet, where it stands behind the first turns of a conversation: the turns in
    the middle are what it replaces."""
    made = [known for known in memory.compactions if asking.compatible(known) and not known.continued]
    return next((known for known in reversed(made) if asking.quotes(known, "summary")), None)


def _forked(memory: CallIndex, asking: PlacementQuery, extended: Decision) -> Decision:
    """A sub-agent that starts with its parent's conversation extends it, in a thread of its own."""
    hints, parent = asking.hints, extended.parent
    if (
        hints.subagent is None
        or hints.thread in memory.threads
        or parent is None
        or parent.client_thread == hints.thread
    ):
        return extended
    return Decision("subagent", parent, "harness_says_subagent", own_thread=True)


def _fresh(memory: CallIndex, asking: PlacementQuery, request: rules.Rule | None) -> Decision:
    """A call that extends nothing."""
    hints = asking.hints
    if request is not None:
        parent = _thread_parent(memory, asking)
        if parent is None:
            return Decision("root", None, request.name, own_thread=True, compaction=True)
        sure = hints.thread in memory.threads or asking.quotes(parent, "answer", "argument") or _alone(memory)
        return Decision("subagent", parent, request.name, not sure, True, True)
    if hints.subagent is not None and hints.thread not in memory.threads:
        parent = memory.threads.get(hints.parent_thread or "")
        return Decision("subagent", parent, "harness_says_subagent", own_thread=True)
    compacted = rules.match(rules.COMPACTED, asking.view, hints)
    summaries = [known for known in memory.compactions if asking.compatible(known)]
    told = [known for known in summaries if asking.quotes(known, "summary")]
    if told or (compacted is not None and summaries):
        parent = (told or [known for known in summaries if not known.continued] or summaries)[-1]
        name = compacted.name if compacted is not None else "quotes_a_summary"
        return Decision("compacts", parent, name, not told and len(summaries) > 1)
    if compacted is not None:
        return Decision("root", None, compacted.name, True, own_thread=True)
    if asking.chain.turns:
        last = asking.chain.turns[-1]
        before = memory.said.get((last.said, last.ids))
        if before is not None and asking.compatible(before):
            return Decision("compacts", before, "older_turns_dropped")
    return _quoting(memory, asking)


def _quoting(memory: CallIndex, asking: PlacementQuery) -> Decision:
    """A root, unless its first messages are what an earlier answer said."""
    opening = asking.opening()
    if not any(message.role == "assistant" for message in asking.messages):
        if _quoted_anywhere(opening, memory, "agent_prompt"):
            callers = [known for known in memory.quotable if quoted(opening, known, "agent_prompt")]
            idle = [known for known in callers if not known.continued] or callers
            return Decision("subagent", idle[-1], "prompt_from_tool_call", len(idle) > 1, own_thread=True)
        if _quoted_anywhere(opening, memory, "argument"):
            return Decision("root", None, "prompt_from_unknown_tool", True, own_thread=True)
    if _quoted_anywhere(opening, memory, "answer"):
        return Decision("root", None, "quotes_an_answer", True, own_thread=True)
    return Decision("root", own_thread=True)


def _thread_parent(memory: CallIndex, asking: PlacementQuery) -> CallNode | None:
    """The newest call of the harness's own thread, or of the session where it names none."""
    named = memory.threads.get(asking.hints.thread or "")
    newest = memory.newest
    if named is None and newest is not None and not asking.compatible(newest):
        return None
    return named or newest


def _alone(memory: CallIndex) -> bool:
    """One line of conversation in the session: nothing to mix up."""
    return len({known.thread for known in memory.by_id.values() if known.edge != "side_call"}) == 1
