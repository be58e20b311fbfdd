"""aider: its launch plan, its exit codes, and the real program against the gateway."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from harness_adapters.aider import Aider
from harness_adapters.base import HarnessError, Installation
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.types import ChatRequest, EngineRequest
from tests.conftest import Serve
from tests.harness_adapters import launch_plans, real_runs

ADAPTER = Aider()
# An installation, and two starts of a half-gigabyte program, on a busy machine.
pytestmark = pytest.mark.timeout(1200)


def test_launch_plan() -> None:
    launch_plans.info_is_complete(ADAPTER)
    plan = launch_plans.plan(ADAPTER)
    assert plan.argv[:3] == ("/cache/x/bin/python", "-m", "aider")
    assert plan.argv[-1] == f"--message={launch_plans.INSTRUCTION}"
    assert plan.env["OPENAI_API_BASE"] == "http://127.0.0.1:9/v1"
    assert json.loads(plan.files[".aider/caches/model_prices_and_context_window.json"])
    assert not any(word.startswith("/workspace") for word in plan.argv), "its notes would become part of the patch"
    assert "--restore-chat-history" in launch_plans.plan(ADAPTER, resume=True).argv
    assert "--restore-chat-history" not in plan.argv


def test_launch_rejects_unsupported_features() -> None:
    with pytest.raises(HarnessError, match="does not support MCP servers"):
        launch_plans.plan(ADAPTER, mcp_servers=launch_plans.MCP)
    with pytest.raises(HarnessError, match="does not support skills"):
        launch_plans.plan(ADAPTER, skills=(launch_plans.SKILL,))
    with pytest.raises(HarnessError, match="does not speak openai_responses; it speaks openai_chat"):
        launch_plans.plan(ADAPTER, wire_api="openai_responses")


DOWN = "litellm.InternalServerError: InternalServerError: OpenAIException - out of order"
ADVICE = "\nThe API provider's servers are down or overloaded.\n"


@pytest.mark.parametrize(
    ("code", "tail", "outcome", "message"),
    [
        (0, "Tokens: 7 sent, 2 received.\nApplied edit to a.txt\nCommit 0123 feat: x\n", "ok", "answered"),
        (0, f"{DOWN}{ADVICE}Retrying in 32.0 seconds...\n{DOWN}{ADVICE}\n", "failed", "out of order"),
        (0, f"{DOWN}{ADVICE}Retrying in 0.2 seconds...\nok\nApplied edit to a.txt\n", "ok", "answered"),
        (0, "litellm.AuthenticationError: no\nCheck your API key.\n\n", "failed", "AuthenticationError: no"),
        (0, "Model openai/m has hit a token limit!\nToken counts below are approximate.\n", "failed", "token limit"),
        (2, "aider: error: unrecognized\n", "failed", "exited with 2: aider: error: unrecognized"),
        (None, "", "timed_out", "time limit"),
    ],
)
def test_interpret(code: int | None, tail: str, outcome: str, message: str) -> None:
    launch_plans.assert_interpreted(ADAPTER, code, tail, outcome, message)


def edit_then_message(request: EngineRequest) -> str:
    assert isinstance(request, ChatRequest)
    asks_for_message = "commit message" in str(request.messages[0].content).lower()
    return "feat: say bye" if asks_for_message else "a.txt\n```\nbye\n```\n"


@pytest.mark.by_command
async def test_real_program_edits_and_commits(
    installed: Installation, serve: Serve, store: Store, tmp_path: Path
) -> None:
    async with serve(ScriptedEngine(edit_then_message)) as gateway:
        ran = await real_runs.run(
            ADAPTER, installed, gateway, store, tmp_path, instruction="In a.txt change hello to bye."
        )
    assert ADAPTER.interpret(ran.exit_code, ran.output) == ("ok", "answered"), ran.output[-3000:]
    assert (ran.workdir / "a.txt").read_text() == "bye\n"
    # a.txt was not committed: aider commits it first, with one more call for the message.
    assert [call.stream for call in ran.calls].count(True) == 1
    assert "raw.githubusercontent.com" not in ran.output
    status = subprocess.run(
        ["git", "status", "--short"], cwd=ran.workdir, env={"HOME": str(ran.home), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert status.stdout == "", "aider left its files in the workspace"


@pytest.mark.by_command
async def test_real_program_fails_with_exit_code_0(
    installed: Installation, serve: Serve, store: Store, tmp_path: Path
) -> None:
    async with serve(ScriptedEngine(edit_then_message)) as gateway:
        await real_runs.run(ADAPTER, installed, gateway, store, tmp_path)
        ran = await real_runs.run(ADAPTER, installed, gateway, store, tmp_path, base_url=gateway.url + "/nothing/v1")
    outcome, detail = ADAPTER.interpret(ran.exit_code, ran.output)
    assert (ran.exit_code, outcome) == (0, "failed"), ran.output[-3000:]
    assert "POST /nothing/v1/chat/completions" in detail, "the error of the gateway, as litellm shows it"
