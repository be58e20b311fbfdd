"""Codex CLI (https://github.com/openai/codex): a native program that speaks the Responses API.

The endpoint is set as a custom provider in `config.toml`, because Codex's built-in provider tries a WebSocket first and
ignores `OPENAI_BASE_URL`.
"""

from __future__ import annotations

from harness_adapters.base import Connection, Endpoint, HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import SESSION_KEY, make_launch_plan, mcp_table
from harness_adapters.toolkit.npm import NpmHarness

_SETTINGS = ".codex/config.toml"


class Codex(NpmHarness):
    name = "codex"
    default_version = "0.169.0"
    skills_folder = ".codex/skills"
    entry = "node_modules/@openai/codex-*/vendor/*/bin/codex"
    info = HarnessInfo(
        homepage="https://github.com/openai/codex",
        package="npm:@openai/codex",
        wire_apis=("openai_responses",),
        runtime="native",
        features=frozenset({"stream", "resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"}),
        notes="Has no limit of model calls. Does not wait for sub-agents. Gives up at a 429 without retry-after.",
        summary="OpenAI's agent for the terminal",
        command="codex",
    )

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        settings: dict[str, object] = {
            "model": endpoint.model,
            "model_provider": "polar",
            "check_for_update_on_startup": False,
            "analytics": {"enabled": False},
            # Otherwise it searches github.com for plugins at every start.
            "features": {"plugins": False},
            "otel": {"metrics_exporter": "none"},
            "model_providers": {
                "polar": {
                    "name": "polar",
                    "base_url": endpoint.base_url,
                    "env_key": SESSION_KEY,
                    "wire_api": "responses",
                    "stream_idle_timeout_ms": round(endpoint.request_timeout_seconds * 1000),
                }
            },
        }
        if endpoint.context_length is not None:
            settings["model_context_window"] = endpoint.context_length
        return Connection(
            env={"CODEX_HOME": f"{endpoint.home}/.codex", SESSION_KEY: endpoint.api_key},
            settings={_SETTINGS: settings},
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        argv = [*self.command(installed), "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
        argv += ["resume", "--last"] if context.resume else []
        argv += ["--", context.instruction]
        settings = {_SETTINGS: {"mcp_servers": mcp_table(context.mcp_servers)}}
        return make_launch_plan(self.make_connection(context, wire_api), argv, settings=settings)
