"""Interception with the real mitmproxy: programs that name a provider's host are answered by the gateway."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import ssl
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.intercept.certificates import open_authority
from polar_proxy.intercept.variables import intercepted_variables
from polar_proxy.store import Store
from polar_proxy.types import Json
from tests.conftest import Serve
from tests.gateway.agents import CHAT, recorded_calls
from tests.intercept.conftest import RunningProxy, StartProxy

pytestmark = pytest.mark.full

SECRET = "sk-proj-the-agents-own-key"
OPENAI = "https://api.openai.com/v1/chat/completions"
ANTHROPIC = "https://api.anthropic.com/v1/messages"


def hello() -> ScriptedEngine:
    return ScriptedEngine(lambda request: "hello", tokens_per_event=1)


def client(proxy: RunningProxy, trusted: Path | None = None, **options: object) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=str(trusted or proxy.authority.bundle))
    return httpx.AsyncClient(proxy=proxy.url, verify=context, timeout=120, **options)  # type: ignore[arg-type]


async def curl(proxy: RunningProxy, *arguments: str, trust: bool = True) -> tuple[int, str, str]:
    """Run curl with the environment of `polar intercept`; without `trust`, it pins other certificates."""
    env = {"PATH": "/usr/bin:/bin", **intercepted_variables(proxy.authority, int(proxy.url.rpartition(":")[2]))}
    if not trust:
        env["CURL_CA_BUNDLE"] = "/etc/ssl/certs/ca-certificates.crt"
    process = await asyncio.create_subprocess_exec("curl", "-sS", *arguments, env=env, stdout=-1, stderr=-1)
    out, error = await process.communicate()
    return process.returncode or 0, out.decode(), error.decode()


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_calls_over_http_1_and_2_are_answered_and_recorded(
    serve: Serve, store: Store, start_proxy: StartProxy, version: str
) -> None:
    body = json.dumps({**CHAT, "stream": True})
    headers = ("-H", "content-type: application/json", "-H", f"authorization: Bearer {SECRET}")
    shown = ("-w", "%{http_version}", "-d", body, *headers)
    async with serve(hello()) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            code, out, error = await curl(proxy, f"--http{version}", *shown, OPENAI)
    assert (code, error) == (0, "")
    assert out.endswith(f"data: [DONE]\n\n{version}")
    assert "".join(json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in out.split("\n\n")[:6])
    ((call,), (session,)) = await recorded_calls(store, 1), await store.sessions.recent()
    assert (call.status, call.dialect, session.label) == ("ok", "openai_chat", "my-run")


async def test_a_compressed_request_is_answered(serve: Serve, start_proxy: StartProxy) -> None:
    body, headers = gzip.compress(json.dumps(CHAT).encode()), {"content-encoding": "gzip"}
    async with serve(hello()) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            async with client(proxy) as http:
                assert (await http.post(OPENAI, content=body, headers=headers)).status_code == 200


async def test_a_stream_arrives_as_it_is_sampled(serve: Serve, start_proxy: StartProxy) -> None:
    slow = ScriptedEngine(lambda request: "x" * 40, pace=0.1, tokens_per_event=1)
    async with serve(slow) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            async with client(proxy) as http, http.stream("POST", OPENAI, json={**CHAT, "stream": True}) as reply:
                times = [asyncio.get_running_loop().time() async for _ in reply.aiter_raw()]
    assert len(times) > 20
    assert times[-1] - times[0] > 2


async def test_a_websocket_is_answered_and_recorded(serve: Serve, store: Store, start_proxy: StartProxy) -> None:
    async with serve(hello()) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            context = ssl.create_default_context(cafile=str(proxy.authority.bundle))
            url = "wss://chatgpt.com/backend-api/codex/responses"
            headers = {"authorization": f"Bearer {SECRET}"}
            async with connect(url, proxy=proxy.url, ssl=context, additional_headers=headers) as socket:
                for number in (1, 2):
                    await socket.send(json.dumps({"type": "response.create", "model": "m", "input": f"turn {number}"}))
                    while json.loads(await socket.recv())["type"] != "response.completed":
                        pass
    assert [call.status for call in await recorded_calls(store, 2)] == ["ok", "ok"]


async def test_a_program_that_does_not_trust_the_authority_is_reported(serve: Serve, start_proxy: StartProxy) -> None:
    async with serve(hello()) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            code, _, _ = await curl(proxy, "-d", json.dumps(CHAT), OPENAI, trust=False)
            assert code == 60
            pin = ("--pinnedpubkey", "sha256//" + "A" * 43 + "=")
            assert (await curl(proxy, *pin, "-d", "{}", ANTHROPIC))[0] == 90
    found = {event["host"]: event["reason"] for event in proxy.events if event["event"] == "untrusted"}
    assert found.keys() == {"api.openai.com", "api.anthropic.com"}
    assert "does not trust" in found["api.openai.com"]
    assert "before its first request" in found["api.anthropic.com"]


def post_with_host(proxy: RunningProxy, host: str) -> int:
    """Post a call through the proxy as Python's http.client does: it keeps the case of the host's name."""
    context = ssl.create_default_context(cafile=str(proxy.authority.bundle))
    connection = http.client.HTTPSConnection(proxy.url.removeprefix("http://"), context=context, timeout=120)
    connection.set_tunnel(host, 443)
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), {"content-type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status


async def test_a_host_in_capital_letters_is_not_reported_as_untrusted(serve: Serve, start_proxy: StartProxy) -> None:
    async with serve(hello()) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            assert await asyncio.to_thread(post_with_host, proxy, "API.openai.com") == 200
    assert [event for event in proxy.events if event["event"] == "untrusted"] == []


async def test_the_certificate_is_for_the_host_that_was_asked(serve: Serve, start_proxy: StartProxy) -> None:
    """httpx verifies the host's name, and this one verifies each of several hosts on its own connection."""
    urls = (OPENAI, "https://openrouter.ai/api/v1/chat/completions", "https://api.mistral.ai/v1/chat/completions")
    async with serve(hello()) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            async with client(proxy) as http:
                assert [(await http.post(url, json=CHAT)).status_code for url in urls] == [200, 200, 200]


