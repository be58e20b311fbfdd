"""A server whose only route is the list of models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from tests.fakes.http_server import serve_http


@contextlib.contextmanager
def serve_model_list(name: str, owner: str = "polar", max_tokens: int = 32768) -> Iterator[str]:
    """Serve one model, with a context of 32768 tokens and answers of `max_tokens`, and yield the server's URL."""
    card = {"id": name, "owned_by": owner, "max_model_len": 32768, "max_tokens": max_tokens, "engine": "x"}
    body = json.dumps({"data": [card]}).encode()
    with serve_http(lambda headers, request: (200, body)) as url:
        yield url
