"""Two thousand bodies that no client means, over HTTP: each gets an answer or a 4xx in OpenAI's shape, never a 5xx."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, Json
from tests.conftest import Serve
from tests.fakes.scripted_engine import ScriptedEngine

_BODIES = 2000
_KEYS = (
    *("model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop", "n"),
    *("stream", "stream_options", "logprobs", "top_logprobs", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("max_tokens", "max_completion_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "best_of", "user"),
    *("echo", "suffix", "return_token_ids", "chat_template_kwargs", "metadata", "role", "content", "name", "type"),
    *("function", "arguments", "text", "tool_calls", "tool_call_id", "include_usage", "json_schema", "schema", "id"),
)
_ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.5, 2**63, 2**64 - 1, 1e300, "", "m", "user", "assistant", "tool", "auto"),
    *("required", "function", "text", "json_object", "json_schema", "\0", "é\u2028", "{}", "[" * 300, [], {}),
)


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.5:
        return rng.choice(_ATOMS)
    if kind < 0.7:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(_KEYS): _value(rng, depth + 1) for _ in range(rng.randrange(4))}


def _mutated(rng: random.Random, value: Any) -> Any:
    """The value with some of its parts, at any depth, replaced by anything."""
    if rng.random() < 0.02:
        return _value(rng)
    if isinstance(value, dict):
        return {key: _mutated(rng, inner) for key, inner in value.items()}
    return [_mutated(rng, inner) for inner in value] if isinstance(value, list) else value


_CALL: Json = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
_RIGHT: Json = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be exact"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ],
    "prompt": ["a", "b"],
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}],
    "max_tokens": 2,
    "stop": ["x"],
    "temperature": 0.5,
}


def _body(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(rng.randrange(40))
    if kind < 0.1:
        return json.dumps(_RIGHT).encode()[: rng.randrange(200)]
    if kind < 0.13:
        return b'{"model": "m", "prompt": "a", "messages": [{"role": "user", "content": "x", "deep": %s1%s}]}' % (
            b"[" * 300,
            b"]" * 300,
        )
    if kind < 0.2:
        return json.dumps(_value(rng)).encode()
    body = _mutated(rng, _RIGHT)
    if isinstance(body, dict):
        for _ in range(rng.choice((0, 0, 1, 2))):
            body[rng.choice(_KEYS)] = _value(rng)
        if isinstance(body.get("n"), int | float):
            body["n"] = 2  # many choices cost time and find nothing
    return json.dumps(body).encode()


class _Answers(ScriptedEngine):
    async def render(self, request: ChatRequest) -> list[int]:
        """The fake's own rendering reads arguments as JSON; here anything must do."""
        return [1, *range(len(request.messages))]


async def test_random_bodies(serve: Serve, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(7)
    bodies = [_body(rng) for _ in range(_BODIES)]
    statuses: Counter[int] = Counter()
    answered = 0
    async with serve(_Answers(lambda request: "ab")) as gateway:
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60) as http:
            gate = asyncio.Semaphore(8)

            async def ask(number: int, body: bytes) -> tuple[bytes, httpx.Response]:
                route = "/v1/chat/completions" if number % 3 else "/v1/completions"
                async with gate:
                    return body, await http.post(route, content=body, headers={"authorization": "Bearer k"})

            for body, answer in await asyncio.gather(*(ask(*item) for item in enumerate(bodies))):
                statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    answered += 1
                    assert answer.content.startswith((b'{"id"', b"data: {")), body
                    continue
                assert 400 <= answer.status_code < 500, (body, answer.text)
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, body
                assert error["message"], body
        # Nothing that was answered went missing on its way to the store.
        (session,) = await store.sessions()
        assert gateway.sessions.lost(session.session_id) == 0
        assert session.calls >= answered
    with capsys.disabled():
        print(f"\n{_BODIES} random bodies: " + ", ".join(f"{n} x {status}" for status, n in sorted(statuses.items())))
    assert statuses[200] > 200
    assert statuses[400] > 200
