"""A command line as a harness: words, placeholders, the key, exit codes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_adapters.base import HarnessError, InstallError, LaunchPlan, get_adapter, split_version
from harness_adapters.shell import ShellCommand
from tests.harness_adapters import launch_plans

CACHE = Path("/cache")


def plan(command: str, **changes: object) -> LaunchPlan:
    adapter = get_adapter(f"shell:{command}")
    context = replace(launch_plans.CONTEXT, **changes)  # type: ignore[arg-type]
    planned = adapter.launch(adapter.install(CACHE), context)
    assert planned == adapter.launch(adapter.install(CACHE), context)
    assert not any(launch_plans.KEY in word for word in planned.argv)
    return planned


def test_placeholders_stay_within_their_words() -> None:
    command = (
        "my-agent --url={base_url} --root {root_url} -k {api_key_env} -m '{model} x' {home}/x {workdir} {instruction}"
    )
    assert plan(command).argv == (
        "my-agent", "--url=http://127.0.0.1:9/v1", "--root", "http://127.0.0.1:9", "-k", "OPENAI_API_KEY",
        "-m", "polar-tiny x", "/home/agent/x", "/workspace", launch_plans.INSTRUCTION,
    )  # fmt: skip


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))))
def test_instruction_stays_within_its_word(instruction: str) -> None:
    assert plan("a '{instruction}!' b", instruction=instruction).argv == ("a", instruction + "!", "b")


def test_quoted_operators_are_arguments() -> None:
    assert plan("a '>' \"b && c\" --range=1>2 http://x/?y=1&z=2 \\;").argv == (
        "a", ">", "b && c", "--range=1>2", "http://x/?y=1&z=2", ";",
    )  # fmt: skip
    assert plan("bash -c 'a | tee log; b > c'").argv == ("bash", "-c", "a | tee log; b > c")


def test_double_braces_are_literal() -> None:
    assert plan("a '{{\"x\": 1}}' {{model}}").argv == ("a", '{"x": 1}', "{model}")
    assert plan("""a '{"x": 1}'""").argv == ("a", '{"x": 1}'), "not a placeholder"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "the command is missing"),
        ("a {modle}", "{modle} is not a placeholder; use one of {base_url}"),
        ("a 'b", "cannot be split into words"),
        ("bash -c 'run {instruction}'", "POLAR_INSTRUCTION"),
        ("/bin/sh -c \"x '{instruction}'\"", "POLAR_INSTRUCTION"),
        ("{mount:/no/such/folder}/a", "no such file or folder on this machine"),
        ("{mount:relative}/a", "give an absolute path"),
        ("a {instruction} > log", "contains >, but no shell reads this command"),
        ("a {instruction} 2>&1", "contains 2>&1, but"),
        ("a >>log", "Write shell:bash -c 'COMMAND'"),
        ("cd src && a {instruction}", "contains &&, but"),
        ("a | tee log", "contains |, but"),
        ("cd src; a", "contains src;, but"),
    ],
)
def test_install_rejects_invalid_commands(command: str, message: str) -> None:
    with pytest.raises(InstallError, match=r".*") as caught:
        get_adapter(f"shell:{command}").install(CACHE)
    assert message in str(caught.value)


def test_env_has_endpoint_and_key_under_every_name() -> None:
    env = plan("a").env
    for provider, url in (("OPENAI", "/v1"), ("ANTHROPIC", ""), ("GOOGLE_GEMINI", "")):
        assert env[f"{provider}_BASE_URL"] == f"http://127.0.0.1:9{url}"
    assert env["OPENAI_API_BASE"] == "http://127.0.0.1:9/v1"
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
        assert env[name] == launch_plans.KEY
    assert env["POLAR_INSTRUCTION"] == launch_plans.INSTRUCTION


def test_mount_keeps_its_path(tmp_path: Path) -> None:
    assert plan(f"{{mount:{tmp_path}}}/agent x").argv == (f"{tmp_path}/agent", "x")
    adapter = get_adapter(f"shell:{{mount:{tmp_path}}}/agent x")
    assert adapter.default_version == "agent"
    assert adapter.install(CACHE).mounts == (tmp_path,)


def test_rejects_unsupported_features_and_versions() -> None:
    for changes in ({"resume": True}, {"mcp_servers": launch_plans.MCP}, {"skills": (launch_plans.SKILL,)}):
        with pytest.raises(HarnessError):
            plan("a", **changes)
    with pytest.raises(InstallError, match="cannot have a version"):
        ShellCommand("a").install(CACHE, "1.0")
    assert split_version("shell:a@1 b") == ("shell:a@1 b", None)
    assert split_version("aider@0.86.1") == ("aider", "0.86.1")
    assert split_version("aider") == ("aider", None)


@pytest.mark.parametrize(("code", "expected"), [(0, ("ok", 0)), (7, ("failed", 7))])
def test_exit_code_decides_the_outcome(code: int, expected: tuple[str, int]) -> None:
    program = "import os, sys; print(os.environ['POLAR_INSTRUCTION']); sys.exit(int(sys.argv[1]))"
    planned = plan(shlex.join([sys.executable, "-c", program, str(code)]), instruction="last words")
    done = subprocess.run(planned.argv, env=dict(planned.env), capture_output=True, text=True, check=False)
    outcome, detail = ShellCommand("a").interpret(done.returncode, done.stdout)
    assert (outcome, done.returncode) == expected
    assert ("last words" in detail) == (code != 0)
    assert ShellCommand("a").interpret(None, "")[0] == "timed_out"
