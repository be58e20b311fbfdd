"""The history of one session: decides the lineage of each call as it comes, and records how it was answered.

`place` is called before a call is sampled, `record_answer` when its answer is complete and before the client has its
last byte. So the next call of the same run always finds it. The fingerprint that `record_answer` returns is stored with
the call, and `rebuild` makes the same history from the stored fingerprints after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from polar_proxy.sessions.call_index import AnswerNode, CallIndex, CallNode, fingerprint_of, node_from_store, quotes_of
from polar_proxy.sessions.client_metadata import NO_METADATA, ClientMetadata
from polar_proxy.sessions.hashing import (
    HashedConversation,
    MessageHasher,
    call_ids,
    ids_digest,
    text_length,
    text_of,
)
from polar_proxy.sessions.lineage import Lineage, PlacementQuery, decide, find_base
from polar_proxy.sessions.normalisers import ActiveNormalisers
from polar_proxy.sessions.rules import RequestTexts
from polar_proxy.types import CallStatus, ChatRequest, EngineRequest, Json, Message, StoredLineage

_RECENT_TEXTS = 32
"""Answers whose text is kept, to distinguish a cut answer from a replaced one."""


class SessionHistory:
    """`normalisers_off` are not used; `window` is for how many seconds an answer counts as just given."""

    def __init__(self, normalisers_off: Iterable[str] = (), *, window: float = 10.0) -> None:
        self._hasher = MessageHasher(ActiveNormalisers(normalisers_off))
        self._index = CallIndex()
        self._window = window
        self._with_text: deque[CallNode] = deque()

    def place(
        self,
        call_id: str,
        request: EngineRequest,
        metadata: ClientMetadata = NO_METADATA,
        *,
        now: float,
        previous: HashedConversation | None = None,
    ) -> Lineage:
        """Decide the lineage of a call, and register it as in flight. `now` is in seconds since the epoch.

        `previous` is the conversation of an earlier `place`: messages that are the same objects are not hashed again.
        """
        messages = _messages(request)
        chain = self._hasher.chain(messages, previous)
        texts = RequestTexts.of(messages, request if isinstance(request, ChatRequest) else None)
        query = PlacementQuery(messages, chain, texts, metadata, now)
        decision = decide(self._index, query, self._window)
        base = find_base(self._index, query)
        parent = decision.parent
        thread = metadata.thread or (call_id if parent is None or decision.own_thread else parent.thread)
        if decision.edge == "side_call":
            thread = call_id
        node = CallNode(
            call_id=call_id,
            thread=thread,
            client_thread=metadata.thread,
            edge=decision.edge,
            parent_call_id=None if parent is None else parent.call_id,
            rule=decision.rule,
            asked=chain.keys[-1],
            assistant_chain=chain.assistant_chain,
            ids=ids_digest(turn.ids for turn in chain.turns),
            at=now,
            compaction=decision.compaction,
        )
        _count_child(node, parent)
        self._index.add(node)
        return Lineage(
            call_id,
            node.edge,
            node.parent_call_id,
            decision.rule,
            decision.ambiguous,
            thread,
            base,
            HashedConversation(messages, chain),
        )

    def record_answer(self, lineage: Lineage, answers: Sequence[Message], status: CallStatus, *, now: float) -> Json:
        """Record the answers of a call, including partial ones of a failed call. Return the fingerprint to store."""
        node = self._index.by_id[lineage.call_id]
        if status not in ("ok", "no_tokens"):  # nothing may have arrived
            answers = [answer for answer in answers if answer.tool_calls or text_of(answer).strip()]
        node.state, node.at = status, now
        node.answers = tuple(self._answer_node(node, answer) for answer in answers)
        node.quotes = quotes_of(answers, node.compaction)
        node.text = text_of(answers[0]) if answers else ""
        self._with_text.append(node)
        if len(self._with_text) > _RECENT_TEXTS:
            self._with_text.popleft().text = ""
        self._index.add_answers(node)
        return fingerprint_of(node)

    def rebuild(self, calls: Iterable[StoredLineage]) -> None:
        """Add stored calls, in the order in which they started. Calls that are known already are skipped.

        Calls that were stored under other normalisers are added, but no message leads to them.
        """
        for row in calls:
            node = node_from_store(row)
            if node is None or node.call_id in self._index.by_id:
                continue
            _count_child(node, self._index.by_id.get(node.parent_call_id or ""))
            self._index.add(node)
            self._index.add_answers(node)

    @property
    def call_ids(self) -> Collection[str]:
        """The ids of all its calls, including those in flight."""
        return self._index.by_id.keys()

    def _answer_node(self, node: CallNode, answer: Message) -> AnswerNode:
        end, assistant_chain, digest = self._hasher.extend(node.asked, node.assistant_chain, answer)
        return AnswerNode(end, assistant_chain, digest, call_ids(answer), text_length(answer))


def _count_child(node: CallNode, parent: CallNode | None) -> None:
    if parent is None:
        return
    if node.edge == "retries":
        parent.retried = True
    elif node.edge in ("continues", "compacts", "rewinds"):
        parent.continued += 1


def _messages(request: EngineRequest) -> tuple[Message, ...]:
    """Return the messages to compare. A raw prompt counts as one message."""
    if isinstance(request, ChatRequest):
        return request.messages
    prompt = request.prompt
    return (Message("prompt", prompt if isinstance(prompt, str) else " ".join(map(str, prompt))),)
