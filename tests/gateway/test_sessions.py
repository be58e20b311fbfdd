"""Which keys are accepted, and which session a request belongs to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import is_loopback
from polar_proxy.gateway.recording import apply_policy
from polar_proxy.rollouts import JobSpec, submit
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.sessions.registry import SessionRegistry
from polar_proxy.store import SessionRow, Store
from polar_proxy.tasks import get_source
from polar_proxy.types import Sampling, TextRequest
from tests.conftest import Serve
from tests.gateway.agents import CHAT, new_session

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


async def test_rejects_unknown_keys_if_known_keys_are_required(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(), require_known_keys=True) as gateway:
        answer = await ask(gateway.url, authorization="Bearer sk-unknown")
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
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
    request = TextRequest("m", "p", Sampling(max_tokens=asked))
    policy = {} if limit is None else {"max_tokens": limit}
    assert apply_policy(request, policy).sampling.max_tokens == got


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
        assert (await http.get("/s/abc/v1/models/any/name")).json()["id"] == "any/name"
        assert (await http.get("/healthz")).json()["status"] == "ok"
        missing = await http.post("/v1/embeddings", json={})
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"
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
