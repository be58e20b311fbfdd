"""`polar connect`: settings for agents, printed or used to start a fake agent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness_adapters.base import get_adapter
from harness_adapters.toolkit.adapter import ConnectableHarness
from polar_proxy.cli.connect import ConnectCommand
from tests.cli.process import POLAR, environment
from tests.cli.runner import polar, polar_error, polar_json, polar_ok
from tests.client.server import polar_serve
from tests.fakes.model_list import serve_model_list
from tests.harness_adapters.test_connections import NAMES

pytestmark = pytest.mark.slow

MODEL = 'a model\'s "$(name)" \\'
FREE_PORT = "9"
"""The port of the discard protocol, on which no server of this machine listens."""
REPORT = """#!/bin/sh
env > "$REPORT/env"
pwd > "$REPORT/folder"
for word; do printf '%s\\n' "$word"; done > "$REPORT/arguments"
cp -r "$POLAR_HOME/connect" "$REPORT/settings"
"""

MakeProgram = Callable[..., Path]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The model list of a server that uses the database of this machine."""
    with serve_model_list(MODEL) as url:
        monkeypatch.setenv("POLAR_GATEWAY__PORT", url.rpartition(":")[2])
        yield url


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeProgram:
    """Return a function that puts a fake agent on PATH and returns the folder in which it reports its start."""
    folder, report = tmp_path / "bin", tmp_path / "report"
    folder.mkdir()
    report.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("REPORT", str(report))

    def make(name: str, end: str = "", script: str = REPORT) -> Path:
        program = folder / command_of(name)
        program.write_text(script + end)
        program.chmod(0o755)
        return report

    return make


def command_of(name: str) -> str:
    adapter = get_adapter(name)
    assert isinstance(adapter, ConnectableHarness)
    return adapter.info.command


def reported_environment(report: Path) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in (report / "env").read_text().splitlines() if "=" in line)


def sessions() -> Any:
    return polar_json("sessions")["sessions"]


def test_lists_all_agents_and_their_programs(install: MakeProgram) -> None:
    install("codex")
    rows = polar_json("connect")["agents"]
    assert [row["agent"] for row in rows] == NAMES
    assert all(row["summary"] and row["program"] and row["install"] for row in rows)
    assert next(row for row in rows if row["agent"] == "codex")["path"].endswith("/bin/codex")
    assert "OpenAI's agent for the terminal" in polar_ok("connect")


@pytest.mark.parametrize("name", NAMES)
def test_printed_lines_point_the_agent_at_the_server(
    name: str, server: str, install: MakeProgram, polar_home: Path
) -> None:
    """A shell evaluates the lines, and then starts the agent with the last one."""
    report = install(name)
    lines = polar_ok("connect", name, "--key", "my-run")
    assert not (polar_home / "connect").exists(), "printing writes nothing"
    (start,) = [line.removeprefix("# Start it: ") for line in lines.splitlines() if line.startswith("# Start it: ")]
    script = f"{lines}\nmkdir -p {polar_home}/connect\n{start} --more"
    shell_env = {"ANTHROPIC_AUTH_TOKEN": "mine", "OPENAI_BASE_URL": "http://elsewhere", "GOOGLE_API_KEY": "mine"}
    subprocess.run(["sh", "-euc", script], env=os.environ | shell_env, check=True)
    document = polar_json("connect", name, "--key", "my-run")
    env = reported_environment(report)
    assert env.items() >= document["env"].items()
    assert not env.keys() & set(document["unset"])
    words = (report / "arguments").read_text().splitlines()
    assert words == [*document["start"][1:], "--more"]
    for path, text in document["files"].items():
        assert Path(path).is_relative_to(polar_home)
        assert Path(path).read_text() == text
    assert "my-run" in env.values()
    everything = "\n".join([*words, *document["files"].values(), *document["env"].values()])
    assert f"{server}/v1" in everything or server in document["env"].values()


