"""A server whose only route is the list of models."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def serve_model_list(*names: str, owner: str = "polar", max_tokens: int = 32768) -> Iterator[str]:
    """Serve models, each with a context of 32768 tokens and answers of `max_tokens`, and yield the server's URL."""
    card = {"owned_by": owner, "max_model_len": 32768, "max_tokens": max_tokens, "engine": "x"}
    cards = [{"id": name, **card} for name in names]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": cards}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
