"""The documented commands that need neither a process nor a service of their own, each run in this process.

All use one database with two recorded rollouts, and one server on it. tests/docs/test_commands.py runs them as printed,
with all others.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import polar_proxy
from polar_proxy.cli import output
from polar_proxy.client import Client
from polar_proxy.export.formats.feed import FeedGroups
from polar_proxy.export.formats.trl import RecordedRollouts
from tests.cli.process import environment
from tests.cli.runner import polar, polar_json, polar_ok
from tests.client.server import ENGINE, PolarServer, polar_serve
from tests.docs.blocks import BLOCKS, COMMANDS, DocumentedCommand, of_language

pytestmark = pytest.mark.slow

QUICK = (
    *("polar sessions", "polar show", "polar status", "polar results", "polar watch", "polar cancel", "polar submit"),
    *("polar build", "polar export", "python -m polar_proxy.traces.check", "polar db stats --db runs.db"),
    *("polar service", "polar harness list", "polar train list", "polar connect", "polar top", "polar sql"),
)
NEEDS_MORE = (
    *("polar export --format tokens-jsonl --builder rescored", "polar connect claude-code", "polar connect codex -"),
)
"""They need rescored traces, or an agent that is installed."""


@dataclass(frozen=True)
class RecordedRun:
    server: PolarServer
    ids: dict[str, str]

    def fill_in(self, text: str) -> str:
        """Replace the placeholders and addresses of the documentation."""
        text = re.sub(r"http://(127\.0\.0\.1|HOST):8399", self.server.url, text.replace("runs.db", "polar.db"))
        for name, value in self.ids.items():
            text = re.sub(rf"\b{name}\b", value, text)
        return text


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRun]:
    """A Polar home with a job of two rollouts, the working directory, and a server without rollout workers."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("POLAR_")]:
            patch.delenv(name)
        patch.setenv("POLAR_HOME", str(home))
        patch.setenv("POLAR_RUN__HARNESS", "tests.fakes.tiny_agent:TinyAgent")
        patch.setenv("POLAR_RUN__SANDBOX", "process")
        patch.setenv("NO_COLOR", "1")
        patch.chdir(home)
        for console in (output.out, output.err):
            patch.setattr(console, "width", 200)
        run = polar_json("run", "swe-task", "--samples", "2", "--engine", ENGINE)
        rollout = run["rollouts"][0]
        call = polar_json("show", rollout["session_id"])["calls"][0]["call_id"]
        job = polar_json("status")["jobs"][0]["job_id"]
        polar_ok("export", "--format", "tokens-jsonl", "--out", "train.jsonl")
        with polar_serve(home, "--engine", "scripted", workers=False) as server:
            yield RecordedRun(server, {"JOB": job, "SESSION": rollout["session_id"], "CALL": call})


def quick_commands() -> list[DocumentedCommand]:
    by_text = {command.text: command for command in COMMANDS if command.text.startswith(QUICK)}
    return [command for text, command in by_text.items() if not text.startswith(NEEDS_MORE)]


@pytest.mark.parametrize("command", quick_commands(), ids=str)
def test_command_runs(command: DocumentedCommand, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    text = command.text
    if text.startswith("polar cancel"):  # a job that has ended cannot be cancelled
        text = text.replace("JOB", polar_ok("submit", "swe-task").strip())
    program, *arguments = shlex.split(recorded.fill_in(text))
    if program == "python":
        subprocess.run([sys.executable, *arguments], env=environment(), check=True)
        return
    if arguments[0] == "connect":
        monkeypatch.setenv("POLAR_URL", recorded.server.url)
    if arguments[:2] == ["service", "pause"]:
        polar_ok(*arguments)
        polar_ok("service", "resume", "--all")
        return
    done = polar(*arguments)
    assert done.exit_code == 0, done.stderr
    assert done.stdout or done.stderr


def test_exported_variables_point_any_agent_at_the_server(
    recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [block for block in of_language("sh") if "OPENAI_BASE_URL" in block.text and block.page == "README.md"]
    for name, value in re.findall(r"^export (\w+)=(\S+)", recorded.fill_in(block.text), re.M):
        monkeypatch.setenv(name, value)
    OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
    label = os.environ["OPENAI_API_KEY"]
    assert label in {session["label"] for session in polar_json("sessions")["sessions"]}


@pytest.mark.full  # Transformers takes seconds to import
def test_feed_example_runs(recorded: RecordedRun) -> None:
    """Python blocks of other pages are run by tests/client/test_docs.py."""
    pages = {block.page for block in BLOCKS if block.language == "python"}
    assert pages == {"docs/guide/data.md", "docs/guide/rollouts.md", "docs/reference/api_examples.md"}
    reading, block = [block for block in of_language("python") if block.page == "docs/guide/data.md"]
    names_of_reading: dict[str, Any] = {"polar_proxy": polar_proxy, "polars": pytest.importorskip("polars")}
    exec(recorded.fill_in(reading.text), names_of_reading)
    assert len(names_of_reading["db"].rollouts()) >= 2  # the recorded run, and what other commands submitted

    class Trainer:
        callbacks: list[object]

        def __init__(self) -> None:
            self.callbacks = []

        def add_callback(self, callback: object) -> None:
            self.callbacks.append(callback)

    trainer = Trainer()
    names = {"FeedGroups": FeedGroups, "RecordedRollouts": RecordedRollouts, "Client": Client, "trainer": trainer}
    exec(recorded.fill_in(block.text), {**names, "key": recorded.server.key})
    assert len(trainer.callbacks) == 1


def test_home_has_no_other_database(recorded: RecordedRun) -> None:
    assert [file.name for file in Path(recorded.server.home).glob("*.db")] == ["polar.db"]
