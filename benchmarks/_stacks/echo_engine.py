"""An engine to be killed: the scripted server of the tests in a process of its own, which says the word it is told.

python -m benchmarks._stacks.echo_engine --port 8000 --delay 0.05
"""

from __future__ import annotations

import argparse
import asyncio
import re
from dataclasses import dataclass, replace

from aiohttp import web

from tests.fakes.vllm_server import Answer, FakeVllm, Json, text_of

NONCE = re.compile(r"nonce-[0-9a-f]{12}-[0-9]+")


@dataclass
class EchoEngine(FakeVllm):
    """Only what an agent asks takes time: a service proves at its start with many answers what the engine can do."""

    pause: float = 0.0

    def unplanned(self, body: Json) -> Answer:
        return replace(self.default, first_delay=4 * self.pause, delay=self.pause) if words(body) else self.default

    def held(self, body: Json, answer: Answer) -> Answer:
        told = words(body)
        return super().held(body, replace(answer, text=f"My word is {told[-1]}." if told else answer.text))


def words(body: Json) -> list[str]:
    prompt = body.get("prompt")
    said = str(body["messages"]) if prompt is None else prompt if isinstance(prompt, str) else text_of(prompt)
    return NONCE.findall(said)


async def serve(port: int, delay: float) -> None:
    # Eight chunks of an answer, so that a kill finds it half given.
    answer = Answer("Hello.", per_chunk=6)
    # It says its weights' version, as vLLM does in development mode: each claim of a rollout asks for it.
    engine = EchoEngine(model="echo", default=answer, context_length=65536, weight_version="1", pause=delay)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine._serve)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds between two chunks")
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.delay))
