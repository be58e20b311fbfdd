"""Which keys may use which routes, and that no route is reachable from inside a sandbox."""

from __future__ import annotations

import re
import socket
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from polar_proxy.api import create_api, local_admin_key
from polar_proxy.config import Settings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import Store
from tests.api.conftest import ServeApi, job_request, make_key

pytestmark = pytest.mark.slow

ADMIN_ONLY = {
    ("POST", "/api/v1/jobs"),
    ("POST", "/api/v1/jobs/{job_id}/cancel"),
    ("POST", "/api/v1/groups/{group_id}/cancel"),
    ("POST", "/api/v1/rollouts/{rollout_id}/cancel"),
    ("POST", "/api/v1/sessions"),
    ("POST", "/api/v1/service/drain"),
    ("POST", "/api/v1/keys"),
    ("GET", "/api/v1/keys"),
    ("POST", "/api/v1/keys/{key_name}/revoke"),
}
TRAINERS = {
    ("GET", "/api/v1/jobs"),
    ("GET", "/api/v1/jobs/{job_id}"),
    ("GET", "/api/v1/jobs/{job_id}/rollouts"),
    ("POST", "/api/v1/jobs/{job_id}/pause"),
    ("POST", "/api/v1/jobs/{job_id}/resume"),
    ("GET", "/api/v1/groups/{group_id}"),
    ("GET", "/api/v1/groups/{group_id}/trajectories"),
    ("GET", "/api/v1/rollouts"),
    ("GET", "/api/v1/rollouts/{rollout_id}"),
    ("GET", "/api/v1/rollouts/{rollout_id}/trajectory"),
    ("GET", "/api/v1/sessions"),
    ("GET", "/api/v1/records"),
    ("GET", "/api/v1/export"),
    ("POST", "/api/v1/rewards"),
    ("POST", "/api/v1/remarks"),
    ("POST", "/api/v1/feed/lease"),
    ("POST", "/api/v1/feed/leases/{lease_id}/ack"),
    ("POST", "/api/v1/feed/leases/{lease_id}/return"),
    ("POST", "/api/v1/feed/leases/{lease_id}/extend"),
    ("GET", "/api/v1/feed"),
    ("PUT", "/api/v1/training/{run_id}"),
    ("POST", "/api/v1/training/{run_id}/lines"),
    ("GET", "/api/v1/training"),
    ("GET", "/api/v1/training/{run_id}"),
    ("GET", "/api/v1/events"),
    ("GET", "/api/v1/service"),
    ("GET", "/api/v1/activity"),
    ("POST", "/api/v1/service/pause"),
    ("POST", "/api/v1/service/resume"),
}


def routes(app: FastAPI) -> set[tuple[str, str]]:
    """Return the routes of the OpenAPI document."""
    return {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if path.startswith("/api/")
    }


