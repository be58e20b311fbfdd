"""Random bodies for every model route: valid ones with wrong fields, truncated ones, and noise.

`send_random_bodies` sends them to a gateway and reports what came back. Every answer must be in the route's own format,
or a 4xx in its error format. Every answered call must be recorded, and afterwards all routes must answer as before.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from polar_proxy.dialects.wire import seal
from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, EngineRequest, Json, ToolCall

_SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_ARGUMENTS = '{"command": "ls"}'
_PNG = "iVBORw0KGgo="

CHAT: Json = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be exact"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + _PNG}}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": _ARGUMENTS}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "user", "content": "hi"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": _SCHEMA}}],
    "tool_choice": "auto",
    "max_completion_tokens": 2,
    "stop": ["x"],
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
}
COMPLETIONS: Json = {
    "model": "m",
    "prompt": ["a", "b"],
    "max_tokens": 2,
    "stop": ["x"],
    "logprobs": 1,
    "stream": True,
    "best_of": 1,
    "logit_bias": {"1": 1},
    "return_token_ids": True,
}
_PATCH_GRAMMAR: Json = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
RESPONSES: Json = {
    "model": "m",
    "instructions": "be exact",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        {"type": "reasoning", "id": "rs_1_0", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {"type": "message", "id": "msg_1_0", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": _ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "ok"},
        {"type": "tool_search_call", "call_id": "c4", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c4", "tools": [{"type": "function", "name": "found"}]},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "more", "parameters": _SCHEMA}]},
        {"type": "item_reference", "id": "msg_1_0"},
        {"type": "compaction", "encrypted_content": seal("so far")},
        {"role": "user", "content": "hi"},
    ],
    "tools": [
        {"type": "function", "name": "bash", "parameters": _SCHEMA, "strict": True},
        {"type": "custom", "name": "apply_patch", "format": _PATCH_GRAMMAR},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "inner"}]},
    ],
    "tool_choice": {"type": "function", "name": "bash"},
    "reasoning": {"effort": "none", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}, "verbosity": "low"},
    "max_output_tokens": 3,
    "previous_response_id": None,
    "stream": True,
    "store": False,
    "metadata": {"a": "b"},
}
_CACHE: Json = {"type": "ephemeral"}
MESSAGES: Json = {
    "model": "m",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "be exact", "cache_control": _CACHE}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "ok"}]},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PNG}},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
                {"type": "tool_reference", "tool_name": "bash"},
            ],
        },
        {"role": "system", "content": "later"},
        {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": _CACHE}]},
    ],
    "tools": [
        {"name": "bash", "description": "d", "input_schema": _SCHEMA},
        {"type": "bash_20250124", "name": "b2"},
        {"name": "late", "input_schema": _SCHEMA, "defer_loading": True, "eager_input_streaming": True},
    ],
    "tool_choice": {"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "stop_sequences": ["x"],
    "temperature": 1,
    "top_k": 5,
    "stream": True,
}
GOOGLE: Json = {
    "systemInstruction": {"parts": [{"text": "be exact"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": _PNG}}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"functionCall": {"name": "bash", "id": "c1", "args": {"command": "ls"}}, "thoughtSignature": "AA=="},
            ],
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "bash", "id": "c1", "response": {"output": "x"}}}]},
        {"role": "user", "parts": [{"fileData": {"fileUri": "gs://x", "mimeType": "text/plain"}}]},
    ],
    "tools": [
        {"functionDeclarations": [{"name": "bash", "description": "d", "parametersJsonSchema": _SCHEMA}]},
        {"function_declarations": [{"name": "old", "parameters": {"type": "OBJECT", "properties": {}}}]},
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["bash"]}},
    "generationConfig": {
        "temperature": 1,
        "topK": 3,
        "maxOutputTokens": "4",
        "candidateCount": 1,
        "stopSequences": ["x"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT"},
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
        "responseLogprobs": True,
        "logprobs": 1,
    },
    "safetySettings": [{"category": "c", "threshold": "t"}],
}


def _openai_error(value: Json, status: int) -> bool:
    return set(value["error"]) == {"message", "type", "param", "code"} and bool(value["error"]["message"])


def _anthropic_error(value: Json, status: int) -> bool:
    return value["type"] == "error" and bool(value["error"]["type"]) and bool(value["error"]["message"])


def _google_error(value: Json, status: int) -> bool:
    error = value["error"]
    return error["code"] == status and bool(error["message"]) and error["status"].isupper()


@dataclass(frozen=True)
class Route:
    path: str
    right: Json
    """A valid body with every kind of field. The `plain` fields are always sent."""
    plain: tuple[str, ...]
    is_error: Callable[[Json, int], bool]
    key: str
    """A field of every complete answer."""
    recorded: bool = True


_ASK = ("model", "messages")
ROUTES: dict[str, Route] = {
    "chat": Route("/v1/chat/completions", CHAT, _ASK, _openai_error, "choices"),
    "completions": Route("/v1/completions", COMPLETIONS, ("model", "prompt"), _openai_error, "choices"),
    "responses": Route("/v1/responses", RESPONSES, ("model", "input"), _openai_error, "output"),
    "responses/input_tokens": Route(
        "/v1/responses/input_tokens", RESPONSES, ("model", "input"), _openai_error, "input_tokens", recorded=False
    ),
    "responses/compact": Route("/v1/responses/compact", RESPONSES, ("model", "input"), _openai_error, "output"),
    "messages": Route("/v1/messages", MESSAGES, (*_ASK, "max_tokens"), _anthropic_error, "stop_reason"),
    "messages/count_tokens": Route(
        "/v1/messages/count_tokens", MESSAGES, _ASK, _anthropic_error, "input_tokens", recorded=False
    ),
    "generateContent": Route("/v1beta/models/m:generateContent", GOOGLE, ("contents",), _google_error, "candidates"),
    "streamGenerateContent": Route(
        "/v1beta/models/m:streamGenerateContent", GOOGLE, ("contents",), _google_error, "candidates"
    ),
    "streamGenerateContent?alt=sse": Route(
        "/v1beta/models/m:streamGenerateContent?alt=sse", GOOGLE, ("contents",), _google_error, "candidates"
    ),
    "countTokens": Route(
        "/v1beta/models/m:countTokens", GOOGLE, ("contents",), _google_error, "totalTokens", recorded=False
    ),
}

STORED_ROUTES: dict[str, Route] = {
    "": Route("", {}, (), _openai_error, "output", recorded=False),
    "/input_items": Route("/input_items", {}, (), _openai_error, "data", recorded=False),
    "/cancel": Route("/cancel", {}, (), _openai_error, "output", recorded=False),
}
"""The routes below `/v1/responses/{id}`, by the end of their path. A deleted response is answered with `DELETED`."""
DELETED = Route("", {}, (), _openai_error, "deleted", recorded=False)
CONVERSATION: Json = {"metadata": {"topic": "x"}, "items": RESPONSES["input"]}
CONVERSATION_ROUTES: dict[str, Route] = {
    "": Route("", CONVERSATION, ("items",), _openai_error, "object", recorded=False),
    "/items": Route("/items", CONVERSATION, ("items",), _openai_error, "object", recorded=False),
    "/items/msg_x": Route("/items/msg_x", {}, (), _openai_error, "id", recorded=False),
}
"""The routes of `/v1/conversations/{id}`, by the end of their path."""
STRANGE_RESPONSES = ("resp_0", "%00", "%F0%9F%98", "x" * 300)
STORED_QUERIES = (
    *("", "?stream=true", "?stream=true&starting_after=3", "?stream=1", "?starting_after=x", "?limit=1&order=asc"),
    *("?after=in_1_1", "?include[]=reasoning.encrypted_content", "?include=x", "?limit=999999999999&order=%00"),
)


def referring(rng: random.Random, response: str) -> Json:
    """Return a body that refers to a response, or to items that it may have."""
    if rng.random() < 0.5:
        return {"model": "m", "input": "x", "previous_response_id": response}
    stem = response.removeprefix("resp_")
    names = [f"{rng.choice(['msg', 'rs', 'fc', 'ctc', 'bt', 'in', 'x'])}_{stem}_{rng.randrange(3)}" for _ in range(2)]
    return {"model": "m", "input": [{"type": "item_reference", "id": name} for name in names]}


_ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.5, 2**63, 2**64 - 1, 10**30, 1e300, "", "m", "user", "assistant", "tool"),
    *("auto", "required", "any", "none", "function", "text", "message", "json_schema", "bash", "c1", "\0", "{}", "-1"),
    *("é\u2028", "\ud83d", "[" * 300, [], {}, [None], [[]], [{}]),
)


def _collect(value: Any, keys: set[str], strings: set[str]) -> None:
    if isinstance(value, dict):
        keys.update(value)
        for inner in value.values():
            _collect(inner, keys, strings)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, keys, strings)
    elif isinstance(value, str):
        strings.add(value)


class BodyGenerator:
    """Makes bodies for one route from the names and words of its dialect."""

    def __init__(self, route: Route, rng: random.Random) -> None:
        self._route = route
        self._rng = rng
        keys: set[str] = set()
        strings: set[str] = set()
        _collect(route.right, keys, strings)
        self._keys = sorted(keys)
        self._atoms = (*_ATOMS, *sorted(strings))

    def make(self) -> bytes:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.04:
            return rng.randbytes(rng.randrange(40))
        if kind < 0.07:
            text = json.dumps(self._route.right)
            return text[: rng.randrange(len(text))].encode()
        if kind < 0.09:
            deep = b"[" * 300 + b"]" * 300
            return json.dumps({**self._right(), rng.choice(self._keys): "@"}).encode().replace(b'"@"', deep)
        if kind < 0.14:
            return json.dumps(self._value()).encode()
        body = self._right()
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            body = self._changed(body)
        if isinstance(body, dict):
            for _ in range(rng.choice((0, 0, 0, 1))):
                body[rng.choice(self._keys)] = self._value()
            for many in ("n", "best_of"):
                if isinstance(body.get(many), int | float):
                    body[many] = 2  # more choices take time and find nothing
        return json.dumps(body).encode()

    def _right(self) -> Json:
        """Return some fields of the valid body and parts of its lists, so that no field is always present."""
        rng, right = self._rng, self._route.right
        kept = {key: value for key, value in right.items() if key in self._route.plain or rng.random() < 0.4}
        for key in ("messages", "input", "contents", "tools"):
            value = kept.get(key)
            if isinstance(value, list) and rng.random() < 0.7:
                kept[key] = [item for item in value if rng.random() < 0.6] or value
        return kept

    def _value(self, depth: int = 0) -> Any:
        rng, kind = self._rng, self._rng.random()
        if depth > 3 or kind < 0.5:
            return rng.choice(self._atoms)
        if kind < 0.7:
            return [self._value(depth + 1) for _ in range(rng.randrange(3))]
        return {rng.choice(self._keys): self._value(depth + 1) for _ in range(rng.randrange(4))}

    def _changed(self, value: Any) -> Any:
        """Return the value with one part, at any depth, replaced, dropped, doubled or renamed."""
        rng = self._rng
        if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
            return self._value()
        if isinstance(value, list):
            place = rng.randrange(len(value))
            kind = rng.random()
            if kind < 0.1:
                return value[:place] + value[place + 1 :]
            if kind < 0.2:
                return [*value, value[place]]
            return [*value[:place], self._changed(value[place]), *value[place + 1 :]]
        key = rng.choice(list(value))
        rest = {other: item for other, item in value.items() if other != key}
        kind = rng.random()
        if kind < 0.1:
            return rest
        if kind < 0.15:
            return {**rest, rng.choice(self._keys): value[key]}
        return {**value, key: self._changed(value[key])}


class RandomAnswers(ScriptedEngine):
    """An engine that answers with text, or with calls of tools that are offered or not."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        super().__init__(self._say)

    def _say(self, request: EngineRequest) -> ScriptedAnswer:
        if not isinstance(request, ChatRequest) or self._rng.random() < 0.5:
            return "ab"
        names = [tool["function"]["name"] for tool in request.tools] or ["bash"]
        texts = ('{"command": "ls"}', '{"input": "x"}', "{}", "[1]", "null")
        chosen = [(self._rng.choice(names), self._rng.choice(texts)) for _ in range(self._rng.choice((1, 1, 2)))]
        return [ToolCall(f"call_{number}", name, arguments) for number, (name, arguments) in enumerate(chosen)]

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        """Render anything: the scripted engine's own template needs arguments that are JSON."""
        return [1, *range(len(request.messages))]


