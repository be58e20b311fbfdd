"""An engine for chaos tests: the tests' scripted server in its own process. Its answer repeats the request's word.

python -m benchmarks._stacks.echo_engine --port 8000 --delay 0.05
"""

from __future__ import annotations

import argparse
import asyncio
import re
from dataclasses import dataclass, replace

from aiohttp import web
from aiohttp.typedefs import Handler

from tests.fakes.engine_server import Json
from tests.fakes.vllm_server import Answer, FakeVllm, error, text_of

LONG = 1 << 18
"""Maximum size, in bytes, of a request that is answered."""
NONCE = re.compile(r"nonce-[0-9a-f]{12}-[0-9]+")


@dataclass
class EchoEngine(FakeVllm):
    """A scripted engine that delays answers to agents, but not the answers to a service's requests at its start."""

    pause: float = 0.0

    def refusal(self, path: str, body: Json) -> Json | None:
        """Refuse a long text before it is tokenised, because tokenising it would delay all other answers."""
        texts = [message.get("content") for message in body.get("messages") or ()]
        if any(isinstance(text, str) and len(text) >= self.context_length for text in texts):
            return too_long()
        return super().refusal(path, body)

    def unplanned(self, body: Json) -> Answer:
        return replace(self.default, first_delay=4 * self.pause, delay=self.pause) if words(body) else self.default

    def held(self, body: Json, answer: Answer) -> Answer:
        found = words(body)
        return super().held(body, replace(answer, text=f"My word is {found[-1]}." if found else answer.text))


def words(body: Json) -> list[str]:
    prompt = body.get("prompt")
    text = str(body["messages"]) if prompt is None else prompt if isinstance(prompt, str) else text_of(prompt)
    return NONCE.findall(text)


@web.middleware
async def refuse_long_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse long requests without reading them, because reading them would delay all other answers."""
    if (request.content_length or 0) <= LONG:
        return await handler(request)
    return web.json_response(too_long(), status=400)


def too_long() -> Json:
    return error("This model's maximum context length is 65536 tokens.", 400, None)


async def serve(port: int, delay: float) -> None:
    # Eight chunks, so that a kill often comes in the middle of an answer.
    answer = Answer("Hello.", per_chunk=6)
    # It reports a weight version, as vLLM does in development mode, because every claim of a rollout reads it.
    engine = EchoEngine(model="echo", default=answer, context_length=65536, weight_version="1", pause=delay)
    app = web.Application(middlewares=[refuse_long_requests])
    app.router.add_route("*", "/{path:.*}", engine.serve)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds between two chunks")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.delay))
