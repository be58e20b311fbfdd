"""The state of one session in a gateway.

`place` adds a call to the index of calls before the call is sampled. `record_answer` adds the answer when it has ended,
before the client gets the last byte. So the agent's next call always finds this call. The fingerprint that
`record_answer` returns is stored with the call. After a restart, `rebuild` rebuilds the index from the stored
fingerprints.

Digests of all calls are kept as long as the session is in memory. The session's last request, and the tokens of answers
that no call has continued yet, need more memory. They are held in a `ConversationCache`, which all sessions of a
gateway share. The least recently used entries are dropped first; when needed, a dropped request is parsed again, and
dropped tokens are read from the store.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cachetools import LRUCache

from polar_proxy.dialects.base import ParsedRequest
from polar_proxy.sessions.budget import BudgetUsage
from polar_proxy.sessions.call_index import CallIndex, CallNode, fingerprint_of, node_from_store, quotes_of
from polar_proxy.sessions.hashing import (
    EMPTY,
    HashedConversation,
    MessageHasher,
    text_and_reasoning,
    text_length,
    text_of,
)
from polar_proxy.sessions.identity import NO_METADATA, ClientMetadata
from polar_proxy.sessions.lineage import Base, Lineage, PlacementQuery, decide, find_base
from polar_proxy.sessions.rules import RequestTexts
from polar_proxy.store.repositories.calls import StoredLineage
from polar_proxy.types import (
    ANSWERED,
    CallRecord,
    CallStatus,
    ChatRequest,
    Choice,
    EngineRequest,
    Json,
    Message,
    TokenIds,
)

_REQUEST_BYTES, _MESSAGE_BYTES, _ANSWER_BYTES = 4096, 600, 1024
"""Measured memory of a cached request, of each of its messages, and of an answer, in bytes. The memory of texts and
tokens is added to these numbers."""
_REASONING_PREFIX = 80
"""Number of characters that are kept from the start of an answer's reasoning. These characters show whether a later
prompt contains the reasoning."""
_RECENT_TEXTS = 32
"""Number of newest answers whose text is kept. The text shows whether a later request repeats a part of the answer or
replaces the answer."""


class PromptConfig(NamedTuple):
    """Digests of what determines a prompt besides the messages: the tools and the options of the chat template."""

    tools: bytes
    options: bytes


class HashedRequest(NamedTuple):
    conversation: HashedConversation
    texts: RequestTexts


@dataclass(frozen=True, slots=True)
class LastRequest:
    """A parsed request and its hashed conversation. The session's next request usually begins with the same
    messages."""

    dialect: str
    parsed: ParsedRequest
    conversation: HashedConversation
    text_bytes: int
    """Size of the messages in bytes. The parsed messages take about the same amount of memory again."""

    @property
    def size(self) -> int:
        return _REQUEST_BYTES + 2 * self.text_bytes + _MESSAGE_BYTES * len(self.conversation.messages)


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """The tokens of an answered call, and the facts that decide whether a later prompt can continue these tokens."""

    ids: TokenIds
    """Token ids of prompt and answer, int32 [n]."""
    prompt_size: int
    """Number of ids of the prompt, with which `ids` begins."""
    finish_reason: str | None
    stop: tuple[str, ...]
    """The stop strings of the call's request."""
    engine_name: str | None
    """The engine that sampled the answer, as in `CallRecord`."""
    config: PromptConfig
    reasoning: tuple[str, ...]
    """Beginnings of the reasoning texts of this answer and of earlier answers, by which the texts are recognised."""

    @property
    def size(self) -> int:
        return _ANSWER_BYTES + int(self.ids.nbytes)


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A request as the engine renders it with marks (`marked_rendering.py`). The next request of the session usually
    begins with the same messages."""

    request: ChatRequest
    marking: Hashable
    text: str

    @property
    def size(self) -> int:
        return _REQUEST_BYTES + len(self.text)

    def is_front(self, request: ChatRequest, count: int, marking: Hashable) -> bool:
        """Return whether `text` is also the rendering of the first `count` messages of `request`, with this marking."""
        mine = self.request
        return (
            marking == self.marking
            and request.messages[:count] == mine.messages
            and request.tools == mine.tools
            and request.template_kwargs == mine.template_kwargs
        )


@dataclass(frozen=True, slots=True)
class UnrecordedCall:
    """A call that was answered but not recorded."""

    record: CallRecord

    @property
    def size(self) -> int:
        return sum(map(len, self.record.messages))


@dataclass(frozen=True, slots=True)
class ReferableAnswer:
    """The answer of a recorded call, for requests that refer to its items instead of repeating them."""

    message: Message

    @property
    def size(self) -> int:
        return _ANSWER_BYTES + text_length(self.message) + len(self.message.reasoning or "")


CacheEntry = LastRequest | MarkedText | AnsweredCall | UnrecordedCall | ReferableAnswer


class ConversationCache(LRUCache[Hashable, Any]):
    """A cache with a size limit in bytes, for all sessions. It holds each session's last request and marked text,
    answered calls (by call id and choice), unrecorded calls, and answers to which later requests may refer."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        super().__init__(capacity, lambda entry: entry.size)

    def put(self, key: Hashable, entry: CacheEntry) -> None:
        """Insert or replace an entry. An entry larger than the capacity is not kept."""
        try:
            self[key] = entry
        except ValueError:  # too large
            self.pop(key, None)


