"""Concurrent runs of harnesses that send no session id: no call is attributed to another run."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path

import pytest

from harness_adapters.base import LaunchContext, get_adapter
from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, EngineRequest
from tests.conftest import Serve
from tests.harness_adapters import real_runs
from tests.harness_adapters.test_npm_real import AGENT_TOOLS

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TURNS = 5
FRUITS = ("apple", "banana", "cherry")
COMMANDS = {name: AGENT_TOOLS[name].call for name in ("qwen-code", "pi")}


def script(name: str) -> ScriptedEngine:
    """Give all runs the same answers. Only the instruction of a run names its fruit."""

    def answer(request: EngineRequest) -> ScriptedAnswer:
        turn = real_runs.answer_count(request)
        return COMMANDS[name](f"echo turn {turn}") if turn < TURNS - 1 else "All done."

    return ScriptedEngine(answer)


def fruit(call: CallRecord) -> str:
    text = b"\n".join(call.messages).decode()
    (found,) = [fruit for fruit in FRUITS if f"Think of the {fruit}." in text]
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "one key"])
@pytest.mark.parametrize("name", sorted(COMMANDS))
async def test_concurrent_runs_are_not_mixed(
    name: str, shared: bool, serve: Serve, store: Store, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    adapter = get_adapter(name)
    installed = await asyncio.to_thread(real_runs.install, adapter, tmp_path_factory)

    async def run(fruit: str, url: str) -> None:
        home, workdir = tmp_path / fruit / "home", tmp_path / fruit / "work"
        home.mkdir(parents=True)
        workdir.mkdir()
        context = LaunchContext(
            base_url=url,
            api_key="sk-shared" if shared else f"sk-{fruit}",
            model="scripted-model",
            instruction=f"Think of the {fruit}.",
            home=str(home),
            workdir=str(workdir),
        )
        plan = adapter.launch(installed, context)
        for file, text in plan.files.items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(text)
        code, output = await real_runs.run_program(plan.argv, workdir, plan.env, 600)
        assert code == 0, output[-2000:]

    async with serve(script(name)) as gateway:
        await asyncio.gather(*(run(fruit, gateway.url + "/v1") for fruit in FRUITS))
    calls = [
        call for session in await store.sessions.recent() for call in await store.calls.of_session(session.session_id)
    ]
    by_id = {call.call_id: call for call in calls}
    edges: dict[str, list[str]] = defaultdict(list)
    for call in calls:
        edges[fruit(call)].append(call.edge)
        if call.parent_call_id is not None:
            assert fruit(by_id[call.parent_call_id]) == fruit(call), "attributed to another run"
    assert edges == {fruit: ["root"] + ["continues"] * (TURNS - 1) for fruit in FRUITS}, json.dumps(edges)
    assert len({call.session_id for call in calls}) == (1 if shared else 3)
