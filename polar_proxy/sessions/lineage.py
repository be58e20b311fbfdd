"""Lineage: how a call relates to the earlier calls of its session. Pure functions that change nothing.

`decide` finds the edge and the parent of a call. The first of these cases that applies decides:

1. The call repeats the request of an earlier call. It either `retries` the earlier call, or is a second sample and
   gets the same edge and parent.
2. A rule recognises the call as a side call.
3. The call's messages extend the messages and answer of an earlier call (`continues`), or only the messages of that
   call (`rewinds`).
4. The call has all assistant turns of an earlier call, but messages between them were changed: `continues`, or
   `compacts` if old tool outputs were replaced by a short text.
5. The call extends no earlier call. If it repeats a sampled answer or quotes a summary, it `continues` or `compacts`;
   otherwise it is a `subagent` or a `root`.

A decision is `ambiguous` if another edge or parent was possible as well. The name of the deciding rule, which is
from `rules.py` or `lineage_reasons.py`, is recorded.

`find_base` finds the base: the answer whose exact tokens the prompt may begin with. The base need not be the parent's
answer: the parent of a rewind is the call whose answer was taken back, and the base is the answer before that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property

from polar_proxy.sessions import rules
from polar_proxy.sessions.call_index import CallIndex, CallNode, QuoteKind
from polar_proxy.sessions.hashing import (
    AnswerNode,
    AssistantTurn,
    HashChain,
    HashedConversation,
    call_ids,
    text_of,
    without_white_space,
)
from polar_proxy.sessions.identity import ClientMetadata
from polar_proxy.sessions.rules import RequestTexts
from polar_proxy.types import ANSWERED, Edge, Message

_MIN_EVIDENCE = 40
"""An assistant turn of fewer characters may occur in two unrelated conversations."""
_OPENING = 20_000
"""The search for quotes reads at most this many characters of a message."""


@dataclass(frozen=True, slots=True)
class Base:
    """An answered call. Its messages and answer mean the same as the first `end` messages of a request."""

    call_id: str
    choice: int
    end: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """A call's relation to the earlier calls of its session."""

    call_id: str
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    """Name of the rule that decided."""
    ambiguous: bool
    """True if another edge or parent was possible as well."""
    thread: str
    """The thread of the conversation: the harness's own id for it, else the call that began it."""
    base: Base | None
    """The answer whose exact tokens the prompt may begin with."""
    conversation: HashedConversation = field(repr=False, compare=False)
    """The call's messages and their hash chain, for the session's next call."""


@dataclass(frozen=True)
class PlacementQuery:
    messages: tuple[Message, ...]
    chain: HashChain
    texts: RequestTexts
    metadata: ClientMetadata
    now: float

    def same_thread(self, node: CallNode) -> bool:
        """Return whether the call `node` may belong to the request's thread. False only if the harness named different
        threads for the two."""
        return node.client_thread is None or self.metadata.thread in (None, node.client_thread)

    def quoted(self, nodes: Iterable[CallNode], *kinds: QuoteKind) -> list[CallNode]:
        """Return the calls in `nodes` that the beginning of the conversation quotes. Only quotes of `kinds` count."""
        opening = self.opening
        found = []
        for node in nodes:  # loops, because this runs for dozens of calls with every new conversation
            for quote in node.quotes:
                if quote.kind in kinds and quote.text in opening:
                    found.append(node)
                    break
        return found

    @cached_property
    def opening(self) -> str:
        """Return the beginning of the conversation, which is searched for quotes."""
        texts = [text_of(message)[:_OPENING] for message in self.messages[:6] if message.role != "system"]
        return "\n\0\n".join(texts)  # one long text is searched faster than six


@dataclass(frozen=True, slots=True)
class Decision:
    """The edge of a call, its parent, and the rule that decided."""

    edge: Edge
    parent: CallNode | None = None
    rule: str | None = None
    _: KW_ONLY
    ambiguous: bool = False
    own_thread: bool = False
    """True if the call begins a new thread instead of continuing its parent's."""
    compaction: bool = False
    """True if the call asks for a summary."""


