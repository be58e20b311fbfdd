"""The benchmarks' engine, which answers at once with as little processor time as Python allows.

    python -m benchmarks._stacks.upstream PORT TOKENS[,TOKENS...] TOKENS_PER_CHUNK MODEL_FOLDER

It is an asyncio protocol on uvloop. A benchmark request is recognised by the 12 digits that make it unique, or, if it
consists of token ids, by its first ids. Its answer is prepared (`answers.py`; `max_tokens` selects the length) except
for the prompt ids: either 16 ids derived from the digits, so that all prompts differ, or the ids that were sent. All
other requests (version, models, rendering, Polar's requests at its start) are answered by the tests' scripted vLLM,
whose model is in MODEL_FOLDER (`tests/fakes/vllm_folder.py`), so that Polar can render conversations itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from http.client import responses
from typing import cast

import uvloop

from benchmarks._stacks.answers import FIXED_BEGIN, VARIED, Answers, CannedAnswer, answers
from benchmarks._stacks.traffic import MARK, MODEL, TURNS
from tests.fakes.engine_server import sse
from tests.fakes.vllm_server import FakeVllm

STREAM = re.compile(rb'"stream": ?true')
_LENGTH = re.compile(rb'"max_tokens": ?(\d+)')


class Upstream(asyncio.Protocol):
    """One connection, on which requests come one after the other."""

    def __init__(self, fake: FakeVllm, answers: dict[int, Answers]) -> None:
        self._fake = fake
        self._answers = answers
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        transport.set_write_buffer_limits(high=1 << 22)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return
        raw = b"".join(self._parts)
        end = raw.find(b"\r\n\r\n")
        if end < 0:
            return
        head = raw[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        self._need = end + 4 + length
        if len(raw) < self._need:
            self._parts = [raw]
            return
        self._parts, self._have, self._need = [], 0, 0
        self._answer(raw.split(b" ", 2)[1].decode(), raw[end + 4 :])

    def _answer(self, path: str, body: bytes) -> None:
        found = self._canned(path, body)
        if found is None:
            self._transport.write(self._scripted(path, body))
        else:
            canned, ids = found
            self._transport.writelines(canned.bytes(ids))

    def _canned(self, path: str, body: bytes) -> tuple[CannedAnswer, bytes] | None:
        """Return the answer to a benchmark request, and the prompt ids to insert."""
        streamed = STREAM.search(body) is not None
        if path == "/v1/completions":
            at = body.find(b'"prompt":[' + FIXED_BEGIN)
            if at < 0:
                return None
            return self._of(body).exact[streamed], body[at + 10 : body.index(b"]", at)]
        at = body.rfind(MARK)
        if at < 0 or path != "/v1/chat/completions":
            return None
        digits = body[at + len(MARK) : at + len(MARK) + 12]
        made = self._of(body)
        if body.find(b'"tools"') < 0:
            canned = made.chat[streamed]
        else:
            canned, digits = made.turns[int(digits[10:]) % TURNS][streamed], b"00" + digits[:10]
        return canned, b",".join([b"1" + digits[start : start + 3] for start in (0, 3, 6, 9)] * (VARIED // 4))

    def _of(self, body: bytes) -> Answers:
        """Return the prepared answers with the number of tokens that the request sets in `max_tokens`."""
        length = _LENGTH.search(body)
        return self._answers[int(length[1])] if length else next(iter(self._answers.values()))

    def _scripted(self, path: str, body: bytes) -> bytes:
        request = json.loads(body) if body else {}
        if path not in ("/v1/chat/completions", "/v1/completions"):
            status, answer = self._fake.plain(path, request)
        elif (problem := self._fake.refusal(path, request)) is not None:
            status, answer = problem["error"]["code"], problem
        elif request.get("stream"):
            events = [sse(chunk) for chunk in self._fake.chunks(path, request, self._fake.default)]
            return http(200, b"".join(events) + b"data: [DONE]\n\n", "text/event-stream")
        else:
            status, answer = 200, self._fake.whole(path, request, self._fake.default)
        return http(status, json.dumps(answer).encode(), "application/json")


def http(status: int, body: bytes, kind: str) -> bytes:
    head = (
        f"HTTP/1.1 {status} {responses.get(status, '')}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def main(port: int, lengths: list[int], per_chunk: int, folder: str) -> None:
    fake = FakeVllm(model=MODEL, context_length=1 << 20, folder=folder)
    made = {tokens: answers(tokens, per_chunk) for tokens in lengths}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(fake, made), "127.0.0.1", port, backlog=512)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(
        main(int(sys.argv[1]), [int(length) for length in sys.argv[2].split(",")], int(sys.argv[3]), sys.argv[4])
    )
