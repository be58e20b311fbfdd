"""An engine that drops a connection may have sampled: each attempt is a call, and the agent gets an answer."""

from __future__ import annotations

import pytest

from polar_proxy.engines import openai_client
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.store import Store
from polar_proxy.traces.grades import excluded_calls
from tests.conftest import Serve
from tests.fakes.engine_server import Fault
from tests.fakes.vllm_server import FakeVllm
from tests.gateway.agents import CHAT, client, recorded_calls


@pytest.fixture(autouse=True)
def any_drop_is_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run on busy machines."""
    monkeypatch.setattr(openai_client, "RETRY_WITHIN_SECONDS", 3600.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_both_attempts_are_recorded(serve: Serve, store: Store, stream: bool) -> None:
    async with FakeVllm() as fake, serve(VllmEngine(fake.url)) as gateway, client(gateway.url) as http:
        fake.script(Fault(status=None))
        fake.bodies.clear()
        answer = await http.post("/chat/completions", json={**CHAT, "stream": stream})
        assert answer.status_code == 200
        assert "Hello." in answer.text or stream
        assert len(fake.bodies) == 2
    dropped, again = await recorded_calls(store, 2)
    assert (dropped.status, again.status) == ("upstream_error", "ok")
    assert "broke off" in (dropped.error or "")
    assert (again.edge, again.parent_call_id, again.rule) == ("retries", dropped.call_id, "asked_again_after_failure")
    assert answer.headers["x-polar-call-id"] == again.call_id
    assert excluded_calls([dropped, again]) == {dropped.call_id: "upstream_error"}


async def test_a_second_drop_is_the_agents_to_retry(serve: Serve, store: Store) -> None:
    async with FakeVllm() as fake, serve(VllmEngine(fake.url)) as gateway, client(gateway.url) as http:
        fake.script(Fault(status=None), Fault(status=None))
        answer = await http.post("/chat/completions", json=CHAT)
        assert answer.status_code == 502
    assert [call.status for call in await recorded_calls(store, 2)] == ["upstream_error"] * 2