async def test_other_hosts_pass_untouched_or_are_refused(serve: Serve, start_proxy: StartProxy, tmp_path: Path) -> None:
    """The other host has certificates of another authority, which the client verifies through the proxy."""
    theirs = open_authority(tmp_path)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmine")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=theirs.server_context(["localhost"]))
    async with server, serve(hello()) as gateway:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}/"
        with start_proxy(gateway.url, "my-run", others="list") as proxy:
            async with client(proxy, theirs.certificate) as http:
                assert (await http.get(url)).text == "mine"
        assert {"event": "other", "host": "localhost"} in proxy.events
        with start_proxy(gateway.url, "my-run", others="refuse") as proxy:
            async with client(proxy, theirs.certificate) as http:
                with pytest.raises(httpx.ProxyError, match="403"):
                    await http.get(url)
        assert proxy.events == [{"event": "refused", "host": "localhost"}]


async def test_other_paths_of_model_hosts_are_answered_or_refused(
    serve: Serve, store: Store, start_proxy: StartProxy
) -> None:
    async with serve(hello()) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            async with client(proxy) as http:
                logged = await http.post("https://api.anthropic.com/api/event_logging/batch", json={"secret": 1})
                models = await http.get("https://api.openai.com/v1/models")
                refused = await http.get("https://api.anthropic.com/api/oauth/profile")
    assert (logged.status_code, logged.json()) == (200, {})
    assert models.json()["data"][0]["id"] == "scripted-model"
    assert (refused.status_code, refused.json()["type"]) == (404, "error")
    assert await store.sessions.recent() == []


async def test_two_hundred_streams_at_a_time(serve: Serve, store: Store, start_proxy: StartProxy) -> None:
    slow = ScriptedEngine(lambda request: "x" * 20, pace=0.05, tokens_per_event=1)
    async with serve(slow) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            limits = httpx.Limits(max_connections=200)
            async with client(proxy, limits=limits) as http:

                async def one(number: int) -> bytes:
                    body = {**CHAT, "messages": [{"role": "user", "content": f"number {number}"}], "stream": True}
                    return (await http.post(OPENAI, json=body)).content

                answers = await asyncio.gather(*map(one, range(200)))
    assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)
    assert [call.status for call in await recorded_calls(store, 200)] == ["ok"] * 200


