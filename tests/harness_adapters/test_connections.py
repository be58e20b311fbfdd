"""The connection of each harness to an endpoint, which rollouts and `polar connect` share."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from harness_adapters.base import HarnessError, get_adapter, list_adapters
from harness_adapters.toolkit.adapter import ConnectableHarness, settings_files
from tests.harness_adapters.launch_plans import CONTEXT, KEY, plan

ROOT = Path(__file__).parent.parent.parent
INSTALLED = [name for name in list_adapters() if name != "shell"]
NAMES = [name for name in INSTALLED if not get_adapter(name).info.intercepted]
# Permissions and limits are for runs without a user.
OF_ROLLOUTS = ("yolo", "skip-permissions", "bypass", "auto", "trust", "steps", "turns", "permission", "IS_SANDBOX")


def connectable(name: str) -> ConnectableHarness:
    adapter = get_adapter(name)
    assert isinstance(adapter, ConnectableHarness)
    return adapter


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, Mapping):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    return bool(whole == part)


def test_all_harnesses_can_be_connected_by_programs_of_their_own() -> None:
    assert len(NAMES) == 19
    commands = {connectable(name).info.command for name in NAMES}
    assert len(commands) == 19


def test_the_readme_counts_the_harnesses() -> None:
    numbers = {17: "seventeen", 18: "eighteen", 19: "nineteen", 20: "twenty", 21: "twenty-one"}
    readme = (ROOT / "README.md").read_text()
    assert f"the {numbers[len(NAMES)]} agents that Polar knows" in readme
    assert f"the {numbers[len(INSTALLED)]} harnesses that Polar installs" in readme


@pytest.mark.parametrize("name", NAMES)
def test_connection_is_part_of_the_launch_plan(name: str) -> None:
    connection = connectable(name).connect(CONTEXT)
    made = plan(get_adapter(name))
    assert connection.env.items() <= made.env.items()
    for path, content in connection.settings.items():
        read = tomllib.loads if path.endswith(".toml") else json.loads
        assert contains(read(made.files[path]), content)
    if name != "terminus-2":  # users start harbor, rollouts harbor's class
        words = connection.arguments
        assert words in [made.argv[at : at + len(words)] for at in range(len(made.argv))]


@pytest.mark.parametrize("name", NAMES)
def test_connection_has_endpoint_key_and_model_and_grants_nothing(name: str) -> None:
    connection = connectable(name).connect(CONTEXT)
    files = settings_files(connection.settings)
    everything = json.dumps([dict(connection.env), connection.arguments, files])
    assert "http://127.0.0.1:9" in everything
    assert CONTEXT.model in everything
    assert KEY in connection.env.values()
    assert KEY not in json.dumps([connection.arguments, files])
    assert not [word for word in OF_ROLLOUTS if word in json.dumps([connection.arguments, dict(connection.env)])]
    assert "HOME" not in connection.env
    assert not set(connection.unset) & connection.env.keys()
    # The agent finds its settings by a variable, because the user's HOME stays as it is.
    folders = [PurePosixPath(value) for value in connection.env.values() if value.startswith(CONTEXT.home)]
    for path in files:
        assert any((PurePosixPath(CONTEXT.home) / path).is_relative_to(folder) for folder in folders)


@pytest.mark.parametrize("name", NAMES)
def test_sessions_key_is_not_in_the_variable_of_polars_own_key(name: str) -> None:
    """Otherwise `polar --url` in the same shell would send the session's key to the HTTP API."""
    assert "POLAR_API_KEY" not in connectable(name).connect(CONTEXT).env


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("codex", "npm install --global @openai/codex"),
        ("mini-swe-agent", "uv tool install --with mcp mini-swe-agent"),
        ("openhands", "uv tool install --python 3.12 openhands"),
    ],
)
def test_install_commands(name: str, command: str) -> None:
    assert " ".join(connectable(name).install_command) == command


def test_connect_refuses_a_wire_api_that_the_harness_does_not_speak() -> None:
    with pytest.raises(HarnessError, match="codex does not speak openai_chat"):
        connectable("codex").connect(replace(CONTEXT, wire_api="openai_chat"))


def test_claude_code_knows_the_context_of_the_model() -> None:
    """Otherwise it assumes a million tokens, compacts too late, and says so at each start."""
    known = connectable("claude-code").connect(replace(CONTEXT, context_length=65_536))
    assert known.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    unknown = connectable("claude-code").connect(replace(CONTEXT, context_length=None))
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in unknown.env
