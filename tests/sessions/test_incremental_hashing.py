"""What a conversation shares with the one before is not read again, and reading it so gives the same chain."""

from __future__ import annotations

import random

import pytest

from polar_proxy.dialects import OpenAIChat, ParsedRequest
from polar_proxy.sessions.hashing import HashedConversation, MessageHasher
from polar_proxy.sessions.normalisers import ActiveNormalisers
from polar_proxy.types import ChatRequest, Json, Message
from tests.sessions.conversations import calls, result, says, system, user


def _messages(parsed: ParsedRequest) -> tuple[Message, ...]:
    (request,) = parsed.requests
    assert isinstance(request, ChatRequest)
    return request.messages


def _grown(draw: random.Random, messages: list[Json]) -> list[Json]:
    """The next request of a session: mostly the last one with more at its end, at times cut or changed first."""
    out = list(messages)
    if draw.random() < 0.2:
        del out[draw.randrange(1, len(out) + 1) :]
    if draw.random() < 0.15:
        out[draw.randrange(len(out))] = user(f"other {draw.random()}")
    for _ in range(draw.randrange(4)):
        call = calls(command=f"ls {draw.randrange(3)}")
        one = result(call, "a.py")
        out += draw.choice(
            [
                [says(f"so {draw.randrange(4)}")],
                [says("first"), call, one],
                [call, one, one],
                [user("more"), one],
                [call, one, user("and"), one],
                [{**call, "content": [{"type": "text", "text": "x", "n": draw.choice([1, True, 1.0])}]}, one],
            ]
        )
    return out


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_that_goes_on_is_the_chain_read_anew(seed: int) -> None:
    draw = random.Random(seed)
    dialect, meaning = OpenAIChat(), MessageHasher(ActiveNormalisers())
    messages: list[Json] = [system("be exact"), user("fix it")]
    before: ParsedRequest | None = None
    read: HashedConversation | None = None
    shared = 0
    for _ in range(25):
        body = {"model": "m", "messages": messages}
        parsed = dialect.parse(body, before)
        assert parsed == dialect.parse(body)
        chain = meaning.chain(_messages(parsed), read)
        assert chain == MessageHasher(ActiveNormalisers()).chain(_messages(dialect.parse(body)))
        if before is not None:
            shared += sum(one is other for one, other in zip(_messages(before), _messages(parsed), strict=False))
        before, read = parsed, HashedConversation(_messages(parsed), chain)
        messages = _grown(draw, messages)
    assert shared > 25


def test_bytes_decide_what_is_the_same() -> None:
    """`1`, `1.0` and `true` are equal to Python, and so are two orders of keys; what is stored is what came."""
    dialect = OpenAIChat()
    bodies: list[Json] = [
        {"model": "m", "messages": [{"role": "user", "content": "a", "n": value}]} for value in (1, 1.0, True)
    ]
    bodies.append({"model": "m", "messages": [{"n": True, "content": "a", "role": "user"}]})
    before: ParsedRequest | None = None
    for body in bodies:
        before = dialect.parse(body, before)
        assert before.messages == dialect.parse(body).messages


def test_tools_that_are_repeated_are_the_same_objects() -> None:
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
