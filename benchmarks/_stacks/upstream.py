"""The engine of the benchmark: answers at once, and costs as little as Python allows.

    python -m benchmarks._stacks.upstream PORT TOKENS TOKENS_PER_CHUNK

A hand-written protocol on uvloop. A benchmark request is known by the 12 digits that make it unique; its answer is
made beforehand except for 16 prompt ids near the end that follow from these digits, so that no two prompts are alike.
Everything else (version, models, the questions that Polar asks at start) is answered by the scripted vLLM of the tests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from http.client import responses
from typing import cast

import uvloop

from benchmarks._stacks.traffic import MARK, MODEL, PROMPT_TOKENS
from tests.fakes.vllm_server import FakeVllm, error, sse

VARIED = 16
WORD = " return value"


def entry(token: int) -> dict[str, object]:
    return {"token": WORD, "logprob": -0.5 - token / 4096, "bytes": list(WORD.encode()), "top_logprobs": []}


def answers(tokens: int, per_chunk: int) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """(before, behind) the varied prompt ids: of the whole answer, and of the streamed one, HTTP framing included."""
    fixed = [(7 * position) % 2000 + 100 for position in range(PROMPT_TOKENS - VARIED)]
    ids = [(31 * position) % 2000 + 100 for position in range(tokens)]
    hole = '"HOLE"'
    length = VARIED * 5 - 1  # four digits and a comma each
    head = {"id": "chatcmpl-bench", "created": 0, "model": MODEL}
    whole = json.dumps(
        head
        | {
            "object": "chat.completion",
            "prompt_token_ids": [*fixed, "HOLE"],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": WORD * tokens, "tool_calls": None, "reasoning": None},
                    "logprobs": {"content": [entry(token) for token in ids]},
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": ids,
                }
            ],
            "usage": {
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": tokens,
                "total_tokens": PROMPT_TOKENS + tokens,
            },
        },
        separators=(",", ":"),
    )
    size = len(whole) - len(hole) + length
    whole = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n" + whole
    one, two = whole.encode().split(hole.encode())

    head |= {"object": "chat.completion.chunk"}
    delta = {"role": "assistant", "content": ""}
    first = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    chunks = [head | {"choices": [first], "prompt_token_ids": [*fixed, "HOLE"]}]
    for start in range(0, tokens, per_chunk):
        part = ids[start : start + per_chunk]
        choice = {
            "index": 0,
            "delta": {"content": WORD * len(part)},
            "logprobs": {"content": [entry(token) for token in part]},
            "finish_reason": "stop" if start + per_chunk >= tokens else None,
            "token_ids": part,
        }
        chunks.append(head | {"choices": [choice]})
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
    chunks.append(head | {"choices": [], "usage": usage})
    events = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks]
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    for event in [*events, b"data: [DONE]\n\n"]:
        # As uvicorn does it: one HTTP chunk for each event.
        size = len(event) + (length - len(hole) if hole.encode() in event else 0)
        raw += b"%x\r\n%b\r\n" % (size, event)
    three, four = (raw + b"0\r\n\r\n").split(hole.encode())
    return (one, two), (three, four)


class Upstream(asyncio.Protocol):
    """One connection; requests come one behind the other."""

    def __init__(self, fake: FakeVllm, whole: tuple[bytes, bytes], streamed: tuple[bytes, bytes]) -> None:
        self._fake = fake
        self._whole = whole
        self._streamed = streamed
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
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
        at = body.find(MARK)
        if at < 0:
            self._transport.write(self._scripted(path, body))
            return
        digits = body[at + len(MARK) : at + len(MARK) + 12]
        varied = b",".join([b"1" + digits[start : start + 3] for start in (0, 3, 6, 9)] * (VARIED // 4))
        streamed = body.find(b'"stream":true') >= 0 or body.find(b'"stream": true') >= 0
        before, behind = self._streamed if streamed else self._whole
        self._transport.writelines((before, varied, behind))

    def _scripted(self, path: str, body: bytes) -> bytes:
        asked = json.loads(body) if body else {}
        if path not in ("/v1/chat/completions", "/v1/completions"):
            status, answer = self._fake.plain(path, asked)
        elif (problem := self._fake.refusal(path, asked)) is not None:
            status, answer = problem["error"]["code"], problem
        elif asked.get("stream"):
            events = [sse(chunk) for chunk in self._fake.chunks(path, asked, self._fake.default)]
            return http(200, b"".join(events) + b"data: [DONE]\n\n", "text/event-stream")
        else:
            status, answer = 200, self._fake.whole(path, asked, self._fake.default)
        return http(status, json.dumps(answer).encode(), "application/json")


def http(status: int, body: bytes, kind: str) -> bytes:
    head = (
        f"HTTP/1.1 {status} {responses.get(status, '')}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def main(port: int, tokens: int, per_chunk: int) -> None:
    fake = FakeVllm(model=MODEL, context_length=1 << 20)
    whole, streamed = answers(tokens, per_chunk)
    assert error  # the scripted server's own shapes are used for what is not measured
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(fake, whole, streamed), "127.0.0.1", port, backlog=512)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:4])))
