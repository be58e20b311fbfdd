"""The client of the Agent Client Protocol, run as in a sandbox with a small agent, and its adapter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness_adapters.acp.adapter import CLIENT
from harness_adapters.base import HarnessError, UnknownHarnessError, get_adapter
from polar_proxy.allowed_code import is_code
from tests.harness_adapters.launch_plans import INSTRUCTION, MCP, assert_interpreted, plan

AGENT = Path(__file__).parent.parent / "fakes" / "acp_agent.py"


class ClientRunner:
    """Starts the client in one HOME and workspace."""

    def __init__(self, folder: Path) -> None:
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        self.groups: list[int] = []

    def start(self, prompt: str, *options: str, **env: str) -> subprocess.Popen[str]:
        argv = [sys.executable, str(CLIENT), *options, f"--prompt={prompt}", "--", sys.executable, str(AGENT)]
        process = subprocess.Popen(
            argv, cwd=self.work, env={"PATH": os.defpath, "HOME": str(self.home), **env}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.groups.append(process.pid)
        return process

    def run(self, prompt: str, *options: str, **env: str) -> tuple[int, str]:
        process = self.start(prompt, *options, **env)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def kill_keepers(self) -> None:
        for group in self.groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ClientRunner]:
    runner = ClientRunner(tmp_path)
    yield runner
    runner.kill_keepers()


pytestmark = pytest.mark.slow


def test_user_turns_go_to_one_session(client: ClientRunner) -> None:
    code, output = client.run("hello", '--mcp=[{"name": "m"}]')
    assert (code, output) == (
        0,
        'servers: [{"name": "m"}]\nyou said: hello (1)\n\nacp: the turn ended: end_turn\n',
    )
    assert client.run("again", "--resume") == (0, "you said: again (3)\n\nacp: the turn ended: end_turn\n")


def test_a_start_without_resume_begins_a_new_session(client: ClientRunner) -> None:
    client.run("hello")
    assert "you said: other (1)" in client.run("other")[1]


def test_loads_the_session_when_the_agent_was_ended(client: ClientRunner) -> None:
    client.run("hello")
    client.kill_keepers()
    code, output = client.run("again", "--resume")
    assert code == 0
    assert "you said: again (3)" in output
    assert "replayed" not in output


def test_resume_fails_if_the_agent_cannot_load_its_session(client: ClientRunner) -> None:
    client.run("hello", FAKE_FORGETS="1")
    client.kill_keepers()
    code, output = client.run("again", "--resume", FAKE_FORGETS="1")
    assert code == 1
    assert "acp: the agent has ended, and cannot load its session again (it lacks ACP's loadSession)" in output


def test_resume_without_an_earlier_start_fails(client: ClientRunner) -> None:
    code, output = client.run("again", "--resume")
    error = "HOME has no earlier session of the agent to continue: start without --resume"
    assert (code, output) == (1, f"\nacp: {error}\n")


def test_grants_permission(client: ClientRunner) -> None:
    assert '{"outcome": {"outcome": "selected", "optionId": "yes"}}' in client.run("permission")[1]


def test_serves_files(client: ClientRunner) -> None:
    _, output = client.run("files")
    assert '["two\\n", {"code": -32603' in output
    assert (client.work / "deep" / "f.txt").read_text() == "one\ntwo\nthree\n"


def test_serves_terminals(client: ClientRunner) -> None:
    assert '[{"exitCode": 5, "signal": null}, "hi\\n"]' in client.run("terminal")[1]


def test_an_unknown_method_is_an_error_of_the_protocol(client: ClientRunner) -> None:
    assert '{"code": -32601, "message": "the client has no method made/up"}' in client.run("unknown")[1]


def test_skips_lines_that_are_not_messages(client: ClientRunner) -> None:
    code, output = client.run("malformed")
    assert code == 0
    assert "acp: skipped a line that is not JSON-RPC: this is { not json" in output
    assert "after bad lines" in output


def test_a_crash_of_the_agent_fails_the_turn(client: ClientRunner) -> None:
    code, output = client.run("crash")
    assert code == 1
    assert "acp: the agent closed its output (exit code 3)" in output


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FAKE_LOCKED": "1"}, "acp: Authentication required (-32000)"),
        ({"FAKE_VERSION": "9"}, "acp: the agent speaks version 9 of ACP, but this client speaks only version 1"),
    ],
)
def test_a_session_that_cannot_be_opened_fails_the_run(client: ClientRunner, env: dict[str, str], message: str) -> None:
    code, output = client.run("hello", **env)
    assert code == 1
    assert message in output


def test_sigterm_cancels_the_turn(client: ClientRunner) -> None:
    process = client.start("slow")
    assert process.stdout is not None
    while "waiting" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=30) == 130
    # The session goes on.
    assert client.run("next", "--resume")[0] == 0


def test_reads_why_a_turn_ended() -> None:
    adapter = get_adapter("acp:opencode")
    assert_interpreted(adapter, 0, "acp: the turn ended: end_turn\n", "ok", "ended its turn")
    assert_interpreted(adapter, 0, "acp: the turn ended: max_turn_requests\n", "ok", "its limit of model calls")
    assert_interpreted(adapter, 1, "text\nacp: it broke\n", "failed", "acp: it broke")
    assert_interpreted(adapter, None, "", "timed_out", "time limit")


@pytest.mark.parametrize("name", ["acp:gemini-cli", "acp:opencode", "acp:qwen-code", "acp:copilot", "codex-acp"])
def test_launch_plan_of_an_acp_agent(name: str) -> None:
    adapter = get_adapter(name)
    made = plan(adapter, mcp_servers=MCP)
    assert made.argv[:2] == ("python3", str(CLIENT))
    assert f"--prompt={INSTRUCTION}" in made.argv
    servers = json.loads(next(word for word in made.argv if word.startswith("--mcp=")).removeprefix("--mcp="))
    assert servers[0]["command"] == "mcp-files"
    assert servers[1] == {"type": "http", "name": "web", "url": "http://127.0.0.1:9/mcp", "headers": []}
    assert "--resume" in plan(adapter, resume=True).argv


def test_refuses_an_agent_that_does_not_speak_acp() -> None:
    with pytest.raises(HarnessError, match="pi does not speak ACP"):
        plan(get_adapter("acp:pi"))
    with pytest.raises(HarnessError, match="cannot be driven by ACP"):
        get_adapter("acp:shell")


def test_an_acp_agent_is_not_code_of_this_machine() -> None:
    """So a request may name it, and get_adapter must not import a module for it."""
    assert not is_code("acp:codex")
    assert is_code("module:Class")


def test_refuses_a_class_as_acp_agent() -> None:
    with pytest.raises(UnknownHarnessError, match="write acp:NAME"):
        get_adapter("acp:tests.fakes.tiny_agent:TinyAgent")
