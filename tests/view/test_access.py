"""Who may see the pages, and what a page of another site can do: nothing."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import Request

from polar_proxy.config import Settings
from polar_proxy.sessions.identity import hash_key, new_key
from polar_proxy.store import Store
from polar_proxy.view import access
from polar_proxy.view.access import COOKIE, HEADERS, LoginRequiredError, PageAccess, Visitor, make_cookie, safe_next
from polar_proxy.view.server import create_pages
from tests.view.visitors import HOST, Connect, add_key, log_in

PAGES = ("/", "/view/rollouts", "/view/changes/lists", "/view/find?name=x", "/view/parts/service", "/view/nothing")


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_without_a_login_leads_to_the_login(connect: Connect, path: str) -> None:
    async with connect() as http:
        answer = await http.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/view/login?next=%2F")
        assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]


async def test_a_key_logs_in_until_it_is_revoked(connect: Connect, store: Store) -> None:
    key = await add_key(store)
    async with connect() as http:
        answer = await log_in(http, f" {key} ", next="/view/rollouts?where=reward%3D1")
        assert (answer.status_code, answer.headers["location"]) == (303, "/view/rollouts?where=reward%3D1")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Secure" not in cookie
        assert key not in cookie
        assert hash_key(key).hex() not in cookie
        assert (await http.get("/")).status_code == 200
        await store.api_keys.revoke(hash_key(key).hex()[:12])
        assert (await http.get("/")).status_code == 303


async def test_the_cookie_is_secure_over_tls(connect: Connect, store: Store) -> None:
    key = await add_key(store)
    async with connect() as http:
        answer = await http.post(f"https://{HOST}/view/login", data={"key": key}, headers={"origin": f"https://{HOST}"})
        assert "Secure" in answer.headers["set-cookie"]


async def test_other_keys_do_not_log_in(connect: Connect, store: Store) -> None:
    revoked = await add_key(store)
    await store.api_keys.revoke(hash_key(revoked).hex()[:12])
    session_key = new_key()
    await store.sessions.create(key_hash=hash_key(session_key), label=None, origin="key")
    async with connect() as http:
        for key in ("", "x", revoked, session_key):
            answer = await log_in(http, key)
            assert answer.status_code == 403
            assert "set-cookie" not in answer.headers
            assert "not a valid API key" in answer.text


async def test_a_changed_or_expired_cookie_is_refused(
    connect: Connect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await add_key(store)
    row = await store.api_keys.get(hash_key(key))
    assert row is not None
    good = make_cookie(row, hash_key(key), 2_000_000_000)
    async with connect() as http:

        async def status(cookie: str) -> int:
            return (await http.get("/", headers={b"cookie": f"{COOKIE}={cookie}".encode()})).status_code

        assert await status(good) == 200
        longer = good.replace("2000000000", "2000000001")
        for cookie in (
            longer,
            good[:-1],
            good.upper(),
            good.rpartition(".")[0],
            f"{row.name}.9.x",
            "",
            "..",
            "ü.1.1",
            "x." + "9" * 5000,
        ):
            assert await status(cookie) == 303, cookie
        monkeypatch.setattr(access.time, "time", lambda: 2_000_000_001)
        assert await status(good) == 303


async def test_an_api_key_in_the_header_opens_the_pages(connect: Connect, store: Store) -> None:
    key = await add_key(store)
    async with connect() as http:
        assert (await http.get("/", headers={"authorization": f"Bearer {key}"})).status_code == 200
        assert (await http.get("/", headers={"authorization": "Bearer x"})).status_code == 401


async def test_loopback_needs_no_login_only_if_the_request_is_local(connect: Connect) -> None:
    local = {"client": "127.0.0.1", "host": "127.0.0.1:8100"}
    async with connect(open_on_loopback=True, **local) as http:
        assert (await http.get("/")).status_code == 200
        for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via"):
            assert (await http.get("/", headers={name: "for=1.2.3.4"})).status_code == 303
    async with connect(open_on_loopback=False, **local) as http:
        assert (await http.get("/")).status_code == 303
    async with connect(open_on_loopback=True, client="10.0.0.9", host="127.0.0.1:8100") as http:
        assert (await http.get("/")).status_code == 303
    async with connect(open_on_loopback=True, client="127.0.0.1") as http:  # addressed to another name
        assert (await http.get("/")).status_code == 303


async def test_a_change_needs_a_login_on_loopback_too(store: Store) -> None:
    """An agent in a process sandbox connects from loopback, and can send any Origin."""
    host = "127.0.0.1:8100"

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    def request(method: str) -> Request:
        headers = [(b"host", host.encode()), (b"origin", f"http://{host}".encode())]
        scope = {"type": "http", "method": method, "path": "/", "headers": headers, "client": ("127.0.0.1", 9)}
        return Request(scope, receive)

    allowed = PageAccess(store, open_on_loopback=True)
    assert await allowed.visitor(request("GET")) == Visitor("trainer", None)
    with pytest.raises(LoginRequiredError):
        await allowed.visitor(request("POST"))


async def test_a_login_from_another_page_is_refused(connect: Connect, store: Store) -> None:
    key = await add_key(store)
    async with connect() as http:
        for headers in ({}, {"origin": "null"}, {"origin": "http://evil.example"}):
            answer = await http.post("/view/login", data={"key": key}, headers=headers)
            assert answer.status_code == 403
            assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "path",
    ["https://evil.example", "//evil.example", "/\\evil.example", "/view/\n", "javascript:1", "", "/api/v1/keys"],
)
def test_a_login_leads_only_to_pages(path: str) -> None:
    assert safe_next(path) == "/"


async def test_only_a_page_of_this_server_logs_out(connect: Connect, store: Store) -> None:
    async with connect() as http:
        await log_in(http, await add_key(store))
        for headers in ({}, {"origin": "http://evil.example"}, {"origin": "null"}):
            assert (await http.post("/view/logout", headers=headers)).status_code == 403
            assert (await http.get("/")).status_code == 200
        await http.post("/view/logout", headers={"origin": f"http://{HOST}"})
        assert (await http.get("/")).status_code == 303


async def test_assets_are_served_without_a_login(connect: Connect) -> None:
    async with connect() as http:
        for name, media_type in (("polar.css", "text/css"), ("page.js", "text/javascript"), ("icon.svg", "image/svg")):
            answer = await http.get(f"/view/assets/{name}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(media_type)
            again = await http.get(f"/view/assets/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for name in ("..%2faccess.py", "none.js", "%2e%2e"):
            assert (await http.get(f"/view/assets/{name}")).status_code in (303, 404)


async def test_polar_view_refuses_other_names_and_origins(store: Store, tmp_path: Path) -> None:
    app = create_pages(store, Settings(home=tmp_path))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:99") as http:
        assert (await http.get("/")).status_code == 200
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
            assert (await http.get("/", headers=headers)).status_code == 403