async def test_every_route_checks_the_key_and_its_role(store: Store) -> None:
    """The key is checked first: the requests are unreadable and name nothing that exists."""
    app = create_api(store, settings=Settings())
    assert routes(app) == ADMIN_ONLY | TRAINERS
    session_key = new_key()
    await store.sessions.create(key_hash=hash_key(session_key), label=None, origin="key")
    revoked = await make_key(store, "admin")
    await store.api_keys.revoke(hash_key(revoked).hex()[:12])
    admin, trainer = await make_key(store, "admin"), await make_key(store, "trainer")
    refused = {
        None: 401,
        "Bearer": 401,
        f"Basic {admin}": 401,
        f"Bearer {admin}x": 401,
        f"Bearer {new_key()}": 401,
        f"Bearer {revoked}": 401,
        f"Bearer {session_key}": 403,
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:

        async def ask(method: str, path: str, authorization: str | None) -> httpx.Response:
            headers = {} if authorization is None else {"authorization": authorization}
            content = b"{ no json" if method == "POST" else None
            return await http.request(method, path, content=content, headers=headers)

        for method, path in sorted(ADMIN_ONLY | TRAINERS):
            for authorization, status in refused.items():
                answer = await ask(method, path, authorization)
                assert (answer.status_code, path, authorization) == (status, path, authorization)
                error = answer.json()["error"]
                assert error["code"] == ("forbidden" if status == 403 else "unauthorised")
                if status == 401 and authorization in (f"Bearer {admin}x", f"Bearer {revoked}"):
                    assert store.location in error["message"]
        for method, path in sorted(ADMIN_ONLY):
            answer = await ask(method, path, f"Bearer {trainer}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        for method, path in sorted(ADMIN_ONLY | TRAINERS - {("GET", "/api/v1/events")}):
            keys = (admin,) if (method, path) in ADMIN_ONLY else (admin, trainer)
            for key in keys:
                assert (await ask(method, path, f"Bearer {key}")).status_code not in (401, 403, 500), path
    assert await store.jobs.find() == []


async def test_there_is_no_anonymous_access_on_loopback(serve_api: ServeApi) -> None:
    """An agent in a process sandbox can reach the gateway, so that loopback is not trusted."""
    async with (
        serve_api() as running,
        httpx.AsyncClient(base_url=running.gateway.url, trust_env=False, timeout=60) as http,
    ):
        assert running.gateway.sessions.open_to_all  # to agents
        assert (await http.get("/api/v1/jobs")).status_code == 401
        assert (await http.get("/s/any-key/api/v1/jobs")).status_code == 401
        assert (
            await http.post("/api/v1/jobs", json=job_request(), headers={"x-api-key": "any-key"})
        ).status_code == 401
        document = (await http.get("/openapi.json")).json()
        assert "/api/v1/jobs" in document["paths"]
        assert document["paths"]["/api/v1/jobs"]["post"]["security"] == [{"HTTPBearer": []}]
        docs = await http.get("/docs")
        assert (docs.status_code, "/api/v1/jobs" in docs.text) == (200, True)
        assert "<script" not in docs.text  # and nothing is loaded from elsewhere
        assert not re.search(r"(src|href)=.?(https?:)?//", docs.text)
        assert "default-src 'none'" in docs.headers["content-security-policy"]
        assert (await running.get("/nothing", status=404))["error"]["code"] == "not_found"
    assert await running.store.jobs.find() == []


async def test_a_socket_inside_a_sandbox_serves_model_routes_only(serve_api: ServeApi) -> None:
    async with serve_api(engine=ScriptedEngine()) as running:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        inside = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await running.gateway.serve_on(listener)
        headers = running.admin.headers  # even with an admin key
        async with httpx.AsyncClient(base_url=inside, headers=headers, trust_env=False, timeout=60) as http:
            for path in (
                *("/api/v1/jobs", "/api/v1/service", "/s/x/api/v1/jobs", "/metrics", "/docs", "/openapi.json"),
                *("/v1/models/../../api/v1/jobs", "//api/v1/jobs", "/API/v1/jobs"),
            ):
                answer = await http.get(path)
                assert (answer.status_code, path) == (404, path)
                assert "jobs" not in answer.json()
            for path in ("/v1/models", "/healthz", "/api/hello", "/v1beta/models"):
                assert (await http.get(path)).status_code == 200, path
            chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            key = {"authorization": f"Bearer {(await running.post('/sessions', {}, status=201))['key']}"}
            answer = await http.post("/v1/chat/completions", json=chat, headers=key)
            assert answer.status_code == 200, answer.text
        await running.gateway.stop_serving_on(listener)
        assert (await running.admin.get("/jobs")).status_code == 200


async def test_local_admin_key_is_private_and_replaced_when_revoked(store: Store, tmp_path: Any) -> None:
    path = await local_admin_key(store, tmp_path / "home")
    key = path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert await local_admin_key(store, tmp_path / "home") == path
    assert path.read_text().strip() == key
    row = await store.api_keys.get(hash_key(key))
    assert row is not None
    assert row.role == "admin"
    await store.api_keys.revoke(row.name)
    await local_admin_key(store, tmp_path / "home")
    assert path.read_text().strip() != key
    assert len(await store.api_keys.all()) == 2


@pytest.mark.parametrize("path", ["jobs", "rollouts"])
async def test_page_size_has_limits(serve_api: ServeApi, path: str) -> None:
    async with serve_api() as running:
        answer = await running.get(f"/{path}", limit=0, status=422)
        assert answer["error"]["code"] == "invalid"
        assert answer["error"]["detail"][0]["where"] == "query.limit"
