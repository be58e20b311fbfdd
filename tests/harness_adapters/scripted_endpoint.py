"""A scripted Chat Completions server on loopback. A function makes its answers, and it keeps its requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.http_server import serve_http

Reply = tuple[int, Mapping[str, Any]]
Script = Callable[[Mapping[str, Any]], Reply]


@dataclass
class ScriptedEndpoint:
    """A running server: its base URL and the (headers, body) pairs that it received."""

    base_url: str = ""
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)


def bash_call(command: str, number: int = 0, thought: str = "Let me see.") -> Reply:
    """Return an answer with one call of mini-swe-agent's bash tool."""
    function = {"name": "bash", "arguments": json.dumps({"command": command}, ensure_ascii=False)}
    message = {
        "role": "assistant",
        "content": None,
        "reasoning_content": thought,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }
    return 200, {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


@contextmanager
def serve(script: Script) -> Iterator[ScriptedEndpoint]:
    """Serve on a free port while the block runs."""
    state = ScriptedEndpoint()

    def answer(headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        request = json.loads(body)
        state.requests.append((headers, request))
        status, reply = script(request)
        return status, json.dumps(reply).encode()

    with serve_http(answer) as url:
        state.base_url = f"{url}/v1"
        yield state
