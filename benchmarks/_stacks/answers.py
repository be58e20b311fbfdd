"""Prepared answers of the benchmark's engine in vLLM's format, with a gap for the prompt ids, which differ by call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks._stacks.traffic import (
    CALL_ARGUMENTS,
    CALL_NAME,
    FIRST_PROMPT_TOKENS,
    MODEL,
    PROMPT_TOKENS,
    TURN_TOKENS,
    TURNS,
    WORD,
)

END_OF_TURN = 2
"""Token id in the vocabulary of the tests' scripted vLLM."""
VARIED = 16
"""Number of prompt ids, of four digits each, that make a prompt unique."""
FIXED_BEGIN = b"100,107,114,121,"
_HOLE = '"HOLE"'
_CALL = {"name": CALL_NAME, "arguments": CALL_ARGUMENTS}


def fixed_ids(count: int) -> list[int]:
    return [(7 * position) % 2000 + 100 for position in range(count)]


def _entry(token: int) -> dict[str, object]:
    return {"token": WORD, "logprob": -0.5 - token / 4096, "bytes": list(WORD.encode()), "top_logprobs": []}


@dataclass(frozen=True)
class CannedAnswer:
    """The bytes of an HTTP answer before and after the prompt ids."""

    before: bytes
    after: bytes
    framed: bool
    """True if the prompt ids are inside an HTTP chunk or body, whose length is sent before it. `before` then contains
    the length without the prompt ids, between two NUL bytes."""

    def bytes(self, ids: bytes) -> list[bytes]:
        if not self.framed:
            return [self.before, ids, self.after]
        head, size, rest = self.before.split(b"\0")
        form = b"%d" if b"content-length" in head else b"%x"
        return [head, form % (int(size) + len(ids)), rest, ids, self.after]


def _canned(head: bytes, raw: bytes, size: int) -> CannedAnswer:
    """Split an answer at the place of the prompt ids. In the answer, `head` is followed by the length `size` and by
    `raw`."""
    before, after = raw.split(_HOLE.encode())
    return CannedAnswer(head + b"\0%d\0" % (size - len(_HOLE)) + before, after, True)


def _usage(prompt: int, tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _whole(body: dict[str, Any]) -> CannedAnswer:
    raw = json.dumps(body, separators=(",", ":")).encode()
    return _canned(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ", b"\r\n\r\n" + raw, len(raw)
    )


def _streamed(chunks: list[dict[str, Any]]) -> CannedAnswer:
    """Return one HTTP chunk per event, as uvicorn sends them. The prompt ids are in the first event."""
    events = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks]
    first, *rest = [*events, b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    made = _canned(head, b"\r\n" + first + b"\r\n", len(first))
    return CannedAnswer(
        made.before, made.after + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in rest) + b"0\r\n\r\n", True
    )


@dataclass(frozen=True)
class Answers:
    """All prepared answers of one length. The dictionaries have the key True for the streamed answer, False for the
    whole one."""

    chat: dict[bool, CannedAnswer]
    """The answer to a single chat."""
    turns: list[dict[bool, CannedAnswer]]
    """The answer to each turn of a conversation on the chat route."""
    exact: dict[bool, CannedAnswer]
    """The answer to a conversation that arrives as token ids."""


def answers(tokens: int, per_chunk: int) -> Answers:
    ids = [(31 * position) % 2000 + 100 for position in range(tokens - 1)] + [END_OF_TURN]
    single = chat_answers(ids, [*fixed_ids(PROMPT_TOKENS - VARIED), "HOLE"], PROMPT_TOKENS, per_chunk, calls=False)
    turns = []
    prompt: list[int | str] = [*fixed_ids(FIRST_PROMPT_TOKENS - VARIED), "HOLE"]
    length = FIRST_PROMPT_TOKENS
    for _ in range(TURNS):
        turns.append(chat_answers(ids, prompt, length, per_chunk, calls=True))
        new = [END_OF_TURN if position % 100 == 99 else 200 + position % 50 for position in range(TURN_TOKENS)]
        prompt = [*prompt, *ids, *new]
        length += len(ids) + len(new)
    return Answers(single, turns, exact_answers(ids, per_chunk, calls=True))


def chat_answers(
    ids: list[int], prompt: list[int | str], length: int, per_chunk: int, *, calls: bool
) -> dict[bool, CannedAnswer]:
    tokens = len(ids)
    finish = "tool_calls" if calls else "stop"
    call = {"id": "call_bench", "type": "function", "function": _CALL}
    message = {"role": "assistant", "content": WORD * tokens, "tool_calls": [call] if calls else None}
    choice = {"index": 0, "message": message | {"reasoning": None}, "finish_reason": finish, "stop_reason": None}
    choice |= {"logprobs": {"content": [_entry(token) for token in ids]}, "token_ids": ids}
    head = {"id": "chatcmpl-bench", "created": 0, "model": MODEL}
    whole = head | {"object": "chat.completion", "prompt_token_ids": prompt, "choices": [choice]}

    head |= {"object": "chat.completion.chunk"}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    chunks = [head | {"choices": [first], "prompt_token_ids": prompt}]
    for start in range(0, tokens, per_chunk):
        part = ids[start : start + per_chunk]
        last = start + per_chunk >= tokens
        delta: dict[str, Any] = {"content": WORD * len(part)}
        if last and calls:
            delta["tool_calls"] = [{"index": 0} | call]
        choice = {"index": 0, "delta": delta, "finish_reason": finish if last else None, "token_ids": part}
        chunks.append(head | {"choices": [choice | {"logprobs": {"content": [_entry(token) for token in part]}}]})
    chunks.append(head | {"choices": [], "usage": _usage(length, tokens)})
    return {False: _whole(whole | {"usage": _usage(length, tokens)}), True: _streamed(chunks)}


def exact_answers(ids: list[int], per_chunk: int, *, calls: bool) -> dict[bool, CannedAnswer]:
    """Return completions, in which the tool call, if there is one, is part of the text."""
    tokens = len(ids)
    call_text = (
        f'\n<tool_call>\n{{"name": "{CALL_NAME}", "arguments": {CALL_ARGUMENTS}}}\n</tool_call>' if calls else ""
    )

    def choice(part: list[int], last: bool) -> dict[str, Any]:
        logprobs = {"text_offset": [0] * len(part), "token_logprobs": [-0.5 - token / 4096 for token in part]}
        logprobs |= {"tokens": [WORD] * len(part), "top_logprobs": None}
        text = WORD * len(part) + (call_text if last else "")
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "stop" if last else None} | {
            "stop_reason": None,
            "token_ids": part,
        }

    head: dict[str, Any] = {"id": "cmpl-bench", "object": "text_completion", "created": 0, "model": MODEL}
    usage = {"usage": _usage(0, tokens)}
    whole = head | {"choices": [choice(ids, True) | {"prompt_token_ids": ["HOLE"]}]} | usage
    chunks = []
    for start in range(0, tokens, per_chunk):
        made = choice(ids[start : start + per_chunk], start + per_chunk >= tokens)
        chunks.append(head | {"choices": [made | ({} if start else {"prompt_token_ids": ["HOLE"]})]})
    chunks.append(head | {"choices": []} | usage)
    return {False: _whole(whole), True: _streamed(chunks)}
