"""Messages shared with the previous conversation are not parsed or hashed again, with the same result."""

from __future__ import annotations

import random

import pytest

from polar_proxy.dialects.base import ParsedRequest
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.sessions.hashing import HashedConversation, MessageHasher
from polar_proxy.types import ChatRequest, Json, Message
from tests.sessions.conversations import calls, result, says, system, user


def _messages(parsed: ParsedRequest) -> tuple[Message, ...]:
    (request,) = parsed.requests
    assert isinstance(request, ChatRequest)
    return request.messages


def _next_request(rng: random.Random, messages: list[Json]) -> list[Json]:
    """Return a session's next request: usually the last one with more messages, sometimes cut or changed before."""
    out = list(messages)
    if rng.random() < 0.2:
        del out[rng.randrange(1, len(out) + 1) :]
    if rng.random() < 0.15:
        out[rng.randrange(len(out))] = user(f"other {rng.random()}")
    for _ in range(rng.randrange(4)):
        call = calls(command=f"ls {rng.randrange(3)}")
        one = result(call, "a.py")
        out += rng.choice(
            [
                [says(f"so {rng.randrange(4)}")],
                [says("first"), call, one],
                [call, one, one],
                [user("more"), one],
                [call, one, user("and"), one],
                [{**call, "content": [{"type": "text", "text": "x", "n": rng.choice([1, True, 1.0])}]}, one],
            ]
        )
    return out


@pytest.mark.parametrize("seed", range(30))
def test_hashing_only_new_messages_gives_the_whole_chain(seed: int) -> None:
    rng = random.Random(seed)
    dialect, hasher = OpenAIChat(), MessageHasher()
    messages: list[Json] = [system("be exact"), user("fix it")]
    previous: ParsedRequest | None = None
    hashed: HashedConversation | None = None
    shared = 0
    for _ in range(25):
        body = {"model": "m", "messages": messages}
        parsed = dialect.parse(body, previous)
        assert parsed == dialect.parse(body)
        chain = hasher.chain(_messages(parsed), hashed)
        assert chain == MessageHasher().chain(_messages(dialect.parse(body)))
        if previous is not None:
            shared += sum(one is other for one, other in zip(_messages(previous), _messages(parsed), strict=False))
        previous, hashed = parsed, HashedConversation(_messages(parsed), chain)
        messages = _next_request(rng, messages)
    assert shared > 25


def test_messages_are_reused_only_if_their_bytes_are_equal() -> None:
    """Python takes `1`, `1.0` and `true` as equal, and two orders of keys too. The received bytes are stored."""
    dialect = OpenAIChat()
    bodies: list[Json] = [
        {"model": "m", "messages": [{"role": "user", "content": "a", "n": value}]} for value in (1, 1.0, True)
    ]
    bodies.append({"model": "m", "messages": [{"n": True, "content": "a", "role": "user"}]})
    previous: ParsedRequest | None = None
    for body in bodies:
        previous = dialect.parse(body, previous)
        assert previous.messages == dialect.parse(body).messages


def test_repeated_tools_are_reused_as_the_same_objects() -> None:
    dialect = OpenAIChat()
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    body: Json = {"model": "m", "messages": [user("a")], "tools": [tool, {"type": "web_search"}]}
    first = dialect.parse(body)
    again = dialect.parse({**body, "messages": [user("b")]}, first)
    other = dialect.parse({**body, "tools": [tool]}, again)
    assert isinstance(first.requests[0], ChatRequest)
    assert isinstance(again.requests[0], ChatRequest)
    assert again.requests[0].tools is first.requests[0].tools
    assert (again.tools, other) == (first.tools, dialect.parse({**body, "tools": [tool]}))
