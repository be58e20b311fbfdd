"""A scripted Chat Completions server on loopback. A function makes its answers, and it keeps its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
            status, answer = script(body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
