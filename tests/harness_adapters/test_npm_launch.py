"""The launch plans of the npm harnesses, and the config files that each program reads."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from harness_adapters.base import HarnessError, LaunchPlan, WireApi, get_adapter
from tests.harness_adapters.launch_plans import INSTRUCTION, KEY, MCP, SKILL, info_is_complete, plan

NAMES = ("claude-code", "cline", "codex", "gemini-cli", "opencode", "pi", "qwen-code")
SKILL_FOLDERS = {
    "claude-code": ".claude/skills",
    "cline": ".cline/skills",
    "codex": ".codex/skills",
    "gemini-cli": ".gemini/skills",
    "opencode": ".config/opencode/skills",
    "pi": ".pi/agent/skills",
    "qwen-code": ".qwen/skills",
}
RESUME = {
    "claude-code": ["--continue"],
    "codex": ["resume", "--last"],
    "gemini-cli": ["--resume=latest"],
    "opencode": ["--continue"],
    "pi": ["--continue"],
    "qwen-code": ["--continue"],
}


def config(plan: LaunchPlan, name: str) -> Any:
    return (tomllib.loads if name.endswith(".toml") else json.loads)(plan.files[name])


@pytest.mark.parametrize("name", NAMES)
def test_launch_plan_keeps_the_promises(name: str) -> None:
    adapter = get_adapter(name)
    info_is_complete(adapter)
    made = plan(adapter)
    assert INSTRUCTION in (made.argv[-1], made.argv[-1].removeprefix("--prompt="), *made.files.values())
    for file in made.files:
        if file.endswith((".json", ".toml")):
            config(made, file)
    assert "polar-tiny" in json.dumps([made.argv, dict(made.env), dict(made.files)])


@pytest.mark.parametrize("name", NAMES)
def test_skills_are_in_the_folder_of_the_program(name: str) -> None:
    made = plan(get_adapter(name), skills=(SKILL,))
    assert made.files[f"{SKILL_FOLDERS[name]}/{SKILL.name}/SKILL.md"] == SKILL.text


@pytest.mark.parametrize("name", NAMES)
def test_resume_or_error(name: str) -> None:
    adapter = get_adapter(name)
    if name in RESUME:
        words = RESUME[name]
        argv = plan(adapter, resume=True).argv
        assert list(argv[argv.index(words[0]) :][: len(words)]) == words
        assert words[0] not in plan(adapter).argv
    else:
        with pytest.raises(HarnessError, match="cannot resume a conversation"):
            plan(adapter, resume=True)


@pytest.mark.parametrize("name", NAMES)
def test_launch_rejects_other_wire_apis(name: str) -> None:
    adapter = get_adapter(name)
    supported = set(adapter.info.wire_apis)
    every: set[WireApi] = {"openai_chat", "openai_responses", "anthropic_messages", "google_generate_content"}
    for wire_api in every - supported:
        with pytest.raises(HarnessError, match="does not speak"):
            plan(adapter, wire_api=wire_api)
    for wire_api in supported:
        plan(adapter, wire_api=wire_api)


def test_codex() -> None:
    made = plan(get_adapter("codex"), mcp_servers=MCP, request_timeout_seconds=60)
    settings = config(made, ".codex/config.toml")
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:9/v1"
    assert provider["wire_api"] == "responses"
    assert provider["stream_idle_timeout_ms"] == 60_000
    assert made.env[provider["env_key"]] == KEY
    assert settings["mcp_servers"]["files"]["args"] == ["--root", "/a b"]
    assert settings["mcp_servers"]["files"]["env"] == {"LEVEL": '"1"'}
    assert settings["mcp_servers"]["web"] == {"url": "http://127.0.0.1:9/mcp"}
    assert settings["check_for_update_on_startup"] is False


def test_claude_code() -> None:
    adapter = get_adapter("claude-code")
    made = plan(adapter, mcp_servers=MCP, max_steps=7, command_timeout_seconds=9)
    assert made.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    models = {value for key, value in made.env.items() if "MODEL" in key}
    assert models == {"polar-tiny"}
    assert made.argv[made.argv.index("--max-turns") + 1] == "7"
    assert made.env["BASH_DEFAULT_TIMEOUT_MS"] == "9000"
    assert "--mcp-config=/home/agent/.claude/mcp.json" in made.argv
    servers = config(made, ".claude/mcp.json")["mcpServers"]
    assert servers["files"]["command"] == "mcp-files"
    assert servers["web"] == {"type": "http", "url": "http://127.0.0.1:9/mcp"}
    assert adapter.interpret(1, "Error: Reached max turns (7)\n") == ("ok", "ended by its turn limit")
    assert adapter.interpret(1, "API Error: 500\n") == ("failed", "claude-code exited with 1: API Error: 500")
    codex = get_adapter("codex").interpret(1, "ERROR: Incomplete response returned\ntokens used\n19,642\n")
    assert codex == ("failed", "codex exited with 1: ERROR: Incomplete response returned")


def test_qwen_code() -> None:
    made = plan(get_adapter("qwen-code"), mcp_servers=MCP, max_steps=7)
    settings = config(made, ".qwen/settings.json")
    assert settings["privacy"]["usageStatisticsEnabled"] is False
    assert settings["mcpServers"]["web"] == {"httpUrl": "http://127.0.0.1:9/mcp"}
    assert made.argv[made.argv.index("--max-session-turns") + 1] == "7"
    assert made.env["OPENAI_API_KEY"] == KEY


def test_gemini_cli() -> None:
    made = plan(get_adapter("gemini-cli"), mcp_servers=MCP, max_steps=7)
    settings = config(made, ".gemini/settings.json")
    assert settings["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert settings["model"]["maxSessionTurns"] == 7
    assert settings["mcpServers"]["web"] == {"type": "http", "url": "http://127.0.0.1:9/mcp"}
    assert made.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("wire_api", "api", "base_url"),
    [
        (None, "openai-completions", "http://127.0.0.1:9/v1"),
        ("openai_responses", "openai-responses", "http://127.0.0.1:9/v1"),
        ("anthropic_messages", "anthropic-messages", "http://127.0.0.1:9"),
    ],
)
def test_pi(wire_api: WireApi | None, api: str, base_url: str) -> None:
    made = plan(get_adapter("pi"), wire_api=wire_api)
    provider = config(made, ".pi/agent/models.json")["providers"]["polar"]
    assert (provider["api"], provider["baseUrl"]) == (api, base_url)
    assert made.env[provider["apiKey"].removeprefix("$")] == KEY
    with pytest.raises(HarnessError, match="does not support MCP"):
        plan(get_adapter("pi"), mcp_servers=MCP)


def test_pi_does_not_read_an_instruction_as_a_file_name() -> None:
    assert plan(get_adapter("pi"), instruction="@pytest.fixture breaks").argv[-1] == " @pytest.fixture breaks"


@pytest.mark.parametrize(
    ("wire_api", "library"),
    [
        (None, "@ai-sdk/openai-compatible"),
        ("openai_responses", "@ai-sdk/openai"),
        ("anthropic_messages", "@ai-sdk/anthropic"),
    ],
)
def test_opencode(wire_api: WireApi | None, library: str) -> None:
    made = plan(get_adapter("opencode"), wire_api=wire_api, mcp_servers=MCP, max_steps=7, model="org/model")
    settings = config(made, ".config/opencode/opencode.json")
    assert made.argv[3:5] == ("/cache/x/bin/python", "run")
    assert made.argv[2].endswith('< "$HOME/.config/opencode/instruction.txt"')
    assert settings["model"] == settings["small_model"] == "polar/org/model"
    provider = settings["provider"]["polar"]
    assert provider["npm"] == library
    assert list(provider["models"]) == ["org/model"]
    assert settings["agent"]["build"]["steps"] == 7
    assert settings["mcp"]["files"]["command"] == ["mcp-files", "--root", "/a b"]
    assert settings["mcp"]["web"] == {"type": "remote", "url": "http://127.0.0.1:9/mcp"}
    # opencode's check for an installed plugin library: the folder exists, and the lock file names it.
    lock = config(made, ".config/opencode/package-lock.json")
    assert "@opencode-ai/plugin" in lock["packages"][""]["dependencies"]
    assert any(name.startswith(".config/opencode/node_modules/") for name in made.files)


def test_cline() -> None:
    made = plan(get_adapter("cline"), mcp_servers=MCP)
    providers = config(made, ".cline/data/settings/providers.json")
    settings = providers["providers"][providers["lastUsedProvider"]]["settings"]
    assert settings["baseUrl"] == "http://127.0.0.1:9/v1"
    assert config(made, ".cline/data/settings/global-settings.json")["telemetryOptOut"] is True
    servers = config(made, ".cline/data/settings/cline_mcp_settings.json")["mcpServers"]
    assert servers["web"] == {"type": "streamableHttp", "url": "http://127.0.0.1:9/mcp"}
    assert made.env["CLINE_SESSION_BACKEND_MODE"] == "local"


@pytest.mark.parametrize("name", ["codex", "pi", "opencode", "cline", "gemini-cli"])
def test_context_length_is_in_the_config(name: str) -> None:
    default, limited = (plan(get_adapter(name), context_length=length) for length in (None, 32_768))
    assert default.files != limited.files
    changed = "\n".join(text for path, text in limited.files.items() if default.files.get(path) != text)
    assert "32768" in changed or '"compressionThreshold": 0.015625' in changed
