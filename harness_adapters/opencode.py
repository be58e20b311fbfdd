"""opencode (https://opencode.ai): a native program that speaks Chat Completions, Responses or Anthropic Messages."""

from __future__ import annotations

from harness_adapters.base import (
    Connection,
    Endpoint,
    HarnessInfo,
    Installation,
    LaunchContext,
    LaunchPlan,
    McpServer,
    WireApi,
)
from harness_adapters.toolkit.adapter import SESSION_KEY, json_text, make_launch_plan
from harness_adapters.toolkit.npm import NpmHarness

_SETTINGS = ".config/opencode/opencode.json"
# The instruction comes on stdin: an argument that contains spaces would reach the model in quotes.
_INSTRUCTION = ".config/opencode/instruction.txt"
# Built-in client libraries; the Anthropic one appends /messages to the same base URL.
_LIBRARIES: dict[WireApi, str] = {
    "openai_chat": "@ai-sdk/openai-compatible",
    "openai_responses": "@ai-sdk/openai",
    "anthropic_messages": "@ai-sdk/anthropic",
}


class OpenCode(NpmHarness):
    name = "opencode"
    default_version = "1.18.33"
    skills_folder = ".config/opencode/skills"
    acp_arguments = ("acp",)
    entry = "node_modules/opencode-ai/bin/opencode.exe"
    info = HarnessInfo(
        homepage="https://opencode.ai",
        package="npm:opencode-ai",
        wire_apis=tuple(_LIBRARIES),
        runtime="native",
        features=frozenset({"stream", "resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"}),
        notes="Accepts a truncated answer whose stream ended cleanly. Offers a different set of tools to gpt models.",
        summary="Open-source agent for the terminal, for many providers",
        command="opencode",
    )

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        model = f"polar/{endpoint.model}"
        provider = {
            "npm": _LIBRARIES[wire_api],
            "options": {
                "baseURL": endpoint.base_url,
                "apiKey": f"{{env:{SESSION_KEY}}}",
                "timeout": round(endpoint.request_timeout_seconds * 1000),
            },
            "models": {
                endpoint.model: {
                    "reasoning": True,
                    "tool_call": True,
                    "limit": {"context": endpoint.context_length or 128_000, "output": 8192},
                }
            },
        }
        settings = {
            "model": model,
            "small_model": model,
            "provider": {"polar": provider},
            "autoupdate": False,
            "share": "disabled",
        }
        return Connection(
            env={SESSION_KEY: endpoint.api_key, "OPENCODE_CONFIG": f"{endpoint.home}/{_SETTINGS}"},
            settings={_SETTINGS: settings},
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        settings = {
            "permission": {"*": "allow"},
            "agent": {"build": {"steps": context.max_steps}},
            "mcp": {server.name: _mcp(server) for server in context.mcp_servers},
        }
        argv = ["/bin/sh", "-c", f'exec "$0" "$@" < "$HOME/{_INSTRUCTION}"', *self.command(installed), "run", "--auto"]
        # A given title saves the model call that would find one.
        argv += ["--continue"] if context.resume else ["--title", "task"]
        files = {_INSTRUCTION: context.instruction, **_installed_plugin(self.default_version)}
        env = {
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }
        connection = self.make_connection(context, wire_api)
        return make_launch_plan(connection, argv, env=env, settings={_SETTINGS: settings}, files=files)


def _installed_plugin(version: str) -> dict[str, str]:
    """Return files that make opencode treat its plugin library as installed. Only plugins need this library. Without
    the files, every start in a new HOME requests the library from the npm registry, which is unreachable from a
    sandbox."""
    lock = {"lockfileVersion": 3, "packages": {"": {"dependencies": {"@opencode-ai/plugin": version}}}}
    return {
        ".config/opencode/package-lock.json": json_text(lock),
        ".config/opencode/node_modules/.package-lock.json": json_text({"lockfileVersion": 3, "packages": {}}),
    }


def _mcp(server: McpServer) -> dict[str, object]:
    if server.url is not None:
        return {"type": "remote", "url": server.url}
    return {"type": "local", "command": list(server.command), "environment": dict(server.env)}