@dataclass
class StormReport:
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in ROUTES})
    wrong: list[str] = field(default_factory=list)
    """Faults, each with its route and body."""

    @property
    def total(self) -> Counter[int]:
        return sum(self.statuses.values(), Counter())

    def to_json(self) -> Json:
        by_route = {name: {str(code): count for code, count in sorted(n.items())} for name, n in self.statuses.items()}
        total = {str(code): count for code, count in sorted(self.total.items())}
        return {"bodies": self.total.total(), "statuses": total, "routes": by_route, "wrong": self.wrong}

    def table(self) -> str:
        codes = sorted(self.total)
        lines = [f"{'route':32}" + "".join(f"{code:>8}" for code in codes)]
        for name, counts in {**self.statuses, "all": self.total}.items():
            lines.append(f"{name:32}" + "".join(f"{counts[code]:8}" for code in codes))
        return "\n".join(lines)


def find_fault(route: Route, answer: httpx.Response) -> str | None:
    """Return the problem of an answer, or None."""
    try:
        if 400 <= answer.status_code < 500:
            return None if route.is_error(answer.json(), answer.status_code) else "not the route's error shape"
        if answer.status_code != 200:
            return f"status {answer.status_code}"
        for value in _values(answer):
            if value.get("error") or value.get("type") in ("error", "response.failed"):
                return "an error inside a stream"
        whole = answer.headers["content-type"] == "application/json"
        return f"no {route.key!r}" if whole and route.key not in next(iter(_values(answer))) else None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"unreadable: {type(error).__name__}: {error}"