def decide(index: CallIndex, query: PlacementQuery, window: float) -> Decision:
    """Return the edge and parent of a request. `window`: seconds for which an answer counts as recent."""
    repeated = _repeated(index, query, window)
    if repeated is not None:
        return repeated
    extended = _extended(index, query)
    if (rule := rules.match(rules.SIDE_CALLS, query.texts, query.metadata)) is not None:
        parent = extended.parent if extended else _thread_parent(index, query)
        return Decision("side_call", parent, rule.name, own_thread=True)
    compaction = rules.match(rules.COMPACTION_REQUESTS, query.texts, query.metadata)
    if extended is None:
        return _new_conversation(index, query, compaction)
    if compaction is not None:
        # A request with another system prompt is a separate conversation, even if it contains all turns.
        if extended.rule in ("opening_regenerated", "messages_reworded", "outputs_changed"):
            return Decision("subagent", extended.parent, compaction.name, own_thread=True, compaction=True)
        return replace(extended, rule=compaction.name, compaction=True)
    if extended.parent is not None and extended.parent.compaction and extended.rule == "opening_regenerated":
        # The summary is shown as the agent's own first turn.
        compacted = rules.match(rules.COMPACTED, query.texts, query.metadata)
        return Decision("compacts", extended.parent, compacted.name if compacted else "quotes_a_summary")
    branches_off = extended.edge == "rewinds" or extended.rule == "branches"
    if branches_off and (summary := _inserted_summary(index, query)) is not None:
        return Decision("compacts", summary, "quotes_a_summary")
    return _forked(index, query, extended)


def find_base(index: CallIndex, query: PlacementQuery) -> Base | None:
    """Return the last message of the request that is an earlier call's complete answer; None if there is none.

    The messages before it must mean the same as the messages of that call.
    """
    keys = query.chain.keys
    for end in range(len(keys) - 1, 0, -1):
        if query.messages[end - 1].role != "assistant":
            continue  # a repeated tool result has the key of the first
        found = [pair for pair in index.by_conversation.get(keys[end], ()) if pair[0].state in ANSWERED]
        if found:
            node, _ = choose_parent(found, query, end)
            answer = next(answer for owner, answer in found if owner is node)
            return Base(node.call_id, node.answers.index(answer), end)
    return None


def choose_parent(
    found: Sequence[tuple[CallNode, AnswerNode]], query: PlacementQuery, end: int
) -> tuple[CallNode, bool]:
    """Return which of several matching calls the request extends, and whether the choice is ambiguous.

    `found`: the matching calls, each with the answer that the request repeats. `end`: number of the request's messages
    up to the end of this answer.
    """
    left = list(found)
    turns = query.chain.turns
    position = next((number for number, turn in enumerate(turns) if turn.end == end), None)
    tests: list[Callable[[CallNode, AnswerNode], bool]] = [lambda node, _: query.same_thread(node)]
    if position is not None:
        own = turns[position]
        tests += [
            lambda _, answer: bool(own.ids) and answer.turn.ids == own.ids,
            lambda _, answer: answer.turn.ids_chain == own.ids_chain,
            lambda _, answer: answer.turn.spelling == own.spelling,
        ]
    for test in tests:
        if len({id(node) for node, _ in left}) == 1:
            return left[-1][0], False
        passed = [pair for pair in left if test(*pair)]
        left = passed or left
    calls = list({id(node): node for node, _ in left}.values())
    if len(calls) == 1:
        return calls[0], False
    unfinished = [node for node in calls if not node.continued]
    return (unfinished or calls)[-1], True


# 1. The same request again


def _repeated(index: CallIndex, query: PlacementQuery, window: float) -> Decision | None:
    """Return the decision for a request with the same messages and tool call ids as an earlier call; None for any
    other request.
    The ids distinguish parallel runs whose messages mean the same.
    """
    found = index.by_request.get(query.chain.keys[-1], ())
    same = [node for node in found if query.same_thread(node) and node.ids_chain == query.chain.ids_chain()]
    if query.chain.turns:
        # The next attempt at a request that failed may keep more reasoning.
        equal = [node for node in same if node.spelling == query.chain.turns[-1].spelling]
        same = equal or [node for node in same if node.failed]
    if not same:
        return None
    failed = [node for node in same if node.failed and not node.retried]
    newest = failed[-1] if failed else same[-1]
    if query.metadata.retry > 0 or failed:
        rule = "sdk_retry_header" if query.metadata.retry > 0 else "asked_again_after_failure"
        return Decision("retries", newest, rule, compaction=newest.compaction)
    if (answered := _answered_in_this_run(index, query, same, window)) is not None:
        return Decision("retries", answered, "asked_again_in_one_run", ambiguous=True, compaction=answered.compaction)
    twin = same[0]
    parent = index.parent_of(twin)
    while twin.edge == "retries" and parent is not None:
        twin, parent = parent, index.parent_of(parent)
    undecided = any(node.state == "running" or query.now - node.at < window for node in same)
    return Decision(
        "root" if twin.edge == "retries" else twin.edge,
        parent,
        "same_request_again" if undecided else twin.rule,
        ambiguous=undecided,
        own_thread=parent is None or twin.edge in ("subagent", "side_call"),
        compaction=twin.compaction,
    )


