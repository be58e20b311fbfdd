"""`polar connect AGENT -- ARGUMENTS` with the real agents, each with an empty home.

terminus-2 is missing: users start it by harbor, on tasks that need Docker.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness_adapters.base import Installation, get_adapter
from harness_adapters.toolkit.adapter import ConnectableHarness
from harness_adapters.toolkit.npm import NpmHarness
from tests.cli.process import POLAR, environment
from tests.cli.runner import polar_json
from tests.client.server import PolarServer, polar_serve
from tests.harness_adapters import real_runs

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ARGUMENTS = {
    "claude-code": ["--print", "Say hello."],
    "cline": ["Say hello."],
    "codex": ["exec", "--skip-git-repo-check", "Say hello."],
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
}


@pytest.fixture
def server(polar_home: Path) -> Iterator[PolarServer]:
    with polar_serve(polar_home, "--engine", "scripted") as running:
        yield running


def put_on_path(harness: ConnectableHarness, installed: Installation, folder: Path) -> None:
    """Write the program that the user's own installation would have on PATH."""
    words = [str(installed.root / "bin" / harness.info.command)]
    if isinstance(harness, NpmHarness):
        words = harness.command(installed)
    program = folder / harness.info.command
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)


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
    put_on_path(harness, real_runs.install(harness, tmp_path_factory), programs)
    env = environment() | {
        "HOME": str(home),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "POLAR_URL": server.url,
        "POLAR_HOME": str(server.home),
    }
    ended = subprocess.run(
        [POLAR, "connect", name, "--", *arguments],
        env=env,
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (session,) = polar_json("sessions")["sessions"]
    assert session["label"] == name
    assert session["calls"] > session["failed_calls"]
