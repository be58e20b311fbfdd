"""Gemini CLI (https://geminicli.com): runs on node and speaks Google GenerateContent."""

from __future__ import annotations

from typing import ClassVar

from harness_adapters.base import HarnessInfo, Installation, LaunchContext, LaunchPlan, require_supported
from harness_adapters.toolkit.config_files import json_text, mcp_table, skill_files
from harness_adapters.toolkit.npm import NpmHarness


class GeminiCli(NpmHarness):
    """Adapter of Gemini CLI."""

    name = "gemini-cli"
    default_version = "0.61.0"
    entry = "node_modules/@google/gemini-cli/bundle/gemini.js"
    needs_node = True
    limit_exit_codes: ClassVar = {53: "its turn limit"}
    facts = HarnessInfo(
        homepage="https://geminicli.com",
        package="npm:@google/gemini-cli",
        tested_versions=("0.61.0", "0.61.0"),
        wire_apis=("google_generate_content",),
        runtime="node 22",
        features=frozenset({"stream", "resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"}),
        notes="A stream that breaks off ends the run. Old tool outputs are masked once the history is big. "
        "Sub-agents are not marked.",
        version_command=("{program}", f"{{root}}/{entry}", "--version"),
    )

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        require_supported(self.name, self.facts, context)
        settings = {
            # With a base URL of one's own it guesses an auth type that it then refuses (exit code 41).
            "security": {"auth": {"selectedType": "gemini-api-key"}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "model": {"maxSessionTurns": context.max_steps, **_compression(context.context_length)},
            "mcpServers": mcp_table(context.mcp_servers, type="http"),
        }
        # A model that is named is used for the main conversation as it is: no router asks another one first.
        argv = [*self.command(installed), "--yolo", f"--model={context.model}"]
        argv += ["--resume=latest"] if context.resume else []
        argv += [f"--prompt={context.instruction}"]
        files = {".gemini/settings.json": json_text(settings), **skill_files(".gemini/skills", context.skills)}
        env = {
            "HOME": context.home,
            "GOOGLE_GEMINI_BASE_URL": context.root_url,
            "GEMINI_API_KEY": context.api_key,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            # Otherwise a first process starts a second one with more memory, and only passes its exit on.
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }
        return LaunchPlan(argv=tuple(argv), env=env, files=files, mounts=installed.mounts)


def _compression(context_length: int | None) -> dict[str, float]:
    """It takes every model it does not know for one of 1,048,576 tokens, and summarises at a share of that: half."""
    return {} if context_length is None else {"compressionThreshold": min(0.5, 0.5 * context_length / 1_048_576)}