def _answered_in_this_run(
    index: CallIndex, query: PlacementQuery, same: Sequence[CallNode], window: float
) -> CallNode | None:
    """Return the newest call in `same` if the request probably repeats this call, else None.

    `same`: the earlier calls whose requests equal this one. Three conditions must hold. The newest call ended less than
    `window` seconds ago. No call in `same` was continued. The request comes from the agent run that made these calls:
    the request contains tool call ids, which no two runs share, or it has an assistant turn and the session has only
    one thread.
    """
    turns = query.chain.turns
    in_one_run = any(turn.ids for turn in turns) or (turns and _single_thread(index))
    if not in_one_run or any(node.continued for node in same):
        return None
    newest = same[-1]
    return newest if newest.state != "running" and query.now - newest.at < window else None


# 3 and 4. Messages or assistant turns of an earlier call are extended


def _extended(index: CallIndex, query: PlacementQuery) -> Decision | None:
    """Return the decision for a request that contains the messages, or the assistant turns, of an earlier call."""
    keys = query.chain.keys
    answer_end, request_end = _longest_known(index, query)
    requests = [node for node in index.by_request.get(keys[request_end], ()) if query.same_thread(node)]
    for turn in reversed(query.chain.turns):
        if turn.end <= (max(answer_end, request_end) if requests else answer_end):
            break
        if turn.assistant_chain in index.assistant_chains:
            return _rewritten(index.assistant_chains[turn.assistant_chain], query, turn, max(answer_end, request_end))
    found = index.by_conversation[keys[answer_end]] if answer_end else []
    parent, ambiguous = choose_parent(found, query, answer_end) if found else (None, False)
    partial = parent is not None and parent.failed
    # A request may end with a part of a failed answer: then both end at the same message.
    if requests and (request_end > answer_end or partial) and not _summary_follows(query, request_end):
        return _rewound(requests, query, request_end)
    if parent is None:
        return None
    if partial:
        return Decision("rewinds", parent, "partial_answer_kept", ambiguous=ambiguous)
    several = len({id(node) for node, _ in found}) > 1
    rule = "twins" if ambiguous else "by_call_ids" if several else "branches" if parent.continued else "extends"
    return Decision("continues", parent, rule, ambiguous=ambiguous)


def _longest_known(index: CallIndex, query: PlacementQuery) -> tuple[int, int]:
    """Return (answer_end, request_end): how many messages at the beginning of the request are from earlier calls.

    The first `answer_end` messages are the messages and answer of an earlier call. The first `request_end` messages
    are only the messages of an earlier call, and more messages follow. Both numbers are as large as possible, and 0 if
    there is no such call. `request_end` is 0 as well if it would be less than `answer_end`.
    """
    keys = query.chain.keys
    request_end = 0
    for end in range(len(keys) - 1, 0, -1):
        if not request_end and end < len(query.messages) and keys[end] in index.by_request:
            request_end = end
        if keys[end] in index.by_conversation:
            return end, request_end
    return 0, request_end


def _summary_follows(query: PlacementQuery, same: int) -> bool:
    """Skip the first `same` messages. Return whether one of the next three has the mark of a compaction's summary.

    The mark may come in the second or third, because Codex puts the user's messages before a summary.
    """
    following = RequestTexts.of(query.messages[same : same + 3], has_tools=False)
    return rules.match(rules.COMPACTED, following, query.metadata) is not None


