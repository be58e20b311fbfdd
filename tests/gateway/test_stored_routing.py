"""Stored responses and conversations where rules choose among engines: each is asked of the engine that made it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import httpx
import pytest

from polar_proxy.config import GatewaySettings, RouteSettings
from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.types import Json
from tests.gateway.agents import recorded_calls
from tests.gateway.test_passthrough import KEY, Provider
from tests.gateway.test_passthrough_history import json_provider
from tests.gateway.test_passthrough_routes import mixed, post, responses_answer

pytestmark = pytest.mark.slow

AT_PROVIDER = "resp_of_provider_1"


@contextlib.asynccontextmanager
async def passed_on_by_default(store: Store, url: str) -> AsyncIterator[Gateway]:
    """Run a gateway that passes calls on to `url`, except those to `local-*`, which its scripted engine answers."""
    passthrough, scripted = PassthroughEngine(url), ScriptedEngine(lambda request: "engine-text")
    rule = RouteSettings(name="own", engine="own", models=("local-*",))
    gateway = Gateway(passthrough, store, GatewaySettings(port=0), engines={"own": scripted}, routes=(rule,))
    async with passthrough, gateway:
        yield gateway


class Asker:
    """An agent that retrieves what it stored, and notes which requests reached the provider."""

    def __init__(self, gateway: Gateway, provider: Provider) -> None:
        self.url = gateway.url
        self._provider = provider

    async def create(self, model: str, **fields: object) -> str:
        """Ask a model, and return the id of its response."""
        self._provider.body = responses_answer(1, "provider-text")
        answer = await post(self.url, "/v1/responses", {"model": model, "input": "hi", **fields})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def ask(self, method: str, path: str, body: Json | None = None, key: str = KEY) -> tuple[str, httpx.Response]:
        """Send a request. Return who answered it, and the response."""
        before = len(self._provider.requests)
        self._provider.body = b'{"from": "provider"}'
        async with httpx.AsyncClient() as http:
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.request(method, self.url + path, json=body, headers=headers)
        passed_on = [first for first, _, _ in self._provider.requests[before:]]
        assert passed_on in ([], [f"{method} {path} HTTP/1.1"])
        return ("provider" if passed_on else "polar"), answer


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("gateway_of", [mixed, passed_on_by_default])
async def test_a_stored_response_is_asked_of_the_engine_that_made_it(
    store: Store, gateway_of: Callable[..., AbstractAsyncContextManager[Gateway]], restart: bool
) -> None:
    provider = json_provider()
    async with provider.serve() as url, contextlib.AsyncExitStack() as stack:
        asker = Asker(await stack.enter_async_context(gateway_of(store, url)), provider)
        own = await asker.create("local-model")
        assert await asker.create("gpt-5") == AT_PROVIDER
        if restart:
            await stack.aclose()
            asker = Asker(await stack.enter_async_context(gateway_of(store, url)), provider)
        for action in ("", "/input_items?limit=2", "?stream=true"):
            asked, answer = await asker.ask("GET", f"/v1/responses/{AT_PROVIDER}{action}")
            assert (asked, answer.content) == ("provider", b'{"from": "provider"}')
            asked, answer = await asker.ask("GET", f"/v1/responses/{own}{action}")
            assert (asked, answer.status_code) == ("polar", 200)
        assert (await asker.ask("POST", f"/v1/responses/{AT_PROVIDER}/cancel", {}))[0] == "provider"
        assert (await asker.ask("DELETE", f"/v1/responses/{AT_PROVIDER}"))[0] == "provider"
        asked, answer = await asker.ask("DELETE", f"/v1/responses/{own}")
        assert (asked, answer.json()["deleted"]) == ("polar", True)
    assert {call.engine_name for call in await recorded_calls(store, 2)} in ({None, "provider"}, {None, "own"})


async def test_an_unknown_response_is_asked_of_the_engine_of_calls_without_a_model(store: Store) -> None:
    provider = json_provider()
    async with provider.serve() as url:
        async with mixed(store, url) as gateway:
            asker = Asker(gateway, provider)
            await asker.create("gpt-5")
            asked, answer = await asker.ask("GET", "/v1/responses/resp_unknown")
            assert (asked, answer.status_code) == ("polar", 404)
            # The response of another session is as unknown.
            asked, answer = await asker.ask("GET", f"/v1/responses/{AT_PROVIDER}", key="sk-of-another-agent")
            assert (asked, answer.status_code) == ("polar", 404)
        async with passed_on_by_default(store, url) as gateway:
            assert (await Asker(gateway, provider).ask("GET", "/v1/responses/resp_unknown"))[0] == "provider"


async def test_a_response_in_the_background_is_retrieved_from_the_provider_that_works_on_it(store: Store) -> None:
    provider = json_provider()
    async with provider.serve() as url, mixed(store, url) as gateway:
        provider.body = json.dumps({"id": "resp_9", "object": "response", "status": "queued", "output": []}).encode()
        body = {"model": "gpt-5", "input": "x", "background": True}
        assert (await post(gateway.url, "/v1/responses", body)).content == provider.body
        asker = Asker(gateway, provider)
        assert (await asker.ask("GET", "/v1/responses/resp_9"))[0] == "provider"
        assert (await asker.ask("POST", "/v1/responses/resp_9/cancel", {}))[0] == "provider"


async def test_a_conversation_is_asked_of_the_engine_that_keeps_it(store: Store) -> None:
    provider = json_provider()
    async with provider.serve() as url, mixed(store, url) as gateway:
        asker = Asker(gateway, provider)
        asked, created = await asker.ask("POST", "/v1/conversations", {})
        own = created.json()["id"]
        await asker.create("local-model", conversation=own)
        await asker.create("gpt-5", conversation="conv_of_provider")
        asked_own, items = await asker.ask("GET", f"/v1/conversations/{own}/items")
        assert (asked, asked_own, len(items.json()["data"])) == ("polar", "polar", 2)
        assert (await asker.ask("GET", "/v1/conversations/conv_of_provider/items?limit=2"))[0] == "provider"
        assert (await asker.ask("DELETE", "/v1/conversations/conv_of_provider"))[0] == "provider"
        asked, answer = await asker.ask("GET", "/v1/conversations/conv_unknown")
        assert (asked, answer.status_code) == ("polar", 404)


async def test_a_response_of_an_engine_that_is_not_served_any_more_is_not_found(store: Store) -> None:
    provider = json_provider()
    async with provider.serve() as url:
        async with mixed(store, url) as gateway:
            await Asker(gateway, provider).create("gpt-5")
        async with passed_on_by_default(store, url) as gateway:
            asked, answer = await Asker(gateway, provider).ask("GET", f"/v1/responses/{AT_PROVIDER}")
    assert (asked, answer.status_code) == ("polar", 404)
    assert "the engine provider of [engines] passed a call on" in answer.json()["error"]["message"]
