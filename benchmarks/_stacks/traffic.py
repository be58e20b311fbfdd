"""The requests: 20 KB chats, no two alike, as bytes made beforehand."""

from __future__ import annotations

import json

MODEL = "bench"
MARK = b"bench-request-"
"""Twelve digits follow, which make the request unique: a proxy may rightly take an equal one for a retry."""
PROMPT_TOKENS = 5000
REQUEST_BYTES = 20_000


class Request:
    """A chat of eleven messages with room for the digits in the last one."""

    def __init__(self, port: int, path: str, key: str, *, stream: bool) -> None:
        turn = "The function reads a file, checks each line and returns the ones that match. " * 20
        messages = [{"role": "system", "content": "You are a coding agent. " + turn}]
        for number in range(5):
            messages.append({"role": "user", "content": f"Step {number}. {turn}"})
            messages.append({"role": "assistant", "content": f"Done with {number}. {turn}"})
        messages[-1] = {"role": "user", "content": MARK.decode() + "000000000000"}
        body = {"model": MODEL, "messages": messages, "max_tokens": 1024, "temperature": 1.0, "stream": stream}
        messages[1]["content"] += " " * (REQUEST_BYTES - len(json.dumps(body)))
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        at = raw.index(MARK) + len(MARK)
        self._before = head.encode() + raw[:at]
        self._behind = raw[at + 12 :]

    def bytes(self, number: int) -> tuple[bytes, bytes, bytes]:
        return self._before, b"%012d" % number, self._behind
