"""Pi (https://pi.dev): runs on node and speaks Chat Completions, Responses or Anthropic Messages."""

from __future__ import annotations

from harness_adapters.base import Connection, Endpoint, HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import SESSION_KEY, make_launch_plan
from harness_adapters.toolkit.npm import NpmHarness

_FOLDER = ".pi/agent"
_APIS: dict[WireApi, str] = {
    "openai_chat": "openai-completions",
    "openai_responses": "openai-responses",
    "anthropic_messages": "anthropic-messages",
}


class Pi(NpmHarness):
    name = "pi"
    default_version = "0.87.1"
    entry = "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"
    skills_folder = f"{_FOLDER}/skills"
    needs_node = True
    info = HarnessInfo(
        homepage="https://pi.dev",
        package="npm:@earendil-works/pi-coding-agent",
        wire_apis=tuple(_APIS),
        runtime="node 22.19",
        features=frozenset({"stream", "resume", "skills", "parallel_tools", "reasoning"}),
        notes="Has no limit of model calls and no sub-agents.",
        version_command=("{program}", f"{{root}}/{entry}", "--version"),
        summary="Minimal agent for the terminal",
        command="pi",
    )

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        window = {} if endpoint.context_length is None else {"contextWindow": endpoint.context_length}
        provider = {
            "baseUrl": endpoint.root_url if wire_api == "anthropic_messages" else endpoint.base_url,
            "api": _APIS[wire_api],
            "apiKey": f"${SESSION_KEY}",
            "models": [{"id": endpoint.model, "reasoning": True, **window}],
        }
        timeout = round(endpoint.request_timeout_seconds * 1000)
        return Connection(
            env={SESSION_KEY: endpoint.api_key, "PI_CODING_AGENT_DIR": f"{endpoint.home}/{_FOLDER}"},
            arguments=("--provider", "polar", "--model", endpoint.model),
            settings={
                f"{_FOLDER}/models.json": {"providers": {"polar": provider}},
                f"{_FOLDER}/settings.json": {"httpIdleTimeoutMs": timeout, "enableInstallTelemetry": False},
            },
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection = self.make_connection(context, wire_api)
        argv = [*self.command(installed), "--print", "--offline", "--approve", *connection.arguments]
        argv += ["--continue"] if context.resume else []
        # A message that begins with @ would be read as a file name.
        argv += ["--", f" {context.instruction}" if context.instruction.startswith("@") else context.instruction]
        return make_launch_plan(connection, argv, env={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"})
