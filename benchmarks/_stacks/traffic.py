"""Requests as prepared bytes: single chats of 20 KB, and conversations of several turns. All requests differ."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Literal

MODEL = "bench"
MARK = b"bench-request-"
"""Text before the twelve digits that make a request unique, because a proxy may take an equal request for a retry."""
PROMPT_TOKENS = 5000
REQUEST_BYTES = 20_000

TURNS = 12
"""Number of turns of a conversation, after which its client starts a new one."""
FIRST_PROMPT_TOKENS = 2000
TURN_TOKENS = 400
"""Prompt tokens that a tool result with its template adds."""
WORD = " return value"
CALL_NAME = "look"
CALL_ARGUMENTS = '{"path": "src/reader.py", "from": 12}'

Kind = Literal["calls", "turns"]
_CALL_ID = re.compile(rb'"id":\s*"(call_[^"]+)"')
_PROSE = "The function reads a file, checks each line and returns the ones that match. "


class ClientTraffic:
    """The requests of one client. `next` returns the next request in pieces; `receive` gets the answer to it."""

    def __init__(self, port: int, path: str, key: str, numbers: count[int], *, stream: bool, tokens: int) -> None:
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: "
        ).encode()
        self._numbers = numbers
        self._frame = {"model": MODEL, "max_tokens": tokens, "temperature": 1.0, "stream": stream}

    def next(self) -> list[bytes]:
        raise NotImplementedError

    def receive(self, answer: bytes) -> None:
        """Do nothing; conversations override this."""

    def _framed(self, *body: bytes) -> list[bytes]:
        return [self._head, b"%d\r\n\r\n" % sum(map(len, body)), *body]


class SingleChats(ClientTraffic):
    """Single chats of eleven messages, with the digits in the last one."""

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
        self._before, self._after = raw[:at], raw[at + 12 :]

    def next(self) -> list[bytes]:
        return self._framed(self._before, b"%012d" % next(self._numbers), self._after)


class Conversations(ClientTraffic):
    """Conversations of an agent: system prompt, twelve tools, and a tool call with its result in every turn.

    Of the twelve digits, the first ten are the number of the conversation, and the last two that of the turn.
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
        answer = {"role": "assistant", "content": WORD * tokens}
        answer |= {"tool_calls": [{"id": "CALL-ID", "type": "function", "function": function}]}
        self._answer = json.dumps(answer).encode().split(b"CALL-ID")
        self._start()

    def _start(self) -> None:
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

    def receive(self, answer: bytes) -> None:
        found = _CALL_ID.search(answer)
        self._turn += 1
        if found is None or self._turn == TURNS:
            self._start()
            return
        self._call = found[1]
        self._messages.append(b", " + self._call.join(self._answer))


TRAFFIC: dict[Kind, type[ClientTraffic]] = {"calls": SingleChats, "turns": Conversations}