async def test_what_is_recorded_of_500_calls_is_what_was_answered(
    serve: Serve, store: Store, start_proxy: StartProxy
) -> None:
    """In four dialects; each question has an answer of its own."""

    def echo(request: object) -> str:
        return f"answer to {request.messages[-1].content}"  # type: ignore[attr-defined]

    def request(number: int) -> tuple[str, Json]:
        text = f"question {number}"
        message = {"role": "user", "content": text}
        return (
            (OPENAI, {"model": "m", "messages": [message]}),
            ("https://chatgpt.com/backend-api/codex/responses", {"model": "m", "input": text}),
            ("https://api.anthropic.com/v1/messages", {"model": "m", "max_tokens": 100, "messages": [message]}),
            (
                "https://generativelanguage.googleapis.com/v1beta/models/m:generateContent",
                {"contents": [{"role": "user", "parts": [{"text": text}]}]},
            ),
        )[number % 4]

    async with serve(ScriptedEngine(echo)) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            async with client(proxy, limits=httpx.Limits(max_connections=16)) as http:

                async def one(number: int) -> tuple[str, str]:
                    url, body = request(number)
                    reply = await http.post(url, json=body, headers={"authorization": f"Bearer {SECRET}"})
                    assert f"answer to question {number}" in reply.text
                    return reply.headers["x-polar-call-id"], f"answer to question {number}"

                answered = dict(await asyncio.gather(*map(one, range(500))))
    recorded = {call.call_id: call.choices[0].message.content for call in await recorded_calls(store, 500)}
    assert recorded == answered


async def test_the_agents_key_reaches_neither_the_gateway_nor_the_store(
    serve: Serve, store: Store, start_proxy: StartProxy
) -> None:
    keys = dict.fromkeys(("authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie"), SECRET)
    async with serve(hello()) as gateway:
        with start_proxy(gateway.url, "my-run") as proxy:
            async with client(proxy) as http:
                assert (await http.post(f"{OPENAI}?key={SECRET}", json=CHAT, headers=keys)).status_code == 200
    await recorded_calls(store, 1)
    path = store.database.path
    assert path is not None
    assert all(SECRET.encode() not in file.read_bytes() for file in path.parent.glob(path.name + "*"))


async def test_recording_passes_calls_on_with_the_agents_key_and_the_rest_to_the_host_itself(
    serve: Serve, store: Store, start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the provider with real TLS; the proxy cannot reach the provider's real host for other paths."""
    theirs = open_authority(tmp_path)
    seen: list[bytes] = []
    choice = {"index": 0, "message": {"content": "from the provider"}, "finish_reason": "stop"}
    answer = json.dumps({"id": "x", "choices": [choice]}).encode()

    async def provider(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer))
        writer.write(answer)
        await writer.drain()
        writer.close()

    monkeypatch.setenv("SSL_CERT_FILE", str(theirs.bundle))
    server = await asyncio.start_server(provider, "127.0.0.1", 0, ssl=theirs.server_context(["localhost"]))
    async with server:
        engine = PassthroughEngine(f"https://localhost:{server.sockets[0].getsockname()[1]}")
        async with serve(engine) as gateway:
            with start_proxy(gateway.url, "my-run", record=True) as proxy:
                async with client(proxy) as http:
                    keys = {"authorization": f"Bearer {SECRET}"}
                    reply = await http.post(OPENAI, json=CHAT, headers=keys)
                    counted = await http.post(f"{ANTHROPIC}/count_tokens", json=CHAT, headers=keys)
                    files = await http.get("https://api.openai.com/v1/files")
    assert [(one.status_code, one.content) for one in (reply, counted)] == [(200, answer)] * 2
    assert [head.split(b" ")[1] for head in seen] == [b"/v1/chat/completions", b"/v1/messages/count_tokens"]
    assert all(f"authorization: Bearer {SECRET}".encode() in head for head in seen)
    assert files.status_code == 502  # of mitmproxy: the host itself cannot be reached from here
    (call,) = await recorded_calls(store, 1)
    assert (call.status, call.choices[0].message.content) == ("no_tokens", "from the provider")
