"""The recording proxy forwards bytes unchanged, records whole answers, and breaks connections."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import httpx
import pytest

from polar_proxy.conformance.recording_proxy import RecordingProxy, is_model_route

BODY = b"x" * 5000


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve a connection: GET gets a body with its length, every other method gets chunks."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.split(b"\r\n")
            length = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length")), 0)
            await reader.readexactly(length)
            named = b"x-polar-call-id: call_1\r\n"
            if lines[0].startswith((b"GET", b"HEAD")):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY))
                writer.write(b"" if lines[0].startswith(b"HEAD") else BODY)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + named)
                writer.write(b"transfer-encoding: chunked\r\n\r\n")
                for start in range(0, len(BODY), 500):
                    writer.write(b"1f4\r\n" + BODY[start : start + 500] + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.005)
                writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def proxied(
    *, committed: bool = True, cuts: Iterable[bool] = itertools.repeat(False)
) -> AsyncIterator[tuple[RecordingProxy, httpx.AsyncClient]]:
    """Serve `answer` behind a proxy. `cuts`: for each request, whether the proxy breaks the answer off."""
    decisions = iter(cuts)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        RecordingProxy("127.0.0.1", port, lambda call_id: committed, lambda exchange: next(decisions)) as proxy,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}", trust_env=False, timeout=60) as client,
    ):
        yield proxy, client
    server.close()


async def test_forwards_bytes_unchanged_and_records_model_calls() -> None:
    async with proxied() as (proxy, client):
        for _ in range(2):
            assert (await client.post("/v1/responses", json={"input": "hi"})).content == BODY
        assert (await client.head("/api/hello")).status_code == 200
        assert (await client.get("/v1/models")).content == BODY
    assert [(e.path, e.status, e.complete, e.call_id) for e in proxy.exchanges] == [
        ("/v1/responses", 200, True, "call_1")
    ] * 2
    assert all(e.body_bytes == len(BODY) and e.committed_first for e in proxy.exchanges)
    assert bytes(proxy.exchanges[0].body) == b'{"input":"hi"}'


async def test_records_an_answer_that_was_sent_before_its_call_was_committed() -> None:
    async with proxied(committed=False) as (proxy, client):
        await client.post("/v1/messages", json={})
    assert [(e.complete, e.committed_first) for e in proxy.exchanges] == [(True, False)]


async def test_cut_answer_breaks_the_connection() -> None:
    async with proxied(cuts=(True, False)) as (proxy, client):
        with pytest.raises(httpx.TransportError):
            await client.post("/v1/messages", json={})
        assert (await client.post("/v1/messages", json={})).content == BODY
    assert [(e.cut, e.complete) for e in proxy.exchanges] == [(True, False), (False, True)]
    assert 0 < proxy.exchanges[0].body_bytes < len(BODY)


async def test_records_an_incomplete_exchange_when_the_client_leaves() -> None:
    async with proxied() as (proxy, client):
        async with client.stream("POST", "/v1/messages", json={}) as response:
            async for _ in response.aiter_raw():
                break
        async with asyncio.timeout(60):
            while not proxy.exchanges:
                await asyncio.sleep(0.01)
    (exchange,) = proxy.exchanges
    assert not exchange.complete


def test_is_model_route() -> None:
    routes = ["/v1/messages?beta=true", "/v1/responses", "/s/key/v1/chat/completions"]
    routes += ["/v1beta/models/m:streamGenerateContent?alt=sse"]
    assert all(map(is_model_route, routes))
    assert not any(map(is_model_route, ["/v1/messages/count_tokens", "/v1/models", "/v1beta/models/m:countTokens"]))
