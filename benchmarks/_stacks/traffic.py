"""The requests, as bytes made beforehand: single chats of 20 KB, and conversations of several turns. No two alike."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Literal

MODEL = "bench"
MARK = b"bench-request-"
"""Twelve digits follow, which make the request unique: a proxy may rightly take an equal one for a retry."""
PROMPT_TOKENS = 5000
REQUEST_BYTES = 20_000

TURNS = 12
"""Of a conversation; then its client begins another one."""
FIRST_PROMPT_TOKENS = 2000
TURN_TOKENS = 400
"""What a tool's result and the marks around it add to the prompt."""
WORD = " return value"
CALL_NAME = "look"
CALL_ARGUMENTS = '{"path": "src/reader.py", "from": 12}'

Kind = Literal["calls", "turns"]
_CALL_ID = re.compile(rb'"id":\s*"(call_[^"]+)"')
_PROSE = "The function reads a file, checks each line and returns the ones that match. "


class Talk:
    """What one client says. `next` is the next request, in pieces; `heard` is given the answer to it."""

    def __init__(self, port: int, path: str, key: str, numbers: count[int], *, stream: bool, tokens: int) -> None:
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: "
        ).encode()
        self._numbers = numbers
        self._frame = {"model": MODEL, "max_tokens": tokens, "temperature": 1.0, "stream": stream}

    def next(self) -> list[bytes]:
        raise NotImplementedError

    def heard(self, answer: bytes) -> None:
        """Only conversations go on from it."""

    def _framed(self, *body: bytes) -> list[bytes]:
        return [self._head, b"%d\r\n\r\n" % sum(map(len, body)), *body]


class Calls(Talk):
    """Single chats of eleven messages with room for the digits in the last one."""

    def __init__(self, port: int, path: str, key: str, numbers: count[int], *, stream: bool, tokens: int) -> None:
        super().__init__(port, path, key, numbers, stream=stream, tokens=tokens)
        turn = _PROSE * 20
        messages = [{"role": "system", "content": "You are a coding agent. " + turn}]
        for number in range(5):
            messages.append({"role": "user", "content": f"Step {number}. {turn}"})
            messages.append({"role": "assistant", "content": f"Done with {number}. {turn}"})
        messages[-1] = {"role": "user", "content": MARK.decode() + "000000000000"}
        body = {**self._frame, "messages": messages}
        messages[1]["content"] += " " * (REQUEST_BYTES - len(json.dumps(body)))
        raw = json.dumps(body).encode()
        at = raw.index(MARK) + len(MARK)
        self._before, self._behind = raw[:at], raw[at + 12 :]

    def next(self) -> list[bytes]:
        return self._framed(self._before, b"%012d" % next(self._numbers), self._behind)


class Turns(Talk):
    """An agent at work: system prompt, twelve tools, then a call and its result with every turn, all of it sent again.

    The digits behind the mark are ten of the conversation and two of the turn.
    """

    def __init__(self, port: int, path: str, key: str, numbers: count[int], *, stream: bool, tokens: int) -> None:
        super().__init__(port, path, key, numbers, stream=stream, tokens=tokens)
        names = [CALL_NAME, *(f"tool_{number}" for number in range(11))]
        schema = {"type": "object", "properties": {"path": {"type": "string"}, "from": {"type": "integer"}}}
        tools = [
            {"type": "function", "function": {"name": name, "description": _PROSE * 4, "parameters": schema}}
            for name in names
        ]
        system = {"role": "system", "content": "You are a coding agent. " + _PROSE * 50}
        frame = json.dumps({**self._frame, "tools": tools})
        self._before = f'{frame[:-1]}, "messages": [{json.dumps(system)}'.encode()
        function = {"name": CALL_NAME, "arguments": CALL_ARGUMENTS}
        said = {"role": "assistant", "content": WORD * tokens}
        said |= {"tool_calls": [{"id": "CALL-ID", "type": "function", "function": function}]}
        self._said = json.dumps(said).encode().split(b"CALL-ID")
        self._begin()

    def _begin(self) -> None:
        self._conversation, self._turn, self._call = next(self._numbers), 0, b""
        self._messages = [self._before]

    def next(self) -> list[bytes]:
        text = b"%b%010d%02d. " % (MARK, self._conversation, self._turn)
        if self._turn == 0:
            self._messages.append(b', {"role": "user", "content": "%b%b"}' % (text, _PROSE.encode()))
        else:
            result = b', {"role": "tool", "tool_call_id": "%b", "content": "%b%b"}'
            self._messages.append(result % (self._call, text, (_PROSE * 5).encode()[: TURN_TOKENS - 40]))
        return self._framed(*self._messages, b"]}")

    def heard(self, answer: bytes) -> None:
        found = _CALL_ID.search(answer)
        self._turn += 1
        if found is None or self._turn == TURNS:
            self._begin()
            return
        self._call = found[1]
        self._messages.append(b", " + self._call.join(self._said))


TALKS: dict[Kind, type[Talk]] = {"calls": Calls, "turns": Turns}