class SessionState:
    """A session while the gateway serves it."""

    def __init__(
        self,
        session_id: str,
        policy: Json,
        hasher: MessageHasher | None = None,
        *,
        window: float = 10.0,
        cache: ConversationCache | None = None,
        record_required: bool = True,
        rollout_id: str | None = None,
        label: str | None = None,
    ) -> None:
        """`window`: seconds for which an answer counts as recent. `record_required`: refuse calls that cannot be
        recorded, instead of answering and losing them. `rollout_id`: the rollout that the session records."""
        self.session_id = session_id
        self.rollout_id = rollout_id
        self.record_required = record_required
        self.policy = policy
        self.label = label
        self.budget = BudgetUsage(policy)
        self._hasher = hasher or MessageHasher()
        self._index = CallIndex()
        self._window = window
        self._cache = ConversationCache() if cache is None else cache
        self._with_text: deque[CallNode] = deque()
        self.used_at = time.monotonic()
        """When a request last used this session, by the monotonic clock."""
        self.key_hashes: set[bytes] = set()
        """The hashes of all keys by which the gateway finds this session in memory."""
        self.counted_calls = 0
        """The `weight` of this session when the registry last counted it. The registry keeps the total."""
        self.requests = 0
        """Number of requests that are being read or answered; see `in_request`."""
        self.in_flight = 0
        """Number of calls that are being answered; see `begin` and `end`."""
        self.idle = asyncio.Event()
        """Set while `in_flight` is 0."""
        self.idle.set()
        self.parsing = asyncio.Lock()
        """Lock that is held while a request of the session is parsed."""
        self.parsing_large = asyncio.Lock()
        """Lock that is held in place of `parsing` while a large request of the session is parsed (see
        `request_reader`)."""
        self.lost = 0
        """Number of calls that were answered but could not be committed. If there are any, the session is incomplete
        and not trained on."""
        self.unstored_key: bytes | None = None
        """The hash of the session's key until the session is stored; None for a stored session."""
        self.refusal: str | None = None
        """Why the last call could not be recorded, and so was refused or broken off. None if it was recorded."""
        self.ended = False
        """True if the rollout ended while calls were in flight. Their clients get a 409 in place of the answer."""
        self.recorded = 0
        """Number of the session's stored calls that this state knows, from this gateway and from others."""

    @contextmanager
    def in_request(self) -> Iterator[None]:
        """Keep the session in memory while a request of it is read and answered."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def begin(self, calls: int) -> None:
        self.in_flight += calls
        self.idle.clear()

    def end(self, calls: int) -> None:
        self.in_flight -= calls
        if self.in_flight == 0:
            self.idle.set()

    @property
    def last_conversation(self) -> HashedConversation | None:
        """The conversation of the session's last request, while it is in memory."""
        last: LastRequest | None = self._cache.get(self.session_id)
        return None if last is None else last.conversation

    def hash(self, request: EngineRequest, previous: HashedConversation | None) -> HashedRequest:
        """Hash a request for `place`. May run in any thread.

        `previous` is `last_conversation`: messages that it has in common with the request are not hashed again.
        """
        messages = _messages(request)
        texts = RequestTexts.of(messages, has_tools=isinstance(request, ChatRequest) and bool(request.tools))
        return HashedRequest(HashedConversation(messages, self._hasher.chain(messages, previous)), texts)

    def place(
        self,
        call_id: str,
        request: EngineRequest,
        metadata: ClientMetadata = NO_METADATA,
        hashed: HashedRequest | None = None,
        *,
        now: float,
    ) -> Lineage:
        """Decide the lineage of a call, and add the call to the index. `now`: seconds since the epoch.

        `hashed`: the result of `hash` for this request, if the caller has hashed it already.
        """
        conversation, texts = hashed or self.hash(request, self.last_conversation)
        messages, chain = conversation.messages, conversation.chain
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
            request_key=chain.keys[-1],
            ids_chain=chain.ids_chain(),
            spelling=chain.turns[-1].spelling if chain.turns else EMPTY,
            at=now,
            compaction=decision.compaction,
        )
        self._index.add(node)
        return Lineage(
            call_id=call_id,
            edge=node.edge,
            parent_call_id=node.parent_call_id,
            rule=decision.rule,
            ambiguous=decision.ambiguous,
            thread=thread,
            base=base,
            conversation=conversation,
        )

    def record_answer(self, lineage: Lineage, answers: Sequence[Message], status: CallStatus, *, now: float) -> Json:
        """Record the answers of a call, including partial ones of a failed call. Return the fingerprint to store."""
        node = self._index.by_id[lineage.call_id]
        if status not in ANSWERED:  # nothing may have arrived
            answers = [answer for answer in answers if answer.tool_calls or text_of(answer).strip()]
        node.state, node.at = status, now
        node.answers = tuple(self._hasher.answer_node(lineage.conversation, answer) for answer in answers)
        node.quotes = quotes_of(answers, node.compaction)
        node.text = text_of(answers[0]) if answers else ""
        self._with_text.append(node)
        if len(self._with_text) > _RECENT_TEXTS:
            self._with_text.popleft().text = ""
        self._index.add_answers(node)
        self._count_repeats(node)
        return fingerprint_of(node)

    def forget(self, record: CallRecord) -> None:
        """Remove a call that could not be recorded, so that no later call is joined to it.

        The call stays in the cache while there is room, because a later request may name the call instead of repeating
        its messages.
        """
        self.withdraw(record.call_id)
        self._cache.put(("unrecorded", record.call_id), UnrecordedCall(record))

    def withdraw(self, call_id: str) -> None:
        """Remove a placed call from the index, so that no later call is joined to it."""
        nodes = [node for node in self._index.by_id.values() if node.call_id != call_id]
        self._index = CallIndex()
        for node in nodes:
            node.continued, node.retried = 0, False
            self._index.add(node)
            self._index.add_answers(node)

    def unrecorded(self, call_id: str) -> CallRecord | None:
        """Return an answered call that could not be recorded, if it is still in memory."""
        found: UnrecordedCall | None = self._cache.get(("unrecorded", call_id))
        return None if found is None else found.record

    def discard_unrecorded(self, call_id: str) -> bool:
        """Drop an answered call that could not be recorded. Return whether there was one."""
        return self._cache.pop(("unrecorded", call_id), None) is not None

    def remember_referable(self, record: CallRecord) -> None:
        """Keep the answer of a recorded call in memory, for requests that refer to its items instead of repeating them.

        An answer to which no request can refer is not kept.
        """
        complete = record.status in ANSWERED and record.choices and record.choices[0].finish_reason != "unread"
        if complete and record.params.get("store") is not False and record.deleted_at is None:
            answer = ReferableAnswer(record.choices[0].message)
            self._cache.put(("referable", self.session_id, record.call_id), answer)

    def referable_answer(self, call_id: str) -> Message | None:
        """Return the answer of a recorded call that `remember_referable` kept, if it is still in memory."""
        found: ReferableAnswer | None = self._cache.get(("referable", self.session_id, call_id))
        return None if found is None else found.message

    def rebuild(self, calls: Iterable[StoredLineage]) -> None:
        """Add stored calls, in the order in which they started. Calls that are known already are skipped.

        Calls that were stored with other normalisers (setting `gateway.normalisers_off`) are added too. Later requests
        may match single answers of these calls, but not their whole conversations.
        """
        for row in calls:
            node = node_from_store(row)
            if node is not None and node.call_id not in self._index.by_id:
                self._index.add(node)
                self._index.add_answers(node)
                self._count_repeats(node)

    def _count_repeats(self, node: CallNode) -> None:
        if self.budget.limits.max_repeats is not None and node.state in ANSWERED:
            self.budget.repeats = max(self.budget.repeats, self._index.repeats(node))

    @property
    def weight(self) -> int:
        """The session's share of `gateway.calls_in_memory`: the number of its calls, and 2 for the session itself."""
        return 2 + len(self._index.by_id)

    @property
    def call_ids(self) -> Collection[str]:
        """The ids of all calls of the session, including those in flight."""
        return self._index.by_id.keys()

    def last_parsed(self, dialect: str) -> ParsedRequest | None:
        """Return the session's last request; None if it came in another dialect than this, or is not in memory."""
        last: LastRequest | None = self._cache.get(self.session_id)
        return last.parsed if last is not None and last.dialect == dialect else None

    def remember_request(
        self, dialect: str, parsed: ParsedRequest, conversation: HashedConversation, size: int
    ) -> None:
        """Keep a request, because the session's next request usually begins with the same messages. `size`: bytes of
        the messages."""
        self._cache.put(self.session_id, LastRequest(dialect, parsed, conversation, size))

    def drop_cached(self) -> None:
        """Remove this session from the cache, because it is dropped from memory. Unrecorded calls stay."""
        self._cache.pop(self.session_id, None)
        self._cache.pop(("marked", self.session_id), None)
        for node in self._index.by_id.values():
            self._cache.pop(("referable", self.session_id, node.call_id), None)
            for choice in range(len(node.answers)):
                self._cache.pop((node.call_id, choice), None)

    @property
    def marked_text(self) -> MarkedText | None:
        found: MarkedText | None = self._cache.get(("marked", self.session_id))
        return found

    def remember_marked_text(self, marked: MarkedText) -> None:
        self._cache.put(("marked", self.session_id), marked)

    def answered_call(self, base: Base) -> AnsweredCall | None:
        """Return the tokens of the answered call `base`; None if they are not in memory."""
        found: AnsweredCall | None = self._cache.get((base.call_id, base.choice))
        return found

    def remember_tokens(self, record: CallRecord, config: PromptConfig | None, base: Base | None) -> None:
        """Keep the tokens of an answered call in memory, so that the next call's prompt can be continued from them.

        `config`: digests of the request's tools and template options; None for a raw prompt, whose tokens are not kept.
        """
        if record.status != "ok" or record.prompt_ids is None or config is None or not tokens_match_texts(record):
            return
        before = self.answered_call(base) if base is not None else None
        reasoning = before.reasoning if before is not None else ()
        if base is not None and record.edge == "continues":
            # The next call extends the new answer, which contains these tokens: keeping each answer of a conversation
            # would take memory that grows with the square of its length.
            self._cache.pop((base.call_id, base.choice), None)
        stop = tuple(record.sampling.get("stop", ()))
        for choice in record.choices:
            self.remember_answer(
                record.call_id, record.prompt_ids, choice, stop, config, reasoning, engine_name=record.engine_name
            )

    def remember_answer(
        self,
        call_id: str,
        prompt: TokenIds,
        choice: Choice,
        stop: tuple[str, ...],
        config: PromptConfig,
        earlier_reasoning: tuple[str, ...],
        *,
        engine_name: str | None = None,
    ) -> AnsweredCall:
        """Keep the tokens of one choice of a call in memory. `stop`: the stop strings of the call's request."""
        ids = np.concatenate([prompt, choice.token_ids])
        reasoning = (*earlier_reasoning, *reasoning_prefix(choice.message))
        answered = AnsweredCall(ids, prompt.size, choice.finish_reason, stop, engine_name, config, reasoning)
        self._cache.put((call_id, choice.index), answered)
        return answered


def tokens_match_texts(call: CallRecord) -> bool:
    """Return whether a call's tokens encode its recorded texts. They do not if a hook changed its messages or its
    answer, or if its tokens have a tool call that was hidden from the agent."""
    changes = call.hooks or {}
    rewritten = "answer" in changes or "messages" in changes.get("request", {})
    return not rewritten and not call.sampling.get("hidden_call")


def reasoning_prefix(message: Message) -> tuple[str, ...]:
    """Return the beginning of an answer's reasoning; empty without reasoning."""
    reasoning = text_and_reasoning(message)[1] if message.role == "assistant" else ""
    return (reasoning[:_REASONING_PREFIX],) if reasoning else ()


def _messages(request: EngineRequest) -> tuple[Message, ...]:
    """Return the messages to compare. A raw prompt counts as one message."""
    if isinstance(request, ChatRequest):
        return request.messages
    prompt = request.prompt
    return (Message("prompt", prompt if isinstance(prompt, str) else " ".join(map(str, prompt))),)
