"""OpenHands: its launch plan, its exit codes, and the real program against the gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness_adapters.base import HarnessError, Installation
from harness_adapters.openhands import OpenHands
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.harness_adapters import launch_plans, real_runs

ADAPTER = OpenHands()
# An installation, and two starts of a half-gigabyte program, on a busy machine.
pytestmark = pytest.mark.timeout(1200)


def test_launch_plan() -> None:
    launch_plans.info_is_complete(ADAPTER)
    plan = launch_plans.plan(ADAPTER)
    assert plan.argv[0] == "/cache/x/bin/openhands"
    assert plan.argv[-1] == f"--task={launch_plans.INSTRUCTION}"
    assert plan.env["LLM_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert plan.env["LLM_MODEL"] == "openai/polar-tiny"
    assert plan.env["TMUX_TMPDIR"] == "/home/agent", "otherwise the terminals of two runs share a server"
    assert launch_plans.plan(ADAPTER, resume=True).argv[-3:-1] == ("--resume", "--last")


def test_model_name_determines_the_wire_api() -> None:
    messages = launch_plans.plan(ADAPTER, wire_api="anthropic_messages")
    assert messages.env["LLM_MODEL"] == "anthropic/polar-tiny"
    assert messages.env["LLM_BASE_URL"] == "http://127.0.0.1:9"
    assert launch_plans.plan(ADAPTER, wire_api="openai_responses", model="gpt-5-x").env["LLM_MODEL"] == "openai/gpt-5-x"
    with pytest.raises(HarnessError, match="under a name that contains gpt-5"):
        launch_plans.plan(ADAPTER, wire_api="openai_responses")
    with pytest.raises(HarnessError, match="for Chat, under a name that contains neither"):
        launch_plans.plan(ADAPTER, model="gpt-5-x")
    with pytest.raises(HarnessError, match="does not speak google_generate"):
        launch_plans.plan(ADAPTER, wire_api="google_generate_content")


def test_launch_writes_mcp_servers_and_skills() -> None:
    files = launch_plans.plan(ADAPTER, mcp_servers=launch_plans.MCP, skills=(launch_plans.SKILL,)).files
    servers = json.loads(files[".openhands/mcp.json"])["mcpServers"]
    assert servers["files"] == {"command": "mcp-files", "args": ["--root", "/a b"], "env": {"LEVEL": '"1"'}}
    assert servers["web"]["url"] == "http://127.0.0.1:9/mcp"
    assert files[".agents/skills/say-hello/SKILL.md"] == launch_plans.SKILL.text


MESSAGE = '{"id": "1", "source": "agent", "kind": "MessageEvent"}\n'
REFUSED = (
    'Agent is working\n{"id": "2", "source": "environment", "code": "AuthenticationError", "detail": '
    '"litellm.AuthenticationError: \\"no\\"", "kind": "ConversationErrorEvent"}\n\nCONVERSATION SUMMARY\nGoodbye!\n'
)
TOO_LONG = (
    'Agent is working\n{"id": "3", "code": "MaxIterationsReached", "detail": "500", "kind": "ConversationErrorEvent"}\n'
)


@pytest.mark.parametrize(
    ("code", "tail", "outcome", "message"),
    [
        (0, f"Agent is working\n{MESSAGE}Agent finished\n\nGoodbye!\n", "ok", "finished"),
        (0, REFUSED, "failed", 'litellm.AuthenticationError: "no"'),
        (0, TOO_LONG, "ok", "step limit"),
        (0, f"Agent is working\n{MESSAGE}\nGoodbye!\n", "failed", "without reporting that it finished"),
        (1, "Error: no model\n", "failed", "exited with 1: Error: no model"),
        (None, "", "timed_out", "time limit"),
    ],
)
def test_interpret(code: int | None, tail: str, outcome: str, message: str) -> None:
    launch_plans.assert_interpreted(ADAPTER, code, tail, outcome, message)


@pytest.mark.by_command
async def test_real_program_and_a_second_turn(
    installed: Installation, serve: Serve, store: Store, tmp_path: Path
) -> None:
    action = json.dumps({"command": "pwd > where.txt", "security_risk": "LOW", "summary": "look"})
    script = real_runs.play(real_runs.call("terminal", action), "All done.", "Once more.")
    async with serve(ScriptedEngine(script)) as gateway:
        ran = await real_runs.run(ADAPTER, installed, gateway, store, tmp_path)
        assert ADAPTER.interpret(ran.exit_code, ran.output) == ("ok", "finished"), ran.output[-3000:]
        assert (ran.workdir / "where.txt").read_text() == f"{ran.workdir}\n"
        assert [call.edge for call in ran.calls] == ["root", "continues"]
        again = await real_runs.run(
            ADAPTER, installed, gateway, store, tmp_path, resume=True, instruction="Say it again."
        )
    assert ADAPTER.interpret(again.exit_code, again.output) == ("ok", "finished"), again.output[-3000:]
    assert [call.edge for call in again.calls] == ["root", "continues", "continues"]


@pytest.mark.by_command
async def test_real_program_fails_with_exit_code_0(
    installed: Installation, serve: Serve, store: Store, tmp_path: Path
) -> None:
    async with serve(ScriptedEngine()) as gateway:
        await real_runs.run(ADAPTER, installed, gateway, store, tmp_path)
        ran = await real_runs.run(ADAPTER, installed, gateway, store, tmp_path, base_url=gateway.url + "/nothing/v1")
    outcome, detail = ADAPTER.interpret(ran.exit_code, ran.output)
    assert (ran.exit_code, outcome) == (0, "failed"), ran.output[-3000:]
    assert "NotFound" in detail