@pytest.mark.parametrize("name", NAMES)
def test_starts_the_agent_in_the_current_folder(
    name: str, server: str, install: MakeProgram, polar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "mine")
    report = install(name, end="exit 7\n")
    done = polar("connect", name, "--", "--fix", "a b", "--json")
    assert done.exit_code == 7
    (session,) = sessions()
    assert session["label"] == name
    assert f"polar show {session['session_id']}" in done.stderr
    document = polar_json("connect", name, "--key", "other")
    words = (report / "arguments").read_text().splitlines()
    # An argument may name a settings file, whose folder exists during this run only.
    (home,) = {word for word in words if "/polar-tmp-" in word} or {""}
    printed = [re.sub(r"^.*/connect/[^/]+/[^/]+/", "/", word) for word in document["start"][1:]]
    assert [re.sub(r"^.*/polar-tmp-[^/]+/", "/", word) for word in words] == [*printed, "--fix", "a b", "--json"]
    assert not home or Path(home).is_relative_to(polar_home / "connect")
    assert (report / "folder").read_text().strip() == str(tmp_path)
    env = reported_environment(report)
    assert document["env"].keys() <= env.keys()
    assert env["HOME"] == os.environ["HOME"]
    assert not env.keys() & set(document["unset"])
    (key,) = [value for value in env.values() if value.startswith("sk-polar-")]
    assert key not in "\n".join([*words, done.stdout, done.stderr])
    settings = [path for path in (report / "settings").rglob("*") if path.is_file()]
    assert len(settings) == len(document["files"])
    assert not [path for path in settings if key in path.read_text()]
    assert list((polar_home / "connect").iterdir()) == [], "the settings are removed"


def test_starts_the_agent_without_arguments(server: str, install: MakeProgram) -> None:
    report = install("claude-code")
    assert polar("connect", "claude-code", "--").exit_code == 0
    assert (report / "arguments").read_text() == ""
    assert reported_environment(report)["ANTHROPIC_BASE_URL"] == server


