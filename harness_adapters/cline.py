"""Cline CLI (https://cline.bot): a native program that speaks Chat Completions."""

from __future__ import annotations

from harness_adapters.base import Connection, Endpoint, HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import json_text, make_launch_plan, mcp_table
from harness_adapters.toolkit.npm import NpmHarness

_PROVIDER = "openai-compatible"
_SETTINGS = ".cline/data/settings"


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
        notes="Has no limit of model calls. Cannot resume: it needs the id of the conversation, which Polar lacks. "
        "Contacts data.cline.bot at every start; no setting prevents it.",
        summary="Open-source agent for the terminal and editors",
        command="cline",
    )

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        provider = {
            "provider": _PROVIDER,
            "model": endpoint.model,
            "baseUrl": endpoint.base_url,
            **({} if endpoint.context_length is None else {"contextWindow": endpoint.context_length}),
        }
        # As `cline auth` writes it, without the key: Cline then reads the key from the environment. The date only
        # orders entries.
        entry = {"settings": provider, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
        providers = {"version": 1, "lastUsedProvider": _PROVIDER, "modes": {}, "providers": {_PROVIDER: entry}}
        return Connection(
            env={
                "OPENAI_API_KEY": endpoint.api_key,
                "CLINE_DATA_DIR": f"{endpoint.home}/.cline/data",
                # Otherwise it starts a daemon that outlives the run.
                "CLINE_SESSION_BACKEND_MODE": "local",
            },
            arguments=("--provider", _PROVIDER, "--model", endpoint.model),
            settings={
                f"{_SETTINGS}/providers.json": providers,
                f"{_SETTINGS}/global-settings.json": {"telemetryOptOut": True, "autoUpdateEnabled": False},
            },
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection = self.make_connection(context, wire_api)
        files = {}
        if context.mcp_servers:
            servers = {"mcpServers": mcp_table(context.mcp_servers, type="streamableHttp")}
            files[f"{_SETTINGS}/cline_mcp_settings.json"] = json_text(servers)
        argv = [*self.command(installed), *connection.arguments, "--", context.instruction]
        env = {"CLINE_NO_AUTO_UPDATE": "1", "DO_NOT_TRACK": "1", "DISABLE_TELEMETRY": "1"}
        return make_launch_plan(connection, argv, env=env, files=files)