def _rewound(candidates: Sequence[CallNode], query: PlacementQuery, request_end: int) -> Decision:
    """Return the decision for a request that extends the messages of earlier calls, but lacks their full answers."""
    ids_chain = query.chain.ids_chain(request_end)
    left = [node for node in candidates if node.ids_chain == ids_chain] or list(candidates)
    rest = query.messages[request_end:]
    kept = [node for node in left if _keeps_part(node, rest)]
    left = kept or [node for node in left if not node.retried] or left
    left = [node for node in left if node.failed] or [node for node in left if not node.continued] or left
    parent, ambiguous = left[-1], len(left) > 1
    rule = rules.match_changed(rules.CONTINUATIONS, [message for message in rest[:3] if message.role == "user"])
    if rule is not None:
        return Decision("rewinds", parent, rule.name, ambiguous=ambiguous)
    if rest[0].role != "assistant":
        return Decision("rewinds", parent, "answer_removed", ambiguous=ambiguous)
    name = "answer_replaced" if not kept else "partial_answer_kept" if parent.failed else "answer_cut"
    return Decision("rewinds", parent, name, ambiguous=ambiguous)


def _keeps_part(node: CallNode, rest: Sequence[Message]) -> bool:
    """Return whether `rest` begins with assistant messages that keep a part of the node's answer.

    The part is the beginning of the text. If the answer failed, the part may also be some of its tool calls or its
    reasoning, because harnesses keep the complete items of a stream that breaks.
    """
    run = list(itertools.takewhile(lambda message: message.role == "assistant", rest))
    text = without_white_space("".join(map(text_of, run)))
    ids = {ident for message in run for ident in call_ids(message)}
    if ids:
        return node.failed and any(ids.issubset(answer.turn.ids) for answer in node.answers)
    if text:
        return without_white_space(node.text).startswith(text) and not any(message.tool_calls for message in run)
    return bool(run) and node.failed  # its reasoning, or nothing


def _rewritten(
    found: Sequence[tuple[CallNode, AnswerNode]], query: PlacementQuery, turn: AssistantTurn, same: int
) -> Decision:
    """Return the decision for a request that has all assistant turns of an earlier call, but not all of its messages.

    `found`: the calls with these turns. `turn`: the last of the turns. `same`: how many messages at the beginning are
    equal.
    """
    parent, ambiguous = choose_parent(found, query, turn.end)
    changed = query.messages[same : turn.end]
    outputs = [message for message in changed if message.role == "tool"]
    if (rule := rules.match_changed(rules.MASKED, outputs)) is not None:
        return Decision("compacts", parent, rule.name, ambiguous=ambiguous)
    until = next((turn.end - 1 - same for turn in query.chain.turns if turn.end > same), len(changed))
    segment = changed[:until]
    if same == 0 or not any(turn.end <= same for turn in query.chain.turns):
        # One short turn may occur in two unrelated conversations.
        weak = len(query.chain.turns) == 1 and not turn.ids and turn.length < _MIN_EVIDENCE
        return Decision("continues", parent, "opening_regenerated", ambiguous=ambiguous or weak)
    if any(message.role == "tool" for message in segment):
        return Decision("continues", parent, "outputs_changed", ambiguous=True)
    return Decision("continues", parent, "messages_reworded", ambiguous=ambiguous)


def _inserted_summary(index: CallIndex, query: PlacementQuery) -> CallNode | None:
    """Return the call whose summary replaces turns in the middle of this conversation, if there is one."""
    made = [node for node in index.compactions if query.same_thread(node) and not node.continued]
    return next(iter(query.quoted(reversed(made), "summary")), None)


def _forked(index: CallIndex, query: PlacementQuery, extended: Decision) -> Decision:
    """If the harness says that this call begins a sub-agent, return the decision for it. Otherwise return `extended`.

    A forked sub-agent starts with a copy of its parent's conversation, so its first call looks like a continuation.
    """
    parent = extended.parent
    if parent is not None and _is_new_subagent(index, query) and parent.client_thread != query.metadata.thread:
        return Decision("subagent", parent, "harness_says_subagent", own_thread=True)
    return extended


# 5. Nothing is extended


