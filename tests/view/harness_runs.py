"""Real harnesses, each run in a sandbox against a scripted model: recorded data for the pages."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from harness_adapters.base import get_adapter
from polar_proxy.conformance.measure import measure
from polar_proxy.conformance.runner import ScenarioRunner, choose_kind
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store

HARNESSES = ("claude-code", "codex", "gemini-cli", "mini-swe-agent", "opencode", "qwen-code")
_SUBAGENT = "claude-code"
"""The harness that also starts a sub-agent."""


async def record_harnesses(store: Store) -> dict[str, list[str]]:
    """Run each harness: a command, two commands at once, the end, and a second turn. Return harness -> session ids.

    A harness that is missing is installed first, into the folder that all tests use.
    """
    cache = Path(os.environ.get("POLAR_CACHE_DIR") or Path("~/.polar/harnesses").expanduser())
    sessions: dict[str, list[str]] = {}
    async with ScenarioRunner(ScriptedEngine(), store, await choose_kind("auto"), patience=3) as runner:
        for name in HARNESSES:
            adapter = get_adapter(name)
            installed = await asyncio.to_thread(adapter.install, cache)
            checks = ["tool_round_trip", "second_turn", *(["subagent"] if name == _SUBAGENT else [])]
            row, runs = await measure(runner, adapter, installed, checks, slow=0)
            assert {check: result for check, result in row.checks.items() if result.status == "failed"} == {}
            sessions[name] = [run.calls[0].session_id for run in runs]
            for session_id in sessions[name]:
                await store.remarks.add("label", "tests", session_id=session_id, text=f"{name} {row.version}")
    return sessions
