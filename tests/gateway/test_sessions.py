"""Which keys are accepted, and which session a request belongs to."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from anthropic.types import ModelInfo

from polar_proxy.config import GatewaySettings, is_loopback
from polar_proxy.engines.scripted import INFO, ScriptedEngine
from polar_proxy.engines.vllm.client import chat_body
from polar_proxy.gateway.answering import apply_policy
from polar_proxy.gateway.recording import recorded_sampling
from polar_proxy.rollouts import JobSpec, submit
from polar_proxy.sessions import registry
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.sessions.registry import SessionRegistry
from polar_proxy.store import SessionRow, Store
from polar_proxy.tasks import get_source
from polar_proxy.types import ChatRequest, Message, Sampling
from tests.conftest import Serve
from tests.gateway.agents import CHAT, new_session
from tests.until import GUARD_SECONDS

pytestmark = pytest.mark.slow


async def ask(url: str, path: str = "/v1", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as http:
        return await http.post(f"{url}{path}/chat/completions", json=CHAT, headers=headers)


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
async def test_finds_the_session_by_each_key_header(serve: Serve, store: Store, header: str) -> None:
    key = new_key()
    session_id = await new_session(store, key)
    value = f"Bearer {key}" if header == "authorization" else key
    async with serve(ScriptedEngine(), require_known_keys=True) as gateway:
        answer = await ask(gateway.url, **{header: value})
        assert answer.headers["x-polar-session-id"] == session_id
        async with httpx.AsyncClient(timeout=120) as http:
            by_query = await http.post(f"{gateway.url}/v1/chat/completions?key={key}", json=CHAT)
        assert by_query.headers["x-polar-session-id"] == session_id
        by_path = await ask(gateway.url, f"/s/{key}/v1")
        assert by_path.headers["x-polar-session-id"] == session_id
        assert (await store.calls.of_session(session_id))[-1].path == "/v1/chat/completions"


async def test_any_key_opens_a_session_on_loopback(serve: Serve, store: Store) -> None:
    """Each key opens one session, even if several first calls race."""
    async with serve(ScriptedEngine()) as gateway:
        answers = await asyncio.gather(
            *(ask(gateway.url, authorization=f"Bearer agent-{number % 2}") for number in range(8)), ask(gateway.url)
        )
    assert all(answer.status_code == 200 for answer in answers)
    ids = [answer.headers["x-polar-session-id"] for answer in answers]
    assert len(set(ids)) == 3
    assert len(set(ids[:8:2])) == 1
    assert {row.origin for row in await store.sessions.recent()} == {"open"}


async def test_clients_without_a_key_do_not_share_a_session(
    serve: Serve, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Each connection without a key has its own session, also with an empty key. One warning is logged."""
    async with serve(ScriptedEngine()) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=120) as one, httpx.AsyncClient(timeout=120) as other:
            ids = [(await http.post(url, json=CHAT)).headers["x-polar-session-id"] for http in (one, other, one, other)]
            empty = await one.post(f"{gateway.url}/s//v1/chat/completions", json=CHAT, headers={"x-api-key": ""})
            keyed = await one.post(url, json=CHAT, headers={"x-api-key": "mine"})
        assert ids[0] == ids[2] != ids[1] == ids[3]
        assert empty.headers["x-polar-session-id"] == ids[0]
        assert keyed.headers["x-polar-session-id"] not in ids
    assert len(await store.sessions.recent()) == 3
    assert sum("sends no API key" in record.message for record in caplog.records) == 1


