"""Random WebSockets for `fuzz.py`: turns of the Responses API, and frames that break the protocol."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.gateway.random_bodies import RESPONSES, ROUTES, BodyGenerator, Route
from tests.gateway.websocket_client import opened

UNKNOWN_STEM = "0" * 20
"""Placeholder in requests for the id, without its prefix, of an earlier response. It is as long as a real id."""
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x1, 0x2, 0x8, 0x9, 0xA
_FINAL, _MASKED = 0x80, 0x80
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
_EVENT = {"type": "response.create", "generate": True}
_ROUTE = Route(
    "", {**_EVENT, **RESPONSES, "stream": True}, ("type", "model", "input"), ROUTES["responses"].is_error, ""
)
_SETTLE_SECONDS = 0.2
"""Seconds that a client waits after it broke the protocol, before it drops the connection."""


@dataclass(frozen=True)
class WebSocketCase:
    number: int
    name: str
    path: str
    key: str
    turns: tuple[tuple[bytes, int], ...]
    """The frames of each turn, and the number of answers to wait for before the next turn."""
    end: bytes | None
    """Frames that break the protocol, after which the connection is dropped; None: a proper close."""


@dataclass(frozen=True)
class WebSocketResult:
    status: int
    """The status of the last answer: 101 if all of them were responses."""
    problem: str | None = None


def make_websocket_case(number: int, rng: random.Random, path: str, key: str) -> WebSocketCase:
    name = ("/s/{key}" if path.startswith("/s/") else "") + "/v1/responses over a WebSocket"
    turns = tuple(_make_turn(rng) for _ in range(rng.choice((0, 1, 1, 2, 3, 10))))
    return WebSocketCase(number, name, path, key, turns, _make_end(rng) if rng.random() < 0.5 else None)


def _make_turn(rng: random.Random) -> tuple[bytes, int]:
    kind = rng.random()
    body = BodyGenerator(_ROUTE, rng).make()
    if kind < 0.5:
        plain: dict[str, Any] = {"type": "response.create", "model": "m", "input": "hi", "store": rng.random() < 0.5}
        if rng.random() < 0.5:
            plain["previous_response_id"] = f"resp_{UNKNOWN_STEM}"
        if rng.random() < 0.2:
            plain["generate"] = False
        body = json.dumps(plain).encode()
    elif kind < 0.53:
        body = json.dumps({"type": "response.create", "input": "x" * rng.randrange(1 << 21)}).encode()
    frames = b"".join(_message(rng, _BINARY if kind > 0.97 else _TEXT, body))
    return (frames, 1) if kind > 0.05 else (frames * 2, 2)


def _message(rng: random.Random, kind: int, body: bytes) -> Iterator[bytes]:
    """Yield the frames of a message: one or more, with some control frames between them."""
    pieces = rng.choice((1, 1, 2, 5))
    size = len(body) // pieces + 1
    for place in range(pieces):
        piece = body[place * size : (place + 1) * size]
        yield _frame((kind if place == 0 else 0) | (_FINAL if place == pieces - 1 else 0), piece)
        if rng.random() < 0.1:
            yield _frame(_FINAL | rng.choice((_PING, _PONG)), rng.randbytes(rng.randrange(126)))


def _make_end(rng: random.Random) -> bytes:
    """Return bytes after which the WebSocket cannot continue."""
    request = b'{"type": "response.create", "model": "m", "input": "hi"}'
    whole = _frame(_FINAL | _TEXT, request)
    match rng.randrange(7):
        case 0:
            return rng.randbytes(rng.randrange(1, 200))
        case 1:
            damaged = bytearray(whole)
            damaged[rng.randrange(6)] = rng.randrange(256)
            return bytes(damaged)
        case 2:
            return whole[: rng.randrange(1, len(whole))]
        case 3:
            return _frame(_TEXT, request)  # the rest of the message never comes
        case 4:
            return bytes([_FINAL | _TEXT, _MASKED | 127]) + (1 << rng.randrange(16, 63)).to_bytes(8) + bytes(100_000)
        case 5:
            return _frame(_FINAL | _CLOSE, rng.choice((b"", b"\x00", b"\x03\xe8", b"\x00\x01", b"\x03\xe8\xff")))
    return whole  # the client is gone before its answer


def _frame(first: int, payload: bytes) -> bytes:
    """Return a frame of RFC 6455, masked with zeros, so that the payload stays readable."""
    size = len(payload)
    if size < 126:
        length = bytes([_MASKED | size])
    elif size < 1 << 16:
        length = bytes([_MASKED | 126]) + size.to_bytes(2)
    else:
        length = bytes([_MASKED | 127]) + size.to_bytes(8)
    return bytes([first]) + length + bytes(4) + payload


async def run_websocket(port: int, case: WebSocketCase, documented: tuple[str, ...]) -> WebSocketResult:
    """Run a case. `documented`: error codes that are documented for status 5xx, so that they are no findings."""
    try:
        async with opened(f"http://127.0.0.1:{port}", case.path, case.key) as connection:
            result = await _take_turns(connection, case, documented)
            if case.end is not None:
                connection.transport.write(case.end)
                await asyncio.sleep(_SETTLE_SECONDS)
                connection.transport.abort()
            return result
    except InvalidStatus as refusal:
        answer = refusal.response
        try:
            fault = answer.status_code >= 500 or not json.loads(answer.body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            fault = True
        return WebSocketResult(answer.status_code, f"refused with {answer.body[:300]!r}" if fault else None)


async def _take_turns(
    connection: ClientConnection, case: WebSocketCase, documented: tuple[str, ...]
) -> WebSocketResult:
    stem, status = UNKNOWN_STEM, 101
    for frames, answers in case.turns:
        connection.transport.write(frames.replace(UNKNOWN_STEM.encode(), stem.encode()))
        for _ in range(answers):
            try:
                event = await _read_to_end(connection)
            except (ConnectionClosed, ValueError, KeyError) as error:
                return WebSocketResult(0, f"{type(error).__name__}: {error}")
            if event["type"] == "error":
                status = event["status"]
                if status >= 500 and event["error"]["code"] not in documented:
                    return WebSocketResult(status, f"{event}"[:300])
            elif event["type"] == "response.failed":
                return WebSocketResult(0, f"{event}"[:300])
            else:
                status, stem = 101, event["response"]["id"].removeprefix("resp_")
    return WebSocketResult(status)


async def _read_to_end(connection: ClientConnection) -> dict[str, Any]:
    """Return the last event of an answer."""
    while True:
        event: dict[str, Any] = json.loads(await connection.recv())
        if event["type"] in _ENDS:
            return event
