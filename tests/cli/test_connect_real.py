"""`polar connect AGENT -- ARGUMENTS` with the real agents, each with an empty home.

The product's client of the Agent Client Protocol starts the agents for editors, as an editor would. Harbor starts
terminus-2 on tasks, in an environment that is Docker for its users and this machine here.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness_adapters import terminus_2
from harness_adapters.acp.adapter import CLIENT, AcpHarness
from harness_adapters.base import HarnessAdapter, Installation, get_adapter
from harness_adapters.toolkit.adapter import ConnectableHarness
from harness_adapters.toolkit.npm import NpmHarness
from tests.cli.process import POLAR, environment
from tests.cli.runner import polar_json
from tests.client.server import PolarServer, polar_serve
from tests.harness_adapters import real_runs

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ARGUMENTS = {
    "claude-code": ["--print", "Say hello."],
    "claude-agent-acp": [],
    "cline": ["Say hello."],
    "codex": ["exec", "--skip-git-repo-check", "Say hello."],
    "codex-acp": [],
    "continue": ["--print", "Say hello."],
    "copilot": ["--allow-all-tools", "--prompt", "Say hello."],
    "gemini-cli": ["--skip-trust", "--prompt", "Say hello."],
    "mini-swe-agent": [
        *("--yolo", "--exit-immediately", "--task", "Say hello.", "--output", "trajectory.json"),
        *("--config", "mini.yaml", "--config", "agent.step_limit=2"),
    ],
    "opencode": ["run", "Say hello."],
    "pi": ["--print", "Say hello."],
    "qwen-code": ["--prompt", "Say hello."],
}
TAKE_MINUTES_TO_INSTALL = {
    "aider": ["--yes-always", "--no-git", "--message", "Say hello."],
    "grok-cli": ["--prompt", "Say hello."],
    "hermes": ["--quiet", "--query", "Say hello."],
    "mistral-vibe": ["--prompt", "Say hello."],
    "nanocoder": ["--trust-directory", "run", "Say hello."],
    "openhands": ["--headless", "--always-approve", "--task", "Say hello."],
    "terminus-2": [
        *("--path", "task", "--env", "local_environment:LocalEnvironment", "--yes", "--disable-verification"),
        *("--agent-kwarg", "max_turns=2", "--agent-kwarg", "record_terminal_session=false"),
    ],
}
TASK = {
    "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 120.0\n',
    "instruction.md": "Say hello.\n",
    "environment/Dockerfile": "FROM scratch\n",
    "tests/test.sh": "#!/bin/sh\n",
}
"""A task of harbor, by file."""


@pytest.fixture
def server(polar_home: Path) -> Iterator[PolarServer]:
    with polar_serve(polar_home, "--engine", "scripted") as running:
        yield running


def put_on_path(harness: HarnessAdapter, installed: Installation, folder: Path) -> None:
    """Write the program that the user's own installation would have on PATH."""
    words = [str(installed.root / "bin" / harness.info.command)]
    if isinstance(harness, NpmHarness):
        words = harness.command(installed)
    program = folder / harness.info.command
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)


def prepare_harbor(work: Path) -> dict[str, str]:
    """Write a task, and the module of its environment; return the variables that harbor needs for it."""
    if shutil.which("tmux") is None:
        pytest.skip("terminus-2 needs tmux: apt-get install tmux")
    for name, text in TASK.items():
        file = work / "task" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shutil.copy(terminus_2.RUNNER, work / "local_environment.py")
    return {"PYTHONPATH": str(work), "TMUX_TMPDIR": str(work), "HARBOR_TELEMETRY": "0"}


def run_in_group(command: list[str], env: dict[str, str], work: Path) -> tuple[int, str]:
    """Run a command, end the processes that it leaves, and return its exit code and output."""
    process = subprocess.Popen(
        command,
        env=env,
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def test_every_agent_that_can_be_connected_is_run() -> None:
    listed = {row["agent"] for row in polar_json("connect")["agents"]}
    assert listed == {*ARGUMENTS, *TAKE_MINUTES_TO_INSTALL}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *ARGUMENTS.items(),
        *(pytest.param(*item, marks=pytest.mark.by_command) for item in TAKE_MINUTES_TO_INSTALL.items()),
    ],
)
def test_agent_talks_to_the_server(
    name: str, arguments: list[str], server: PolarServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    harness = get_adapter(name)
    assert isinstance(harness, ConnectableHarness)
    programs, home, work = (tmp_path / part for part in ("bin", "home", "work"))
    for folder in (programs, home, work):
        folder.mkdir()
    agent = harness.agent if isinstance(harness, AcpHarness) else harness
    put_on_path(agent, real_runs.install(harness, tmp_path_factory), programs)
    env = environment() | {
        "HOME": str(home),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "POLAR_URL": server.url,
        "POLAR_HOME": str(server.home),
    }
    env.pop("IS_SANDBOX", None)  # of the machine that runs the tests; a user's has none
    if name == "terminus-2":
        env |= prepare_harbor(work)
    command = [POLAR, "connect", name, "--", *arguments]
    if isinstance(harness, AcpHarness):
        command = [sys.executable, str(CLIENT), "--prompt=Say hello.", "--", *command]
    code, output = run_in_group(command, env, work)
    assert code == 0, output[-3000:]
    (session,) = polar_json("sessions")["sessions"]
    assert session["label"] == name
    assert session["calls"] > session["failed_calls"]
