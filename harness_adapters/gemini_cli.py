"""Gemini CLI (https://geminicli.com): runs on node and speaks Google GenerateContent."""

from __future__ import annotations

from harness_adapters.base import Connection, Endpoint, HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import RunLimit, make_launch_plan, mcp_table
from harness_adapters.toolkit.npm import NpmHarness

_SETTINGS = ".gemini/settings.json"


class GeminiCli(NpmHarness):
    name = "gemini-cli"
    default_version = "0.61.0"
    entry = "node_modules/@google/gemini-cli/bundle/gemini.js"
    needs_node = True
    # Without --yolo, Gemini CLI denies sub-agents over ACP, and does not ask the client for permission.
    acp_arguments = ("--acp", "--yolo")
    limits = (RunLimit(53, "its turn limit"),)
    skills_folder = ".gemini/skills"
    info = HarnessInfo(
        homepage="https://geminicli.com",
        package="npm:@google/gemini-cli",
        wire_apis=("google_generate_content",),
        runtime="node 22",
        features=frozenset({"stream", "resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"}),
        notes="A broken stream ends the run. Replaces old tool outputs when the history is large. Its requests do not "
        "show whether a sub-agent sent them. Over ACP, it cannot load a session again within the minute in which the "
        "session began. In a dialogue this does not matter: Polar keeps the agent running.",
        version_command=("{program}", f"{{root}}/{entry}", "--version"),
        summary="Google's agent for the terminal",
        command="gemini",
    )

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        settings = {
            # With a custom base URL it guesses an auth type that it then refuses (exit code 41).
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "model": _compression(endpoint.context_length),
        }
        return Connection(
            env={
                "GOOGLE_GEMINI_BASE_URL": endpoint.root_url,
                "GEMINI_API_KEY": endpoint.api_key,
                "GEMINI_CLI_HOME": endpoint.home,
            },
            # Naming the model switches off the router, which would make a call to choose one.
            arguments=(f"--model={endpoint.model}",),
            settings={_SETTINGS: settings},
            unset=("GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_GCA"),
            note="Gemini CLI asks whether to trust the folder. With --prompt it does not ask and needs --skip-trust.",
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection = self.make_connection(context, wire_api)
        argv = [*self.command(installed), "--yolo", *connection.arguments]
        argv += ["--resume=latest"] if context.resume else []
        argv += [f"--prompt={context.instruction}"]
        env = {
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            # Otherwise it starts a second process with more memory, and only forwards its exit code.
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }
        settings = {
            "model": {"maxSessionTurns": context.max_steps},
            "mcpServers": mcp_table(context.mcp_servers, type="http"),
        }
        return make_launch_plan(connection, argv, env=env, settings={_SETTINGS: settings})


def _compression(context_length: int | None) -> dict[str, float]:
    """Return the setting that makes Gemini CLI summarise the conversation when half of the model's context is used.

    The setting is a share of the context, 0.5 by default. For an unknown model, Gemini CLI assumes a context of
    1,048,576 tokens, so the share must be smaller if the real context is smaller.
    """
    return {} if context_length is None else {"compressionThreshold": min(0.5, 0.5 * context_length / 1_048_576)}
