"""Codex CLI (https://github.com/openai/codex): a native program that speaks Responses.

Its endpoint is a custom provider in `config.toml`: the built-in one tries a WebSocket first and ignores
`OPENAI_BASE_URL`.
"""

from __future__ import annotations

from harness_adapters.base import HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import mcp_table, toml_text
from harness_adapters.toolkit.npm import NpmHarness

_KEY = "POLAR_API_KEY"


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
    )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        settings = {
            "model": context.model,
            "model_provider": "polar",
            "check_for_update_on_startup": False,
            "analytics": {"enabled": False},
            # Otherwise it searches github.com for plugins at every start.
            "features": {"plugins": False},
            "otel": {"metrics_exporter": "none"},
            "model_providers": {
                "polar": {
                    "name": "polar",
                    "base_url": context.base_url,
                    "env_key": _KEY,
                    "wire_api": "responses",
                    "stream_idle_timeout_ms": round(context.request_timeout_seconds * 1000),
                }
            },
            "mcp_servers": mcp_table(context.mcp_servers),
        }
        if context.context_length is not None:
            settings["model_context_window"] = context.context_length
        argv = [*self.command(installed), "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
        argv += ["resume", "--last"] if context.resume else []
        argv += ["--", context.instruction]
        env = {"CODEX_HOME": f"{context.home}/.codex", _KEY: context.api_key}
        return LaunchPlan(argv=tuple(argv), env=env, files={".codex/config.toml": toml_text(settings)})
