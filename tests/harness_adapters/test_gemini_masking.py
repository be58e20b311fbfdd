"""Gemini CLI shortens old tool outputs in a large history. Such a call gets the edge `compacts`, not `root`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness_adapters.base import get_adapter
from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.types import EngineRequest
from tests.conftest import Serve
from tests.harness_adapters import real_runs
from tests.harness_adapters.test_npm_real import AGENT_TOOLS

TURNS = 26


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_masked_outputs_get_the_edge_compacts(
    serve: Serve, store: Store, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    adapter = get_adapter("gemini-cli")
    installed = await asyncio.to_thread(real_runs.install, adapter, tmp_path_factory)

    def script(request: EngineRequest) -> ScriptedAnswer:
        turn = real_runs.answer_count(request)
        if turn == TURNS - 1:
            return "All done."
        return AGENT_TOOLS["gemini-cli"].call(f"seq {turn}00000 {turn}05000")

    async with serve(ScriptedEngine(script)) as gateway:
        ran = await real_runs.run(adapter, installed, gateway, store, tmp_path, max_steps=40)
        sessions = await store.sessions.recent()
        rows = await store.calls.summaries(sessions[0].session_id)
    assert adapter.interpret(ran.exit_code, ran.output) == ("ok", "finished"), ran.output[-2000:]
    masked = [b"tool_output_masked" in b"".join(call.messages) for call in ran.calls]
    edges = [call.edge for call in ran.calls]
    assert len(ran.calls) == TURNS
    assert any(masked), "the outputs were too small to be masked"
    assert edges[0] == "root"
    assert set(edges[1:]) == {"continues", "compacts"}
    rules = [row.rule for row in rows if row.edge == "compacts"]
    assert rules == ["gemini_masks_old_outputs"] * len(rules)
