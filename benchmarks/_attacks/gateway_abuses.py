"""The abuses of `gateway.py` and their honest controls. Each returns whether the attacker got something that it must
not get, and one line about what it got."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks._attacks.gateway_client import CLOSED, Attacker, chat, read, reset

Result = tuple[bool, str]


@dataclass(frozen=True)
class Abuse:
    name: str
    run: Callable[[Attacker], Awaitable[Result]]
    control: bool = False


ABUSES: list[Abuse] = []
MODEL_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1beta/models/m:generateContent",
)
CHUNKED = "transfer-encoding: chunked"


def abuse(function: Callable[[Attacker], Awaitable[Result]]) -> Callable[[Attacker], Awaitable[Result]]:
    ABUSES.append(Abuse(function.__name__, function))
    return function


def control(function: Callable[[Attacker], Awaitable[Result]]) -> Callable[[Attacker], Awaitable[Result]]:
    ABUSES.append(Abuse(function.__name__, function, control=True))
    return function


def only(found: Counter[int], *allowed: int) -> Result:
    """Judge counts of statuses: every status that is not allowed is a fault."""
    line = ", ".join(f"{count} x {status or 'closed'}" for status, count in sorted(found.items()))
    return bool(set(found) - set(allowed)), line


def refused(found: Counter[int]) -> Result:
    """Judge counts of statuses: only 4xx and closed connections are allowed."""
    return only(found, CLOSED, *range(400, 500))


def bodies(name: str, make: Callable[[], Iterable[bytes]], allowed: tuple[int, ...] = (), together: int = 16) -> None:
    """Add an abuse that sends whole bodies to the chat route. All must be refused, or get an `allowed` status."""

    async def run(attacker: Attacker) -> Result:
        messages = (attacker.request(body) for body in make())
        return only(await attacker.statuses(messages, together), CLOSED, *range(400, 500), *allowed)

    ABUSES.append(Abuse(name, run))


def messages(name: str, make: Callable[[Attacker], Iterable[bytes]], allowed: tuple[int, ...] = ()) -> None:
    """Add an abuse that sends raw bytes. All must be refused, or get an `allowed` status."""

    async def run(attacker: Attacker) -> Result:
        return only(await attacker.statuses(make(attacker)), CLOSED, *range(400, 500), *allowed)

    ABUSES.append(Abuse(name, run))


# ---------------------------------------------------------------- connections


@abuse
async def unfinished_heads(attacker: Attacker) -> Result:
    return False, await attacker.hold(400, b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\n", b"x-a: b\r\n")


@abuse
async def silent_connections(attacker: Attacker) -> Result:
    return False, await attacker.hold(400, b"")


@abuse
async def unfinished_bodies(attacker: Attacker) -> Result:
    return False, await attacker.hold(100, attacker.head("/v1/messages", "content-length: 100000") + b"{", b" ")


@abuse
async def trickled_chunks(attacker: Attacker) -> Result:
    return False, await attacker.hold(100, attacker.head("/v1/messages", CHUNKED), b"1\r\n \r\n")


@abuse
async def expected_bodies_that_never_come(attacker: Attacker) -> Result:
    return False, await attacker.hold(
        100, attacker.head("/v1/responses", "expect: 100-continue", "content-length: 1000")
    )


@abuse
async def idle_kept_connections(attacker: Attacker) -> Result:
    return False, await attacker.hold(400, attacker.head("/v1/models", method="GET"))


@abuse
async def half_closed_connections(attacker: Attacker) -> Result:
    async def one() -> int:
        async with attacker.connection() as (reader, writer):
            writer.write(attacker.head("/v1/messages", "content-length: 1000") + b"{")
            writer.write_eof()
            return (await read(reader))[0]

    found = await asyncio.gather(*(one() for _ in range(60)), return_exceptions=True)
    return refused(Counter(status if isinstance(status, int) else CLOSED for status in found))


@abuse
async def resets(attacker: Attacker) -> Result:
    for _ in range(1500):
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", attacker.port)
            writer.write(attacker.head("/v1/messages", "content-length: 1000"))
            reset(writer)
    return False, "1500 connections reset"


@abuse
async def aborted_streams(attacker: Attacker) -> Result:
    async def one(number: int) -> None:
        with suppress(OSError):
            async with attacker.connection() as (reader, writer):
                writer.write(attacker.request(chat(f"nonce-{number:012x}-1", stream=True)))
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await reader.read(100)
                reset(writer)

    for start in range(0, 300, 20):
        await asyncio.gather(*(one(start + number) for number in range(20)))
    return False, "300 streams aborted"


@abuse
async def answers_that_are_never_read(attacker: Attacker) -> Result:
    request = attacker.request(chat("x" * 200_000, stream=True))
    return False, await attacker.hold(60, request)


@abuse
async def pipelined_requests(attacker: Attacker) -> Result:
    status, data = await attacker.exchange(attacker.head("/healthz", method="GET") * 10_000)
    return data.count(b"HTTP/1.1 200") > 100, f"{data.count(b'HTTP/1.1')} answers, the first {status}"


# ---------------------------------------------------------------- sizes

messages("endless_header", lambda a: [a.head()[:-2] + b"x: " + b"a" * 20_000_000 for _ in range(4)])
messages("endless_url", lambda a: [b"POST /v1/messages?" + b"a" * 20_000_000 for _ in range(4)])
messages("a_million_headers", lambda a: [a.head()[:-2] + b"a: b\r\n" * 1_000_000 for _ in range(4)])
messages("long_query", lambda a: [a.head("/v1beta/models/m:generateContent?" + "key=a&" * 2000) for _ in range(50)])
messages("endless_chunk_header", lambda a: [a.head("/v1/messages", CHUNKED) + b"1;" + b"e" * 20_000_000])
messages("endless_trailers", lambda a: [a.head("/v1/messages", CHUNKED) + b"0\r\n" + b"a: b\r\n" * 3_000_000])
messages(
    "endless_trailer", lambda a: [a.head("/v1/messages", CHUNKED) + b"0\r\na: " + b"b" * 20_000_000 for _ in range(4)]
)
messages(
    "endless_chunked_body", lambda a: [a.head("/v1/messages", CHUNKED) + (b"fffff\r\n" + b" " * 0xFFFFF + b"\r\n") * 80]
)
messages("one_byte_chunks", lambda a: [a.head("/v1/messages", CHUNKED) + b"1\r\n \r\n" * 2_000_000])
messages(
    "announced_length",
    lambda a: [a.head(path, f"content-length: {size}") for path in MODEL_PATHS for size in (2**40, 2**63, 10**30, -1)],
)
_MESSAGE = {"role": "user", "content": "a"}
bodies("one_large_text", lambda: [chat("x" * 30_000_000)], allowed=(200,))
bodies("large_texts_at_once", lambda: (chat("x" * 30_000_000) for _ in range(6)), allowed=(200,), together=6)
bodies("a_hundred_thousand_messages", lambda: [many(messages=[_MESSAGE] * 100_000)] * 3)
bodies("a_hundred_thousand_tools", lambda: [chat(tools=[tool(n) for n in range(100_000)])] * 3)
bodies("a_hundred_thousand_parts", lambda: [chat([{"type": "text", "text": "a"}] * 100_000)] * 3)
bodies("four_thousand_messages", lambda: [many(messages=[_MESSAGE] * 4_000)] * 3, allowed=(200,))
bodies("a_million_lists", lambda: [chat(x=[[]] * 1_000_000)] * 5)
bodies("millions_of_quotes", lambda: [b'{"a":"' + b'","' * 10_000_000 + b'"}'] * 2)
bodies("deep_lists", lambda: [b'{"a":' + b"[" * 5_000_000] * 3)
bodies("deep_objects", lambda: [b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900] * 5)
bodies(
    "large_numbers",
    lambda: [b'{"seed":' + number + b"}" for number in (b"9" * 1_000_000, b"1e999999", b"-1e400", b"NaN")],
)
bodies("words_like_keys", lambda: [chat(x=word * 50_000) for word in ("sk-", "-eyJaaaaaaaa")], allowed=(200,))
_REMINDER = "# *SEARCH/REPLACE block* Rules:"
bodies(
    "texts_like_a_harness",
    lambda: [chat(text) for text in ("<session_context>" * 10_000, " " * 200_000 + _REMINDER)],
    allowed=(200,),
)
bodies(
    "a_turn_of_many_messages",
    lambda: [many(messages=[{"role": "assistant", "content": "a" * 40}] * 4_000)],
    allowed=(200,),
)
bodies("a_gzip_bomb", lambda: [gzip.compress(b" " * 50_000_000)])


def many(**fields: Any) -> bytes:
    return json.dumps({"model": "echo", **fields}).encode()


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"t{number}", "parameters": {}}}


# ---------------------------------------------------------------- malformed text

_TEXTS = ("\0", "\ud800", "\ufeff", "\x1b[2J", "\u202e" * 1000, "a\u0301" * 10_000)
bodies("odd_text", lambda: [chat(text) for text in _TEXTS] * 5, allowed=(200,))
bodies("surrogates_in_a_long_text", lambda: [chat("\ud800" + "x" * 5_000_000)] * 3, allowed=(200,))
bodies(
    "doubled_keys",
    lambda: [b'{"model":"echo","messages":[],"messages":[{"role":"user","content":"a"}],"model":1}'] * 20,
    allowed=(200,),
)
bodies("not_utf8", lambda: [random.Random(n).randbytes(2000) for n in range(50)])
bodies("many_choices", lambda: [many(prompt=["a"] * 5000, n=128, max_tokens=1)], allowed=(200,))

# ---------------------------------------------------------------- HTTP

_BODY = chat("smuggled")
_HIDDEN = b"GET /api/v1/jobs HTTP/1.1\r\nhost: localhost\r\n\r\n"
messages(
    "length_and_chunks",
    lambda a: [
        a.head("/v1/messages", f"content-length: {len(_HIDDEN) + 5}", CHUNKED) + b"0\r\n\r\n" + _HIDDEN,
        a.head("/v1/messages", CHUNKED, "content-length: 4") + b"0\r\n\r\n" + _HIDDEN,
    ],
)
messages("two_lengths", lambda a: [a.head("/v1/messages", "content-length: 0", "content-length: 50") + _HIDDEN])
messages(
    "disguised_chunks",
    lambda a: [
        a.head("/v1/messages", line, "content-length: 5") + b"0\r\n\r\n" + _HIDDEN
        for line in (
            *("transfer-encoding: xchunked", "transfer-encoding : chunked", "transfer-encoding: chunked, identity"),
            *(
                "transfer-encoding:\x0bchunked",
                "x: y\r\n transfer-encoding: chunked",
                "transfer-encoding: chunked\r\nx",
            ),
        )
    ],
)
messages("bare_line_ends", lambda a: [a.head().replace(b"\r\n", end) for end in (b"\n", b"\r", b"\r\r\n", b"\n\r")])
messages(
    "bad_chunk_sizes",
    lambda a: [a.head("/v1/messages", CHUNKED) + size + b"\r\n" for size in (b"-1", b"0x5", b"f" * 17, b"5 5")],
)
messages(
    "other_protocols",
    lambda a: [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
    ],
    allowed=(200,),  # a request of HTTP/0.9 for a public route is answered
)
messages("connect", lambda a: [b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: 127.0.0.1:22\r\n\r\n" + _HIDDEN])
messages("absolute_urls", lambda a: [a.head("http://evil.example/api/v1/jobs", method="GET", key="x")])
messages(
    "other_methods",
    lambda a: [a.head(method=method) for method in ("PUT", "DELETE", "TRACE", "OPTIONS", "PATCH", "GET")],
)
messages(
    "websocket_junk",
    lambda a: [
        a.head(path, "connection: upgrade", "upgrade: websocket", "sec-websocket-key: a", method="GET") + b"\x81" * 5000
        for path in ("/v1/responses", "/metrics", "/")
    ],
)
messages("header_injection", lambda a: [a.request(chat(), "/v1/messages", "x-stainless-retry-count: 1\r\nx: \0")])


# ---------------------------------------------------------------- identity and routes

_OTHER_HOSTS = ("evil.example", "[::1", "127.0.0.1.evil.example", "localhost@evil.example", "a" * 5000)
messages(
    "foreign_hosts",
    lambda a: [a.request(chat()).replace(b"host: localhost", f"host: {host}".encode()) for host in _OTHER_HOSTS],
)
messages(
    "foreign_origins",
    lambda a: [a.request(chat(), "/v1/messages", f"origin: http://{host}") for host in (*_OTHER_HOSTS, "null")],
)


@abuse
async def guessed_keys(attacker: Attacker) -> Result:
    keys = [f"sk-{random.Random(n).getrandbits(64):x}" for n in range(300)] + ["", "sk-", "null", "\xff", "sk-victi"]
    return only(await attacker.statuses(attacker.request(chat(), key=key) for key in keys), 401)


@abuse
async def anothers_session_id(attacker: Attacker) -> Result:
    own = f"/s/{attacker.victims_session}/v1/chat/completions"
    requests = [attacker.request(chat(), own), attacker.request(chat(), own, key=attacker.victims_session)]
    requests += [attacker.request(chat(), f"/v1/chat/completions?key={attacker.victims_session}", key="")]
    return only(await attacker.statuses(requests), 401)


@abuse
async def anothers_answer(attacker: Attacker) -> Result:
    body = json.dumps({"model": "m", "input": "x", "previous_response_id": "resp_01"}).encode()
    return refused(await attacker.statuses([attacker.request(body, "/v1/responses")] * 20))


@abuse
async def api_without_its_key(attacker: Attacker) -> Result:
    paths = ("jobs", "rollouts", "sessions", "keys", "metrics", "openapi.json", "rollouts?where=" + "(" * 8000)
    requests = [attacker.head(f"/api/v1/{path}", "connection: close", method="GET") for path in paths]
    requests += [attacker.request(b"[" * 1_000_000, "/api/v1/jobs")]
    return refused(await attacker.statuses(requests))


@abuse
async def odd_paths(attacker: Attacker) -> Result:
    paths = (
        *("/v1%2Fchat/completions", "/v1/chat%00/completions", "//v1/messages", "/v1/../api/v1/jobs", "/s/"),
        *("/s//v1/messages", "/s/%2e%2e/api/v1/jobs", "/%", "/%zz", "/v1/messages/", "/s/a/s/b/v1/messages"),
        "/v1/models/" + "../" * 2000,
    )
    found = await attacker.statuses(attacker.request(chat(), path) for path in paths)
    found += await attacker.statuses(attacker.head(path, "connection: close", method="GET", key="") for path in paths)
    return only(found, CLOSED, 200, 307, *range(400, 500))  # GET /v1/models/anything is a model's description


@abuse
async def counted_tokens(attacker: Attacker) -> Result:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x " * 200_000}]}).encode()
    return only(
        await attacker.statuses([attacker.request(body, "/v1/messages/count_tokens")] * 60, 8), CLOSED, 200, 400, 429
    )


@abuse
async def new_conversations(attacker: Attacker) -> Result:
    words = (chat(f"conversation nonce-{number:012x}-7 " + "word " * 2000) for number in range(300))
    return only(await attacker.statuses((attacker.request(body) for body in words), 4), 200, 429)


# ---------------------------------------------------------------- honest counterparts


async def answered(attacker: Attacker, body: bytes, *, parts: int = 1, pause: float = 0.0) -> Result:
    request = attacker.request(body)
    size = len(request) // parts + 1
    pieces = [request[start : start + size] for start in range(0, len(request), size)]
    status, data = await attacker.exchange(*pieces, pause=pause)
    return status != 200, f"{status} to {len(body)} bytes" + (f": {data[-200:]!r}" if status != 200 else "")


@control
async def honest_long_text(attacker: Attacker) -> Result:
    return await answered(attacker, chat('row, [a], {"b": 1}\n' * 3_000))


@control
async def honest_image(attacker: Attacker) -> Result:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 50_000}}
    return await answered(attacker, chat([{"type": "text", "text": "what is it?"}, image]))


@control
async def honest_tools(attacker: Attacker) -> Result:
    return await answered(attacker, chat(tools=[tool(number) for number in range(500)]))


@control
async def honest_history(attacker: Attacker) -> Result:
    turns = [{"role": role, "content": f"turn {n}"} for n in range(1500) for role in ("user", "assistant")]
    return await answered(attacker, many(messages=[*turns, {"role": "user", "content": "go on"}]))


@control
async def honest_slow_upload(attacker: Attacker) -> Result:
    return await answered(attacker, chat("x" * 40_000), parts=10, pause=0.2)


@control
async def honest_chunks(attacker: Attacker) -> Result:
    body = chat("in chunks")
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[n : n + 10]), body[n : n + 10]) for n in range(0, len(body), 10))
    status = await attacker.send(
        attacker.head("/v1/chat/completions", "connection: close", CHUNKED), chunks, b"0\r\n\r\n"
    )
    return status != 200, str(status)


@control
async def honest_two_requests_on_one_connection(attacker: Attacker) -> Result:
    body = chat("one")
    kept = attacker.head("/v1/chat/completions", f"content-length: {len(body)}") + body
    _, data = await attacker.exchange(kept, attacker.request(chat("two")), pause=0.5)
    return data.count(b"HTTP/1.1 200") != 2, f"{data.count(b'HTTP/1.1 200')} answers"