async def test_a_client_without_a_key_is_known_by_the_thread_that_it_reports(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as gateway:
        answers = [await ask(gateway.url, **{"session-id": thread}) for thread in ("a", "b", "a")]
        answers.append(await ask(gateway.url, **{"session-id": "a", "authorization": "Bearer a"}))
    ids = [answer.headers["x-polar-session-id"] for answer in answers]
    assert ids[0] == ids[2]
    assert len(set(ids)) == 3


async def test_rejects_requests_without_a_key_if_known_keys_are_required(serve: Serve, store: Store) -> None:
    """The database has a session of the empty key, as earlier versions created it."""
    await store.sessions.create(key_hash=hash_key(""), label=None, origin="open")
    async with serve(ScriptedEngine(), require_known_keys=True) as gateway:
        for answer in (
            await ask(gateway.url),
            await ask(gateway.url, "/s//v1"),
            await ask(gateway.url, **{"session-id": "a"}),
        ):
            assert answer.status_code == 401
            assert "No API key was sent" in answer.json()["error"]["message"]


async def test_rejects_unknown_keys_if_known_keys_are_required(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(), require_known_keys=True) as gateway:
        answer = await ask(gateway.url, authorization="Bearer sk-unknown")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert f" in {store.location}" in answer.json()["error"]["message"], "which database has no such key"
        by_path = await ask(gateway.url, "/s/unknown/v1")
        assert by_path.status_code == 401
    assert await store.sessions.recent() == []


async def test_rejects_unknown_keys_on_other_addresses(serve: Serve) -> None:
    async with serve(ScriptedEngine(), host="0.0.0.0") as gateway:
        assert (await ask(gateway.url, authorization="Bearer x")).status_code == 401


async def test_rejects_the_id_of_a_rollouts_session_as_a_key(serve: Serve, store: Store) -> None:
    """Ids are not secret. Only a session without a rollout can be continued by its id."""
    async with serve(ScriptedEngine()) as gateway:
        own = (await ask(gateway.url, "/s/mine/v1")).headers["x-polar-session-id"]
        assert (await ask(gateway.url, f"/s/{own}/v1")).headers["x-polar-session-id"] == own
        await submit(store, [get_source("swe-task").task(1)], JobSpec(harness="shell:true"))
        (held,) = await store.queue.claim("me", 1, 60)
        theirs = await store.sessions.create(
            key_hash=hash_key("theirs"), label=None, rollout_id=held.rollout_id, policy=None, origin="rollout"
        )
        assert (await ask(gateway.url, f"/s/{theirs.session_id}/v1")).status_code == 401
        assert (await ask(gateway.url, "/s/theirs/v1")).headers["x-polar-session-id"] == theirs.session_id
    assert [call.path for call in await store.calls.summaries(theirs.session_id)] == ["/v1/chat/completions"]


async def test_rejects_a_closed_session(serve: Serve, store: Store) -> None:
    session_id = await new_session(store, "k")
    async with serve(ScriptedEngine()) as gateway:
        assert (await ask(gateway.url, authorization="Bearer k")).status_code == 200
        await store.sessions.close(session_id)
        gateway.sessions.forget(session_id)
        assert (await ask(gateway.url, authorization="Bearer k")).status_code == 401


async def test_keys_are_not_stored(serve: Serve, store: Store, tmp_path: Path) -> None:
    secret = "sk-very-secret-0123456789"
    async with serve(ScriptedEngine()) as gateway:
        assert (await ask(gateway.url, authorization=f"Bearer {secret}")).status_code == 200
        assert (await ask(gateway.url, f"/s/{secret}/v1")).status_code == 200
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if secret.encode() in path.read_bytes()]


