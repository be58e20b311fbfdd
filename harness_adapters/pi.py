"""Pi (https://pi.dev): runs on node and speaks Chat Completions, Responses or Anthropic Messages."""

from __future__ import annotations

from harness_adapters.base import HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import json_text
from harness_adapters.toolkit.npm import NpmHarness

_KEY = "POLAR_API_KEY"
_APIS: dict[WireApi, str] = {
    "openai_chat": "openai-completions",
    "openai_responses": "openai-responses",
    "anthropic_messages": "anthropic-messages",
}


class Pi(NpmHarness):
    name = "pi"
    default_version = "0.87.1"
    entry = "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"
    skills_folder = ".pi/agent/skills"
    needs_node = True
    info = HarnessInfo(
        homepage="https://pi.dev",
        package="npm:@earendil-works/pi-coding-agent",
        wire_apis=tuple(_APIS),
        runtime="node 22.19",
        features=frozenset({"stream", "resume", "skills", "parallel_tools", "reasoning"}),
        notes="Has no limit of model calls and no sub-agents.",
        version_command=("{program}", f"{{root}}/{entry}", "--version"),
    )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        window = {} if context.context_length is None else {"contextWindow": context.context_length}
        provider = {
            "baseUrl": context.root_url if wire_api == "anthropic_messages" else context.base_url,
            "api": _APIS[wire_api],
            "apiKey": f"${_KEY}",
            "models": [{"id": context.model, "reasoning": True, **window}],
        }
        settings = {"httpIdleTimeoutMs": round(context.request_timeout_seconds * 1000), "enableInstallTelemetry": False}
        argv = [*self.command(installed), "--print", "--offline", "--approve", "--provider", "polar"]
        argv += ["--model", context.model]
        argv += ["--continue"] if context.resume else []
        # A message that begins with @ would be read as a file name.
        argv += ["--", f" {context.instruction}" if context.instruction.startswith("@") else context.instruction]
        files = {
            ".pi/agent/models.json": json_text({"providers": {"polar": provider}}),
            ".pi/agent/settings.json": json_text(settings),
        }
        env = {_KEY: context.api_key, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
        return LaunchPlan(argv=tuple(argv), env=env, files=files)
