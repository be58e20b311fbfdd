"""Qwen Code (https://github.com/QwenLM/qwen-code): runs on node and speaks Chat Completions."""

from __future__ import annotations

from harness_adapters.base import Connection, Endpoint, HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import RunLimit, make_launch_plan, mcp_table
from harness_adapters.toolkit.npm import NpmHarness

_SETTINGS = ".qwen/settings.json"


class QwenCode(NpmHarness):
    name = "qwen-code"
    default_version = "0.24.4"
    entry = "node_modules/@qwen-code/qwen-code/cli-entry.js"
    needs_node = True
    acp_arguments = ("--acp", "--yolo")
    limits = (RunLimit(53, "its turn limit"), RunLimit(55, "its budget"))
    skills_folder = ".qwen/skills"
    info = HarnessInfo(
        homepage="https://github.com/QwenLM/qwen-code",
        package="npm:@qwen-code/qwen-code",
        wire_apis=("openai_chat",),
        runtime="node 22",
        features=frozenset({"stream", "resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"}),
        notes="Its requests do not show whether a sub-agent sent them. With `polar connect` it may run an agent that "
        "extracts memories.",
        version_command=("{program}", f"{{root}}/{entry}", "--version"),
        summary="Qwen's agent for the terminal",
        command="qwen",
    )

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        settings = {
            "security": {"auth": {"selectedType": "openai"}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "model": {"generationConfig": {"timeout": round(endpoint.request_timeout_seconds * 1000)}},
        }
        return Connection(
            env={
                "OPENAI_BASE_URL": endpoint.base_url,
                "OPENAI_API_KEY": endpoint.api_key,
                "OPENAI_MODEL": endpoint.model,
                "QWEN_HOME": f"{endpoint.home}/.qwen",
            },
            settings={_SETTINGS: settings},
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        argv = [*self.command(installed), "--yolo", "--max-session-turns", str(context.max_steps)]
        argv += ["--continue"] if context.resume else []
        argv += [f"--prompt={context.instruction}"]
        # Otherwise it starts a second process with more memory, and only forwards its exit code.
        env = {"QWEN_CODE_NO_RELAUNCH": "true"}
        settings = {
            # Otherwise it makes further model calls after a turn (with ACP, and after a resumed turn): they extract
            # memories, and guess the user's next message.
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "ui": {"enableFollowupSuggestions": False},
            "mcpServers": mcp_table(context.mcp_servers, "httpUrl"),
        }
        return make_launch_plan(self.make_connection(context, wire_api), argv, env=env, settings={_SETTINGS: settings})
