"""The history of one session: places each call as it comes, and is told how it ended.

`place` is called before a call is sampled and `ended` when its answer is complete, before the client has its last
byte: so the next call of the same run always finds it. What `ended` returns is stored with the call, and `rebuild`
makes the same history of it after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from polar_proxy.sessions.base import Base, find_base
from polar_proxy.sessions.call_index import AnswerNode, CallIndex, CallNode, fingerprint_of, node_from_store, quotes_of
from polar_proxy.sessions.client_metadata import NO_METADATA, ClientMetadata
from polar_proxy.sessions.hashing import HashedConversation, MessageHasher, call_ids, ids_digest, message_of, text_of
from polar_proxy.sessions.lineage import PlacementQuery, decide
from polar_proxy.sessions.normalisers import ActiveNormalisers
from polar_proxy.sessions.rules import RequestTexts
from polar_proxy.types import CallStatus, ChatRequest, Edge, EngineRequest, Json, Message, StoredLineage

_TEXTS = 32
"""Answers whose text is kept, to tell a cut answer from a replaced one."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a call stands. `rule` names what decided; `ambiguous`: something else was possible as well."""

    call_id: str
    edge: Edge
    parent_call_id: str | None
    rule: str | None
    ambiguous: bool
    thread: str
    """The line of conversation: the harness's own id of it, else the call that began it."""
    base: Base | None = None
    """The answer whose exact tokens its prompt may begin with."""
    read: HashedConversation | None = field(default=None, repr=False, compare=False)
    """The conversation as it was read: for the next call of its session."""


class SessionHistory:
    """`off` names normalisers that are not to be used; `window` is how many seconds "just answered" lasts."""

    def __init__(self, off: Iterable[str] = (), *, window: float = 10.0) -> None:
        self._meaning = MessageHasher(ActiveNormalisers(off))
        self._memory = CallIndex()
        self._window = window
        self._texts: deque[CallNode] = deque()

    def place(
        self,
        call_id: str,
        request: EngineRequest,
        hints: ClientMetadata = NO_METADATA,
        *,
        now: float,
        read: HashedConversation | None = None,
    ) -> Lineage:
        """The edge of this call, which from now on is known to be in flight. `now` in seconds since the epoch.

        `read` is what an earlier `place` of this history gave: messages that are the same objects are not read again.
        """
        messages = _messages(request)
        chain = self._meaning.chain(messages, read)
        view = RequestTexts.of(messages, request if isinstance(request, ChatRequest) else None)
        asking = PlacementQuery(messages, chain, view, hints, now)
        found = decide(self._memory, asking, self._window)
        base = find_base(self._memory, asking)
        parent = found.parent
        thread = hints.thread or (call_id if parent is None or found.own_thread else parent.thread)
        if found.edge == "side_call":
            thread = call_id
        known = CallNode(
            call_id=call_id,
            thread=thread,
            client_thread=hints.thread,
            edge=found.edge,
            parent_call_id=None if parent is None else parent.call_id,
            rule=found.rule,
            asked=chain.keys[-1],
            assistant_chain=chain.assistant_chain,
            ids=ids_digest(turn.ids for turn in chain.turns),
            at=now,
            compaction=found.compaction,
        )
        self._count(known, parent)
        self._memory.add(known)
        read = HashedConversation(messages, chain)
        return Lineage(call_id, known.edge, known.parent_call_id, found.rule, found.ambiguous, thread, base, read)

    def ended(self, place: Lineage, answers: Sequence[Json], status: CallStatus, *, now: float) -> Json:
        """Remember the answers (OpenAI assistant messages) of a call, partial ones of a failed call too.

        Returns the fingerprint to store with the call."""
        known = self._memory.by_id[place.call_id]
        said = [message_of(answer) for answer in answers]
        if status not in ("ok", "no_tokens"):  # of which nothing may have arrived
            said = [message for message in said if message.tool_calls or text_of(message).strip()]
        known.state, known.at = status, now
        known.answers = tuple(self._heard(known, message) for message in said)
        known.quotes = quotes_of(said, known.compaction)
        known.text = text_of(said[0]) if said else ""
        self._texts.append(known)
        if len(self._texts) > _TEXTS:
            self._texts.popleft().text = ""
        self._memory.answered(known)
        return fingerprint_of(known)

    def rebuild(self, calls: Iterable[StoredLineage]) -> None:
        """Know again the calls that the store gives back, in the order in which they started. Linear in their number.

        Calls that were stored under other normalisers are kept, but no message leads to them."""
        for row in calls:
            known = node_from_store(row)
            if known is None or known.call_id in self._memory.by_id:
                continue
            parent = self._memory.by_id.get(known.parent_call_id or "")
            self._count(known, parent)
            self._memory.add(known)
            self._memory.answered(known)

    @property
    def known(self) -> Collection[str]:
        """The ids of the calls that it knows, those in flight included."""
        return self._memory.by_id.keys()

    def _heard(self, known: CallNode, answer: Message) -> AnswerNode:
        end, assistant_chain, said = self._meaning.after(known.asked, known.assistant_chain, answer)
        length = len(text_of(answer)) + sum(len(call.arguments) for call in answer.tool_calls)
        return AnswerNode(end, assistant_chain, said, call_ids(answer), length)

    def _count(self, known: CallNode, parent: CallNode | None) -> None:
        if parent is None:
            return
        if known.edge == "retries":
            parent.asked_again = True
        elif known.edge in ("continues", "compacts", "rewinds"):
            parent.continued += 1


def _messages(request: EngineRequest) -> tuple[Message, ...]:
    """What is compared: the messages, or a raw prompt as one."""
    if isinstance(request, ChatRequest):
        return request.messages
    prompt = request.prompt
    return (Message("prompt", prompt if isinstance(prompt, str) else " ".join(map(str, prompt))),)
