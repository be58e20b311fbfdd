"""Mistral Vibe: its launch plan, its exit codes, and the real program against the gateway."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from harness_adapters.base import Installation
from harness_adapters.mistral_vibe import MistralVibe
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from tests.conftest import Serve
from tests.harness_adapters import launch_plans, real_runs

ADAPTER = MistralVibe()
# An installation, and two starts of a half-gigabyte program, on a busy machine.
pytestmark = pytest.mark.timeout(1200)


def test_launch_plan() -> None:
    launch_plans.info_is_complete(ADAPTER)
    plan = launch_plans.plan(ADAPTER, max_steps=7)
    assert plan.argv[:2] == ("/cache/x/bin/vibe", f"--prompt={launch_plans.INSTRUCTION}")
    assert plan.argv[plan.argv.index("--max-turns") + 1] == "7"
    assert "--continue" not in plan.argv
    assert launch_plans.plan(ADAPTER, resume=True).argv[-1] == "--continue"


def test_config_file_is_toml_and_names_the_key_variable() -> None:
    files = launch_plans.plan(
        ADAPTER, model='a "b" \\ c', mcp_servers=launch_plans.MCP, skills=(launch_plans.SKILL,)
    ).files
    config = tomllib.loads(files[".vibe/config.toml"])
    (provider,), (model,) = config["providers"], config["models"]
    assert provider["api_base"] == "http://127.0.0.1:9/v1"
    assert launch_plans.plan(ADAPTER).env[provider["api_key_env_var"]] == launch_plans.KEY
    assert (model["name"], model["provider"], model["alias"]) == (
        'a "b" \\ c',
        provider["name"],
        config["active_model"],
    )
    assert not any(value for name, value in config.items() if name.startswith("enable_"))
    assert config["experiments"] == {"enable": False}
    assert [server["name"] for server in config["mcp_servers"]] == ["files", "web"]
    assert config["mcp_servers"][0]["command"] == ["mcp-files", "--root", "/a b"]
    assert config["mcp_servers"][0]["env"] == {"LEVEL": '"1"'}
    assert config["mcp_servers"][1]["url"] == "http://127.0.0.1:9/mcp"
    assert files[".vibe/skills/say-hello/SKILL.md"] == launch_plans.SKILL.text


@pytest.mark.parametrize(
    ("code", "tail", "outcome", "message"),
    [
        (0, "All done.\n", "ok", "finished"),
        (3, "Let me see.\nStopped: turn_limit\n", "ok", "turn limit"),
        (1, "Error: Invalid API key\n", "failed", "exited with 1: Error: Invalid API key"),
        (3, "Stopped: something else\n", "failed", "exited with 3"),
        (None, "", "timed_out", "time limit"),
    ],
)
def test_interpret(code: int | None, tail: str, outcome: str, message: str) -> None:
    launch_plans.assert_interpreted(ADAPTER, code, tail, outcome, message)


@pytest.mark.by_command
async def test_real_program_and_a_second_turn(
    installed: Installation, serve: Serve, store: Store, tmp_path: Path
) -> None:
    action = json.dumps({"command": "pwd > where.txt"})
    script = real_runs.play(real_runs.call("bash", action), "All done.", "Once more.")
    async with serve(ScriptedEngine(script)) as gateway:
        ran = await real_runs.run(ADAPTER, installed, gateway, store, tmp_path)
        assert ADAPTER.interpret(ran.exit_code, ran.output) == ("ok", "finished"), ran.output[-3000:]
        assert (ran.workdir / "where.txt").read_text() == f"{ran.workdir}\n"
        assert [call.edge for call in ran.calls] == ["root", "continues"]
        assert all(call.stream for call in ran.calls)
        again = await real_runs.run(
            ADAPTER, installed, gateway, store, tmp_path, resume=True, instruction="Say it again."
        )
    assert ADAPTER.interpret(again.exit_code, again.output) == ("ok", "finished"), again.output[-3000:]
    assert [call.edge for call in again.calls] == ["root", "continues", "continues"]


@pytest.mark.by_command
async def test_real_program_at_its_turn_limit(
    installed: Installation, serve: Serve, store: Store, tmp_path: Path
) -> None:
    script = real_runs.play(real_runs.call("bash", '{"command": "true"}'))
    async with serve(ScriptedEngine(script)) as gateway:
        ran = await real_runs.run(ADAPTER, installed, gateway, store, tmp_path, max_steps=2)
    assert ADAPTER.interpret(ran.exit_code, ran.output) == ("ok", "ended by its turn limit"), ran.output[-3000:]
    assert len(ran.calls) == 2
