"""The real agents of Polar's definition files, and real ACP agents, in a sandbox against the real gateway.

Each runs a command and answers, and then takes a second text of the user if it can.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters.base import LaunchContext, get_adapter
from polar_proxy.conformance.profiles import HarnessProfile, profile_of
from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, EngineRequest, ToolCall
from sandboxes.base import Mount, ResourceLimits, SandboxSpec
from sandboxes.choice import open_sandbox
from tests.conftest import Serve
from tests.harness_adapters import real_runs

pytestmark = pytest.mark.timeout(900)

# Those whose installation takes about 20 s; the others take minutes on a busy machine.
QUICK = ("copilot", "codex-acp", "continue")
SLOW = (
    *("acp:copilot", "acp:gemini-cli", "acp:opencode", "acp:qwen-code"),
    *("claude-agent-acp", "grok-cli", "hermes", "nanocoder"),
)
COMMAND = "pwd > where.txt; rev a.txt"
AGENTS = [
    *(pytest.param(name, marks=pytest.mark.full) for name in QUICK),
    *(pytest.param(name, marks=pytest.mark.by_command) for name in SLOW),
]


def command_call(profile: HarnessProfile) -> ToolCall:
    text = json.dumps(dict(profile.arguments)).replace("{command}", COMMAND)
    return real_runs.call(profile.tool, text)


@pytest.mark.parametrize("name", AGENTS)
async def test_runs_a_command_and_takes_a_second_turn(
    name: str, serve: Serve, store: Store, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    adapter = get_adapter(name)
    installed = real_runs.install(adapter, tmp_path_factory)
    profile = profile_of(adapter)
    play = real_runs.play(command_call(profile), "All done.", "Still done.")

    def script(request: EngineRequest) -> ScriptedAnswer:
        assert isinstance(request, ChatRequest)
        offered = f'"{profile.tool}"' in json.dumps(list(request.tools or ()))
        return play(request) if offered else "A side answer."

    turns = 2 if "resume" in adapter.info.features else 1
    spec = SandboxSpec(
        mounts=tuple(Mount(path, str(path)) for path in installed.mounts), limits=ResourceLimits(memory_mb=None)
    )
    gateway: Gateway
    async with serve(ScriptedEngine(script)) as gateway, await open_sandbox("process", spec) as sandbox:
        await sandbox.write(f"{sandbox.workdir}/a.txt", b"hello\n")
        context = LaunchContext(
            base_url=f"{gateway.url}/v1",
            api_key=real_runs.KEY,
            model="scripted-model",
            instruction=real_runs.INSTRUCTION,
            home=sandbox.home,
            workdir=sandbox.workdir,
        )
        for turn in range(turns):
            plan = adapter.launch(installed, replace(context, resume=turn > 0))
            for path, text in plan.files.items():
                await sandbox.write(f"{sandbox.home}/{path}", text.encode(), 0o600)
            done = await sandbox.exec(plan.argv, env=plan.env, cwd=sandbox.workdir, timeout=400)
            output = (done.stdout + done.stderr).decode(errors="replace")
            assert adapter.interpret(done.exit_code, output)[0] == "ok", output[-3000:]
            assert "Still done." in output if turn else "All done." in output
        assert (await sandbox.read("where.txt")).decode().strip() == sandbox.workdir
    (session,) = await store.sessions.recent()
    calls = [call for call in await store.calls.of_session(session.session_id) if call.edge != "side_call"]
    assert [call.edge for call in calls] == ["root", "continues", "continues"][: turns + 1]
