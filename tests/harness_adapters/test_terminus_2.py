"""Terminus 2: its launch plan, its exit codes, and the real agent against the gateway."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters.base import HarnessError, Installation, get_adapter
from harness_adapters.terminus_2 import Terminus2, Terminus2RolloutDetails
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.harness_adapters import launch_plans, real_runs

ADAPTER = Terminus2()
# An installation, and two starts of a half-gigabyte program, on a busy machine.
pytestmark = pytest.mark.timeout(1200)


def test_launch_plan() -> None:
    launch_plans.info_is_complete(ADAPTER)
    plan = launch_plans.plan(ADAPTER, max_steps=7)
    assert plan.argv[0] == "/cache/x/bin/python"
    assert Path(plan.argv[1]).is_file()
    assert plan.argv[-2:] == ("--", launch_plans.INSTRUCTION)
    assert plan.argv[plan.argv.index("--max-turns") + 1] == "7"
    assert plan.argv[plan.argv.index("--api-base") + 1] == "http://127.0.0.1:9/v1"
    assert "--responses" not in plan.argv
    assert "--rollout-details" not in plan.argv
    assert "--responses" in launch_plans.plan(ADAPTER, wire_api="openai_responses").argv
    with pytest.raises(HarnessError, match="cannot resume a conversation"):
        launch_plans.plan(ADAPTER, resume=True)


def test_rollout_details_session_id_hides_the_key() -> None:
    adapter = get_adapter("harness_adapters.terminus_2:Terminus2RolloutDetails")
    plan = launch_plans.plan(adapter)
    assert "--rollout-details" in plan.argv
    session = plan.argv[plan.argv.index("--session-id") + 1]
    assert len(session) == 16
    other = replace(launch_plans.CONTEXT, api_key="sk-other")
    assert session not in adapter.launch(launch_plans.installed(adapter), other).argv


def test_launch_passes_mcp_servers_and_skills() -> None:
    plan = launch_plans.plan(ADAPTER, mcp_servers=launch_plans.MCP, skills=(launch_plans.SKILL,))
    servers = json.loads(plan.argv[plan.argv.index("--mcp") + 1])
    assert servers[0] == {
        "name": "files", "transport": "stdio", "command": "mcp-files", "args": ["--root", "/a b"]
    }  # fmt: skip
    assert servers[1] == {"name": "web", "transport": "streamable-http", "url": "http://127.0.0.1:9/mcp"}
    assert plan.argv[plan.argv.index("--skills-dir") + 1] == "/home/agent/skills"
    assert plan.files == {"skills/say-hello/SKILL.md": launch_plans.SKILL.text}


@pytest.mark.parametrize(
    ("code", "tail", "outcome", "message"),
    [
        (0, "terminus-2 ended after 3 turns: task complete\n", "ok", "declared the task complete"),
        (0, "terminus-2 ended after 15 turns: out of turns\n", "ok", "turn limit"),
        (1, "terminus-2 failed: RuntimeError: no session\n", "failed", "RuntimeError: no session"),
        (None, "", "timed_out", "time limit"),
    ],
)
def test_interpret(code: int | None, tail: str, outcome: str, message: str) -> None:
    launch_plans.assert_interpreted(ADAPTER, code, tail, outcome, message)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    if shutil.which("tmux") is None:
        pytest.skip("terminus-2 needs tmux: apt-get install tmux")
    return real_runs.install(ADAPTER, tmp_path_factory)


def keys(text: str, *, complete: bool = False) -> str:
    commands = [{"keystrokes": text, "duration": 0.5}] if text else []
    return json.dumps({"analysis": "a", "plan": "b", "commands": commands, "task_complete": complete})


LOOK = keys("pwd > where.txt; env | grep -c OPENAI >> where.txt\n")


@pytest.mark.by_command
async def test_real_agent(installed: Installation, serve: Serve, store: Store, tmp_path: Path) -> None:
    script = real_runs.play(LOOK, keys("", complete=True))
    async with serve(ScriptedEngine(script)) as gateway:
        ran = await real_runs.run(ADAPTER, installed, gateway, store, tmp_path)
    assert ADAPTER.interpret(ran.exit_code, ran.output) == ("ok", "declared the task complete"), ran.output[-3000:]
    # The agent's terminal does not have the key.
    assert (ran.workdir / "where.txt").read_text() == f"{ran.workdir}\n0\n"
    assert [call.edge for call in ran.calls] == ["root", "continues", "continues"]


@pytest.mark.by_command
async def test_real_agent_at_its_turn_limit_with_rollout_details(
    installed: Installation, serve: Serve, store: Store, tmp_path: Path
) -> None:
    engine = ScriptedEngine(real_runs.play(LOOK))
    async with serve(engine) as gateway:
        ran = await real_runs.run(Terminus2RolloutDetails(), installed, gateway, store, tmp_path, max_steps=2)
    assert ADAPTER.interpret(ran.exit_code, ran.output) == ("ok", "ended by its turn limit"), ran.output[-3000:]
    assert len(ran.calls) == 2
    context = json.loads((ran.home / "terminus-2" / "context.json").read_text())
    (details,) = context["rollout_details"]
    # Harbor's training data equal the recorded calls.
    assert details["completion_token_ids"] == [call.choices[0].token_ids.tolist() for call in ran.calls]
    assert [len(values) for values in details["logprobs"]] == [len(call.choices[0].logprobs) for call in ran.calls]


@pytest.mark.by_command
async def test_real_agent_fails(installed: Installation, serve: Serve, store: Store, tmp_path: Path) -> None:
    async with serve(ScriptedEngine(real_runs.play(LOOK, keys("", complete=True)))) as gateway:
        await real_runs.run(ADAPTER, installed, gateway, store, tmp_path)
        ran = await real_runs.run(ADAPTER, installed, gateway, store, tmp_path, base_url=gateway.url + "/nothing/v1")
    outcome, detail = ADAPTER.interpret(ran.exit_code, ran.output)
    assert (ran.exit_code, outcome) == (1, "failed"), ran.output[-3000:]
    assert "Not Found" in detail