def _values(answer: httpx.Response) -> list[Json]:
    if answer.headers["content-type"].startswith("application/json"):
        value = answer.json()
        return value if isinstance(value, list) else [value]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    assert lines
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def send_random_bodies(gateway: Gateway, store: Store, count: int, seed: int) -> StormReport:
    """Send `count` bodies, to each route in turn, to a gateway of `RandomAnswers`."""
    rng = random.Random(seed)
    report = StormReport()
    makers = {name: BodyGenerator(route, rng) for name, route in ROUTES.items()}
    names = list(ROUTES)
    bodies = [makers[names[place % len(names)]].make() for place in range(count)]
    responses: list[str] = []
    called: set[str] = set()
    limits = httpx.Limits(max_connections=8)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=120) as http:

        async def ask(name: str, body: bytes, session: int) -> httpx.Response:
            answer = await http.post(ROUTES[name].path, content=body, headers={"authorization": f"Bearer k{session}"})
            report.statuses[name][answer.status_code] += 1
            if problem := find_fault(ROUTES[name], answer):
                report.wrong.append(f"{name}: {problem}: {body[:2000]!r} -> {answer.text[:500]!r}")
            if answer.status_code == 200 and ROUTES[name].recorded:
                called.add(answer.headers["x-polar-call-id"])
                if name == "responses":
                    responses.append("resp_" + answer.headers["x-polar-call-id"].removeprefix("call_"))
            return answer

        async def ask_next(places: list[int]) -> None:
            while places:
                place = places.pop()
                name, body = names[place % len(names)], bodies[place]
                own = random.Random(place)  # bodies must not depend on the order of the answers
                if name == "responses" and responses and own.random() < 0.1:
                    body = json.dumps(referring(own, own.choice(responses))).encode()
                await ask(name, body, own.randrange(4))
                if responses and own.random() < 0.1:
                    await use_stored(own, own.choice(responses))

        async def use_stored(own: random.Random, response: str) -> None:
            """Send a request to a route of stored responses, perhaps with the key of another session."""
            name = own.choice([response, response, response, *STRANGE_RESPONSES])
            path = f"/v1/responses/{name}{own.choice(['', *STORED_ROUTES])}{own.choice(STORED_QUERIES)}"
            headers = {"authorization": f"Bearer k{own.randrange(4)}"}
            method = own.choice(["GET", "GET", "POST", "DELETE"])
            answer = await http.request(method, path, headers=headers)
            if answer.status_code >= 500 or (answer.status_code >= 400 and not _openai_error(answer.json(), 0)):
                report.wrong.append(f"{method} {path}: {answer.status_code} {answer.text[:500]!r}")

        places = list(reversed(range(count)))
        await asyncio.gather(*(ask_next(places) for _ in range(8)))
        for name, route in ROUTES.items():
            plain = {key: route.right[key] for key in route.plain}
            answer = await http.post(route.path, json=plain, headers={"authorization": "Bearer after"})
            if answer.status_code != 200:
                report.wrong.append(f"{name}: no answer to a plain body afterwards: {answer.text[:500]}")
            elif route.recorded:
                called.add(answer.headers["x-polar-call-id"])
        health = await http.get("/readyz")
        if health.status_code != 200:
            report.wrong.append(f"unhealthy afterwards: {health.text[:500]}")
    kept: set[str] = set()
    for session in await store.sessions.recent(limit=100):
        kept |= {row.call_id for row in await store.calls.summaries(session.session_id)}
        if lost := gateway.sessions.lost(session.session_id):
            report.wrong.append(f"{lost} calls of {session.session_id} were not recorded")
    report.wrong += [f"{call_id} was answered and is not in the store" for call_id in sorted(called - kept)]
    return report