def _new_conversation(index: CallIndex, query: PlacementQuery, compaction: rules.Rule | None) -> Decision:
    """Return the decision for a call that extends no earlier call.

    `compaction`: the rule that recognised the call as a request for a summary; None if it is not such a request.
    """
    metadata = query.metadata
    if compaction is not None:
        parent = _thread_parent(index, query)
        if parent is None:
            return Decision("root", None, compaction.name, own_thread=True, compaction=True)
        sure = (
            metadata.thread in index.threads
            or bool(query.quoted([parent], "answer", "argument"))
            or _single_thread(index)
        )
        return Decision("subagent", parent, compaction.name, ambiguous=not sure, own_thread=True, compaction=True)
    if _is_new_subagent(index, query):
        parent = index.threads.get(metadata.parent_thread or "")
        return Decision("subagent", parent, "harness_says_subagent", own_thread=True)
    by_turn = _after_sampled_turn(index, query)
    summaries = [node for node in index.compactions if query.same_thread(node)]
    quoting = query.quoted(summaries, "summary")
    if by_turn is not None and by_turn.edge == "continues" and not _quotes_later(quoting, by_turn.parent):
        return by_turn
    compacted = rules.match(rules.COMPACTED, query.texts, metadata)
    if quoting or (compacted is not None and summaries):
        parent = (quoting or [node for node in summaries if not node.continued] or summaries)[-1]
        name = compacted.name if compacted is not None else "quotes_a_summary"
        return Decision("compacts", parent, name, ambiguous=not quoting and len(summaries) > 1)
    if compacted is not None:
        return Decision("root", None, compacted.name, ambiguous=True, own_thread=True)
    return by_turn or _root_or_quoted(index, query)


def _quotes_later(quoting: Sequence[CallNode], turn: CallNode | None) -> bool:
    """Return whether a call in `quoting` is later than the call `turn`. `quoting`: calls whose summary the request
    quotes."""
    return turn is not None and any(summary.at > turn.at for summary in quoting)


def _after_sampled_turn(index: CallIndex, query: PlacementQuery) -> Decision | None:
    """Return the decision for a request that repeats the answer of an earlier call, and so follows that call; None for
    any other request.

    If the request repeats several answers, the last one decides, wherever it is in the request. Assistant messages that
    a harness writes itself, such as examples and "Ok.", are skipped, because they are not answers of calls.
    """
    for turn in reversed(query.chain.turns):
        found = index.exchanges.get((turn.digest, turn.ids)) or index.exchanges.get(turn.exchange) or []
        if found := [node for node in found if query.same_thread(node)]:
            open_ends = [node for node in found if not node.continued] or found
            parent, ambiguous = open_ends[-1], len(open_ends) > 1
            if _misses_turns(index, parent, {other.digest for other in query.chain.turns}):
                return Decision("compacts", parent, "older_turns_dropped", ambiguous=ambiguous)
            return Decision("continues", parent, "turns_moved", ambiguous=ambiguous)
    return None


def _misses_turns(index: CallIndex, node: CallNode, turns: Collection[bytes]) -> bool:
    """Return whether the conversation that `node` continues has an earlier answer that is not in `turns` (digests)."""
    parent = index.parent_of(node)
    while parent is not None and node.edge in ("continues", "retries", "rewinds"):
        if node.edge == "continues" and not any(answer.turn.digest in turns for answer in parent.answers):
            return True
        node, parent = parent, index.parent_of(parent)
    return False


def _root_or_quoted(index: CallIndex, query: PlacementQuery) -> Decision:
    """Return the decision for a new conversation: a sub-agent if it begins with a tool call's prompt, else a root.

    The root is ambiguous if its first messages quote an earlier answer.
    """
    if not any(message.role == "assistant" for message in query.messages):
        if callers := query.quoted(index.quotable, "agent_prompt"):
            idle = [node for node in callers if not node.continued] or callers
            return Decision("subagent", idle[-1], "prompt_from_tool_call", ambiguous=len(idle) > 1, own_thread=True)
        if query.quoted(index.quotable, "argument"):
            return Decision("root", None, "prompt_from_unknown_tool", ambiguous=True, own_thread=True)
    if query.quoted(index.quotable, "answer"):
        return Decision("root", None, "quotes_an_answer", ambiguous=True, own_thread=True)
    return Decision("root", own_thread=True)


def _is_new_subagent(index: CallIndex, query: PlacementQuery) -> bool:
    """Return whether the harness names a sub-agent whose thread has no call yet."""
    return query.metadata.subagent is not None and query.metadata.thread not in index.threads


def _thread_parent(index: CallIndex, query: PlacementQuery) -> CallNode | None:
    """Return the newest call of the thread that the request names.

    If that thread has no call, return the session's newest call, or None if the newest call belongs to another
    named thread.
    """
    named = index.threads.get(query.metadata.thread or "")
    newest = index.newest
    if named is None and newest is not None and not query.same_thread(newest):
        return None
    return named or newest


def _single_thread(index: CallIndex) -> bool:
    """Return whether the session has one thread, apart from side calls."""
    return len({node.thread for node in index.by_id.values() if node.edge != "side_call"}) == 1
