"""Cline CLI (https://cline.bot): a native program that speaks Chat Completions."""

from __future__ import annotations

from harness_adapters.base import HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import json_text, mcp_table
from harness_adapters.toolkit.npm import NpmHarness

_PROVIDER = "openai-compatible"


class Cline(NpmHarness):
    name = "cline"
    default_version = "3.0.65"
    skills_folder = ".cline/skills"
    entry = "node_modules/@cline/cli-*/bin/cline"
    info = HarnessInfo(
        homepage="https://cline.bot",
        package="npm:cline",
        wire_apis=("openai_chat",),
        runtime="native",
        features=frozenset({"stream", "mcp", "skills", "subagents", "parallel_tools", "reasoning"}),
        notes="Has no limit of model calls. Resumes only by the id of a conversation, so cannot resume here. "
        "Contacts data.cline.bot at every start; no setting prevents it.",
    )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        provider = {
            "provider": _PROVIDER,
            "model": context.model,
            "baseUrl": context.base_url,
            **({} if context.context_length is None else {"contextWindow": context.context_length}),
        }
        # As `cline auth` writes it, without the key: Cline then reads the key from the environment. The date only
        # orders entries.
        entry = {"settings": provider, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
        providers = {"version": 1, "lastUsedProvider": _PROVIDER, "modes": {}, "providers": {_PROVIDER: entry}}
        files = {
            ".cline/data/settings/providers.json": json_text(providers),
            ".cline/data/settings/global-settings.json": json_text(
                {"telemetryOptOut": True, "autoUpdateEnabled": False}
            ),
        }
        if context.mcp_servers:
            servers = {"mcpServers": mcp_table(context.mcp_servers, type="streamableHttp")}
            files[".cline/data/settings/cline_mcp_settings.json"] = json_text(servers)
        argv = [*self.command(installed), "--provider", _PROVIDER, "--model", context.model, "--", context.instruction]
        env = {
            "OPENAI_API_KEY": context.api_key,
            # Otherwise it starts a daemon that outlives the run.
            "CLINE_SESSION_BACKEND_MODE": "local",
            "CLINE_NO_AUTO_UPDATE": "1",
            "DO_NOT_TRACK": "1",
            "DISABLE_TELEMETRY": "1",
        }
        return LaunchPlan(argv=tuple(argv), env=env, files=files)
