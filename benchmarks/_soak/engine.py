r"""The engine of `benchmarks/soak.py`: canned answers at once in vLLM's format, and now and then a fault.

python -m benchmarks._soak.engine --port 8000 --first 128 --added 24 --turns 100 --tokens 8 --faults 0.01 --seed 1 \
    --folder MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import random

import uvloop

from benchmarks._soak.clients import Shape
from benchmarks._stacks.answers import (
    END_OF_TURN,
    FIXED_BEGIN,
    VARIED,
    CannedAnswer,
    chat_answers,
    exact_answers,
    fixed_ids,
)
from benchmarks._stacks.traffic import MARK, MODEL
from benchmarks._stacks.upstream import STREAM, Upstream, http
from tests.fakes.vllm_server import FakeVllm

FAULTS = ("error", "not_json", "cut", "slow")
SLOW_SECONDS = 2.0
PER_CHUNK = 4


class SoakAnswers:
    """Prepared answers to every turn of a conversation, streamed (key True) and whole (key False)."""

    def __init__(self, shape: Shape) -> None:
        ids = [(31 * position) % 2000 + 100 for position in range(shape.tokens - 1)] + [END_OF_TURN]
        self.exact = exact_answers(ids, PER_CHUNK, calls=False)
        self.chat: list[dict[bool, CannedAnswer]] = []
        new = [200 + position % 50 for position in range(shape.added - 1)] + [END_OF_TURN]
        prompt: list[int | str] = [*fixed_ids(shape.first - VARIED), "HOLE"]
        for turn in range(shape.turns):
            length = shape.first + turn * (shape.tokens + shape.added)
            self.chat.append(chat_answers(ids, prompt, length, PER_CHUNK, calls=False))
            prompt = [*prompt, *ids, *new]


class SoakUpstream(Upstream):
    """One connection to the engine. The share `faults` of its answers to agents are errors, break off or come
    slowly."""

    def __init__(self, fake: FakeVllm, answers: SoakAnswers, faults: float, chance: random.Random) -> None:
        super().__init__(fake, {})
        self._soak, self._faults, self._chance = answers, faults, chance

    def _answer(self, path: str, body: bytes) -> None:
        found = self._canned(path, body)
        if found is None:
            self._transport.write(self._scripted(path, body))
            return
        canned, ids = found
        data = b"".join(canned.bytes(ids))
        fault = self._chance.choice(FAULTS) if self._chance.random() < self._faults else None
        if fault == "error":
            self._transport.write(http(500, b'{"error": {"message": "out of blocks"}}', "application/json"))
        elif fault == "not_json":
            self._transport.write(http(200, b'{"choices": [', "application/json"))
        elif fault == "cut":
            self._transport.write(data[: len(data) // 2])
            self._transport.close()
        elif fault == "slow":
            middle = len(data) // 2
            self._transport.write(data[:middle])
            asyncio.get_running_loop().call_later(SLOW_SECONDS, self._transport.write, data[middle:])
        else:
            self._transport.write(data)

    def _canned(self, path: str, body: bytes) -> tuple[CannedAnswer, bytes] | None:
        streamed = STREAM.search(body) is not None
        if path == "/v1/completions":
            at = body.find(b'"prompt":[' + FIXED_BEGIN)
            return None if at < 0 else (self._soak.exact[streamed], body[at + 10 : body.index(b"]", at)])
        first = body.find(MARK)
        if first < 0 or path != "/v1/chat/completions":
            return None
        # The first user message numbers the conversation and the last one the turn.
        last = body.rfind(MARK) + len(MARK)
        conversation, turn = body[first + len(MARK) :][:10], int(body[last + 10 : last + 13])
        ids = b",".join([b"1" + conversation[start : start + 3] for start in (0, 3, 6)] * (VARIED // 3 + 1))
        return self._soak.chat[turn][streamed], b",".join(ids.split(b",")[:VARIED])


async def main(arguments: argparse.Namespace) -> None:
    fake = FakeVllm(model=MODEL, context_length=1 << 20, folder=arguments.folder)
    answers = SoakAnswers(Shape(arguments.first, arguments.added, arguments.tokens, arguments.turns))
    chance = random.Random(arguments.seed)
    server = await asyncio.get_running_loop().create_server(
        lambda: SoakUpstream(fake, answers, arguments.faults, chance), "127.0.0.1", arguments.port, backlog=1024
    )
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=float, required=True)
    parser.add_argument("--folder", required=True, help="the model's folder (tests/fakes/vllm_folder.py)")
    for name in ("port", "seed", "first", "added", "tokens", "turns"):
        parser.add_argument(f"--{name}", type=int, required=True)
    uvloop.run(main(parser.parse_args()))
