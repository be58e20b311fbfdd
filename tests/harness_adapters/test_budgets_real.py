"""Real agents that would never stop, ended by a budget: each in another dialect, with the exit of the agent itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_adapters.base import get_adapter
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.harness_adapters import real_runs
from tests.harness_adapters.test_npm_real import AGENT_TOOLS

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

AGENTS = {
    "mini-swe-agent": "openai_chat",
    "codex": "openai_responses",
    "claude-code": "anthropic_messages",
    "gemini-cli": "google_generate_content",
}


@pytest.mark.parametrize("at_budget", ["refuse", "stop"])
@pytest.mark.parametrize("name", AGENTS)
async def test_a_budget_ends_a_looping_agent(
    name: str, at_budget: str, serve: Serve, store: Store, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    adapter = get_adapter(name)
    installed = real_runs.install(adapter, tmp_path_factory)
    tools = AGENT_TOOLS.get(name)
    look = real_runs.call("bash", '{"command": "ls"}') if tools is None else tools.call("ls")
    policy = {"max_calls": 8, "max_repeats": 4, "at_budget": at_budget}
    await store.sessions.create(key_hash=hash_key(real_runs.KEY), label=None, policy=policy, origin="key")
    async with serve(ScriptedEngine(lambda request: look)) as gateway:
        ended = await real_runs.run(adapter, installed, gateway, store, tmp_path, timeout=240)
    (session,) = await store.sessions.recent()
    outcome, detail = adapter.interpret(ended.exit_code, ended.output)
    print(f"{name} ({AGENTS[name]}, {at_budget}): exit {ended.exit_code}, {outcome}: {detail.strip()[-200:]!r}")
    assert session.spent in ("max_calls", "max_repeats")
    assert ended.exit_code is not None, "the agent did not end by itself"
    assert {call.dialect for call in ended.calls} == {AGENTS[name]}
    assert sum(call.status == "ok" for call in ended.calls) <= 8