async def test_a_typed_key_of_plain_words_is_the_sessions_label(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway:
        assert (await ask(gateway.url, authorization="Bearer my-run")).status_code == 200
        assert (await ask(gateway.url, "/s/other-run/v1")).status_code == 200
        assert (await ask(gateway.url, authorization="Bearer sk-very-secret-0123456789")).status_code == 200
    assert [row.label for row in await store.sessions.recent()] == [None, "other-run", "my-run"]


async def test_applies_the_sessions_sampling_policy(serve: Serve, store: Store) -> None:
    session_id = await new_session(store, "k", {"temperature": 0.25, "max_tokens": 4})
    async with serve(ScriptedEngine(lambda request: "abcdefgh")) as gateway:
        await ask(gateway.url, authorization="Bearer k")
    (call,) = await store.calls.of_session(session_id)
    assert call.sampling["temperature"] == 0.25
    assert call.choices[0].finish_reason == "length"
    assert len(call.choices[0].token_ids) == 4


@pytest.mark.parametrize(("asked", "limit", "got"), [(None, 10, 10), (5, 10, 5), (50, 10, 10), (5, None, 5)])
def test_max_tokens_is_an_upper_bound(asked: int | None, limit: int | None, got: int) -> None:
    policy = {} if limit is None else {"max_tokens": limit}
    assert apply_policy(Sampling(max_tokens=asked), policy).max_tokens == got


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.3.4.5", True), ("0.0.0.0", False), ("gpu1", False)],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


async def test_serves_models_health_and_errors(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine()) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        models = (await http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["scripted-model"]
        ModelInfo.model_validate_json(json.dumps(models["data"][0]), strict=True)
        assert (await http.get("/s/abc/v1/models/any/name")).json()["id"] == "any/name"
        assert (await http.get("/healthz")).json()["status"] == "ok"
        missing = await http.post("/v1/embeddings", json={})
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "invalid_request_error"
        wrong = await http.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert "error" in wrong.json()
    assert await store.sessions.recent() == []


async def test_a_slow_session_lookup_delays_no_other_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first request waits only for others with its own key."""
    slow, held = hash_key("slow"), asyncio.Event()

    by_key = store.sessions.by_key

    async def slow_by_key(key_hash: bytes) -> SessionRow | None:
        if key_hash == slow:
            await held.wait()
        return await by_key(key_hash)

    monkeypatch.setattr(store.sessions, "by_key", slow_by_key)
    sessions = SessionRegistry(store, GatewaySettings(), open_to_all=True)
    first, second = (asyncio.create_task(sessions.find("slow", None)) for _ in range(2))
    await asyncio.sleep(0)
    async with asyncio.timeout(120):
        other = await sessions.find("other", None)
    assert not first.done()
    held.set()
    assert await first is await second
    assert (await first).session_id != other.session_id
    assert len(await store.sessions.recent()) == 2
    assert (await sessions.find(None, other.session_id)) is other


def test_every_default_of_a_generation_config_is_sent() -> None:
    """Otherwise a server's `generation_config` would change the distribution, and the record would not show it."""
    request = ChatRequest("m", (Message("user", "hi"),), sampling=apply_policy(Sampling(), {}))
    body = chat_body(request, stream=False)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: body.get(name) for name in neutral} == neutral
    assert recorded_sampling(request, INFO).items() >= neutral.items()
    own = replace(request, sampling=apply_policy(Sampling(repetition_penalty=1.2), {}))
    assert chat_body(own, stream=False)["repetition_penalty"] == 1.2


async def test_sessions_in_use_stay_in_memory_and_others_are_dropped_under_all_their_names(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropping sessions in use made the gateway read each back for its next call, which stopped it."""
    async with serve(ScriptedEngine(), calls_in_memory=1) as gateway:
        first = (await ask(gateway.url, authorization="Bearer a")).headers["x-polar-session-id"]
        assert (await ask(gateway.url, f"/s/{first}/v1")).headers["x-polar-session-id"] == first
        await ask(gateway.url, authorization="Bearer b")
        kept = gateway.sessions.in_memory("a", None)
        assert kept is not None
        assert gateway.sessions.in_memory(None, first) is kept
        monkeypatch.setattr(registry, "_IN_USE_SECONDS", 0.0)
        await ask(gateway.url, authorization="Bearer c")
        assert gateway.sessions.in_memory("a", None) is None
        assert gateway.sessions.in_memory(None, first) is None
        monkeypatch.setattr(registry, "_IN_USE_SECONDS", 60.0)
        again = await ask(gateway.url, authorization="Bearer a")
        assert again.headers["x-polar-session-id"] == first
        reloaded = gateway.sessions.in_memory("a", None)
        assert reloaded is not None
        assert len(reloaded.call_ids) == 3


async def test_a_session_that_grows_makes_others_leave(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a few long sessions take any amount of memory, because no new session comes."""
    monkeypatch.setattr(registry, "_IN_USE_SECONDS", 0.0)
    async with serve(ScriptedEngine(), calls_in_memory=7) as gateway:
        for key in ("unused", "long"):
            await ask(gateway.url, authorization=f"Bearer {key}")
        assert len(gateway.sessions) == 2
        for _ in range(4):
            await ask(gateway.url, authorization="Bearer long")
        assert len(gateway.sessions) == 1
        assert gateway.sessions.in_memory("long", None) is not None


async def test_a_session_stays_in_memory_while_a_request_is_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another state of it would not know the call, and the end of its rollout would not wait for it."""
    monkeypatch.setattr(registry, "_IN_USE_SECONDS", 0.0)
    async with serve(ScriptedEngine(), calls_in_memory=1) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = json.dumps(CHAT).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}authorization: Bearer slow\r\n\r\n".encode() + body[:5])
        async with asyncio.timeout(GUARD_SECONDS):
            while not len(gateway.sessions):
                await asyncio.sleep(0.01)
        slow = gateway.sessions.in_memory("slow", None)
        assert slow is not None
        for key in ("a", "b"):
            await ask(gateway.url, authorization=f"Bearer {key}")
        writer.write(body[5:])
        assert b" 200 " in await reader.readline()
        assert gateway.sessions.in_memory("slow", None) is slow
        assert len(slow.call_ids) == 1
        writer.close()


async def test_marking_sessions_ends_although_calls_keep_being_lost(
    serve: Serve, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a busy gateway would never record again after an outage."""
    async with serve(ScriptedEngine()) as gateway:
        await ask(gateway.url, authorization="Bearer a")
        session = gateway.sessions.in_memory("a", None)
        assert session is not None
        session.lost = 1
        gateway.sessions.mark_incomplete(session)

        async def mark(session_id: str, reason: str) -> None:
            gateway.sessions.mark_incomplete(session)

        monkeypatch.setattr(store.sessions, "mark_incomplete", mark)
        async with asyncio.timeout(20):
            await gateway.sessions.write_pending()
        assert list(gateway.sessions.pending) == [session.session_id]
        monkeypatch.undo()