def test_removes_the_settings_of_a_killed_start(server: str, install: MakeProgram, polar_home: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    left = polar_home / "connect" / f"polar-tmp-{dead.pid}-x"
    (left / ".codex").mkdir(parents=True)
    install("codex")
    polar_ok("connect", "codex", "--")
    assert not left.exists()


def test_missing_program_names_the_command_that_installs_it(server: str, polar_home: Path) -> None:
    error = polar_error("connect", "codex", "--", "exec")
    assert "there is no program 'codex' on PATH. Install it: npm install --global @openai/codex" in error
    assert not (polar_home / "polar.db").exists(), "no session is made"


def test_errors_say_what_to_do(server: str, monkeypatch: pytest.MonkeyPatch, polar_home: Path) -> None:
    assert "Write -- before the arguments of the agent: polar connect codex -- exec" in polar_error(
        "connect", "codex", "exec"
    )
    assert "leave out --json, or leave out `--`" in polar_error("connect", "codex", "--json", "--")
    assert "unknown harness 'nothing'" in polar_error("connect", "nothing")
    assert "shell cannot be connected: choose aider" in polar_error("connect", "shell:true")
    assert "names a version" in polar_error("connect", "codex@1.2.3")
    for key in ("", "two words", "ü", "line\nbreak"):
        assert "--key must consist of visible ASCII characters" in polar_error("connect", "codex", "--key", key)
    assert "must be printable" in polar_error("connect", "codex", "--model", "a\nb")
    assert "is not the URL of a server" in polar_error("connect", "codex", "--url", "here")
    assert "No server answers at http://127.0.0.1:9x" in polar_error("connect", "codex", "--url", "http://127.0.0.1:9x")
    monkeypatch.setenv("POLAR_GATEWAY__PORT", FREE_PORT)
    error = polar_error("connect", "codex")
    assert f"No server answers at http://127.0.0.1:{FREE_PORT}" in error
    assert "polar serve" in error
    monkeypatch.setenv("POLAR_GATEWAY__PORT", "0")
    assert "give --url" in polar_error("connect", "codex")
    assert not (polar_home / "polar.db").exists(), "no session is made"


def test_refuses_other_servers_and_hostile_model_names() -> None:
    with serve_model_list("m", owner="somebody") as url:
        assert f"{url} is not a Polar server" in polar_error("connect", "codex", "--url", url, "--key", "k")
    with serve_model_list("m\x1b]0;x\x07") as url:
        assert "must be printable text" in polar_error("connect", "codex", "--url", url, "--key", "k")


def test_takes_the_model_of_the_servers_own_engine() -> None:
    with serve_model_list("main", "of-a-rule") as url:
        assert polar_json("connect", "codex", "--url", url, "--key", "k")["model"] == "main"


def test_names_the_command_for_an_agent_that_must_be_intercepted() -> None:
    assert "polar intercept -- copilot" in polar_error("connect", "copilot-signed-in")
    assert "copilot-signed-in" not in polar_ok("connect")


def test_model_option_replaces_the_name_only(server: str) -> None:
    (settings,) = polar_json("connect", "codex", "--key", "k", "--model", "other")["files"].values()
    assert 'model = "other"' in settings
    assert "model_context_window = 32768" in settings


def test_says_that_the_model_ends_its_answers_early(install: MakeProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    install("claude-code")
    with serve_model_list("polar-tiny", max_tokens=256) as url:
        (note,) = [
            line for line in polar_ok("connect", "codex", "--url", url, "--key", "k").splitlines() if "256" in line
        ]
        assert note.startswith("# The server's model ends each answer after 256 tokens.")
        assert "Claude Code stops with an error about max_tokens" in note
        assert "Serve another model: polar serve --engine llamacpp --engine-url URL" in note
        assert polar_json("connect", "codex", "--url", url, "--key", "k")["notes"] == [note.removeprefix("# ")]
        assert note.removeprefix("# ") in polar("connect", "claude-code", "--url", url, "--key", "k", "--").stderr
    with serve_model_list("m") as url:
        assert polar_json("connect", "codex", "--url", url, "--key", "k")["notes"] == []


CALL = """#!/bin/sh
curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H 'Content-Type: application/json' -d '{"messages": [{"role": "user", "content": "hi"}], "model": "m"}'
"""


def test_calls_of_the_agent_are_in_its_session(
    polar_home: Path, install: MakeProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is made through the API, by a server with another database than this machine's."""
    install("qwen-code", script=CALL)
    with polar_serve(polar_home, "--require-known-keys", "--engine", "scripted") as running:
        monkeypatch.setenv("POLAR_URL", running.url)
        monkeypatch.setenv("POLAR_DB", f"sqlite:///{polar_home}/other.db")
        done = polar("connect", "qwen-code", "--")
        assert done.exit_code == 0
        session_id = done.stderr.split()[-1]
        assert polar_json("connect", "qwen-code")["session_id"] != session_id
        monkeypatch.setenv("POLAR_HOME", str(polar_home / "elsewhere"))
        assert "--key KEY" in polar_error("connect", "qwen-code")
        monkeypatch.setenv("POLAR_HOME", str(polar_home))
    assert not (polar_home / "other.db").exists()
    assert len(polar_json("show", session_id, "--db", str(polar_home / "polar.db"))["calls"]) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGINT, 0)])
def test_signals_end_the_agent_and_not_the_command(
    number: signal.Signals, code: int, server: str, install: MakeProgram, tmp_path: Path, polar_home: Path
) -> None:
    """SIGTERM is passed on. Ctrl-C reaches the agent from the terminal, so this process ignores its own."""
    wait = "trap 'exit 5' TERM\necho ready\nfor _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done\n"
    install("codex", script="#!/bin/sh\n", end=wait)
    command = [POLAR, "connect", "codex", "--key", "k", "--"]
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(60) == code
    assert list((polar_home / "connect").iterdir()) == []


def test_command_records_double_dash() -> None:
    command = ConnectCommand("connect")
    assert command.make_context("connect", ["--"], resilient_parsing=True).meta == {"polar_connect_start": True}
    assert command.make_context("connect", [], resilient_parsing=True).meta == {"polar_connect_start": False}
