"""The cache of the last requests and answers of sessions."""

from __future__ import annotations

import numpy as np

from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.sessions.hashing import HashChain, HashedConversation
from polar_proxy.sessions.lineage import Base
from polar_proxy.sessions.state import ConversationCache, PromptConfig, SessionState
from polar_proxy.types import Choice, Json, Message
from tests.factories import call_record, token_ids

PARSED = OpenAIChat().parse({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
CONVERSATION = HashedConversation((), HashChain((b"",), (), b""))
ANSWER = Base("call", 0, 2)


def remember(session: SessionState, tokens: int) -> None:
    """Remember the answer ANSWER with this many tokens, including those of its prompt."""
    choice = Choice(0, Message("assistant", "."), "stop", np.zeros(2, np.int32), np.zeros(2, np.float32))
    session.remember_answer(ANSWER.call_id, np.zeros(tokens - 2, np.int32), choice, (), PromptConfig(b"", b""), ())


def test_returns_the_last_request_only_to_its_session_and_dialect() -> None:
    cache = ConversationCache()
    session, other = SessionState("a", {}, cache=cache), SessionState("b", {}, cache=cache)
    session.remember_request("openai_chat", PARSED, CONVERSATION, 10)
    assert session.last_parsed("openai_chat") is PARSED
    assert session.last_parsed("anthropic") is None
    assert other.last_parsed("openai_chat") is None


def test_evicts_what_was_used_least_recently_whatever_session_it_belongs_to() -> None:
    cache = ConversationCache(capacity=9_000)  # two requests, or one and an answer
    first, second = SessionState("a", {}, cache=cache), SessionState("b", {}, cache=cache)
    first.remember_request("openai_chat", PARSED, CONVERSATION, 16)
    remember(second, tokens=4)
    assert first.last_parsed("openai_chat") is PARSED
    second.remember_request("openai_chat", PARSED, CONVERSATION, 16)
    assert second.answered_call(ANSWER) is None
    assert first.last_parsed("openai_chat") is PARSED


def test_does_not_keep_an_entry_larger_than_the_cache() -> None:
    session = SessionState("a", {}, cache=ConversationCache(capacity=1_060))
    remember(session, tokens=4)
    remember(session, tokens=11)
    assert session.answered_call(ANSWER) is None


def test_keeps_only_the_tokens_that_the_next_call_extends() -> None:
    """A conversation takes memory in proportion to its length, not to its length times its number of calls."""
    cache = ConversationCache()
    session = SessionState("a", {}, cache=cache)
    messages: list[Json] = []
    for turn in range(20):
        messages.append({"role": "user", "content": f"Question {turn}"})
        parsed = OpenAIChat().parse({"model": "m", "messages": messages})
        lineage = session.place(f"call_{turn}", parsed.requests[0], now=turn)
        answer = Message("assistant", f"Answer {turn}")
        session.record_answer(lineage, [answer], "ok", now=turn)
        record = call_record(
            "a", call_id=lineage.call_id, edge=lineage.edge, prompt_ids=token_ids(*range(100 * turn + 5))
        )
        session.remember_tokens(record, PromptConfig(b"", b""), lineage.base)
        messages.append({"role": "assistant", "content": answer.content})
    assert session.answered_call(Base("call_18", 0, 38)) is None
    assert session.answered_call(Base("call_19", 0, 40)) is not None
    assert len(cache) == 1


def test_a_finished_session_leaves_nothing_in_the_cache() -> None:
    cache = ConversationCache()
    session = SessionState("a", {}, cache=cache)
    lineage = session.place("call", PARSED.requests[0], now=0)
    session.record_answer(lineage, [Message("assistant", ".")], "ok", now=1)
    session.remember_request("openai_chat", PARSED, CONVERSATION, 10)
    remember(session, tokens=4)
    session.drop_cached()
    assert len(cache) == 0
