"""Claude Code (https://code.claude.com): a native program that speaks Anthropic Messages."""

from __future__ import annotations

from harness_adapters.base import Connection, Endpoint, HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import RunLimit, json_text, make_launch_plan, mcp_table
from harness_adapters.toolkit.npm import NpmHarness

# It chooses other models for titles, summaries and sub-agents; all of them are set to the model that Polar serves.
_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)

# Credentials and providers that it prefers to the API key.
_OTHER_ACCOUNTS = (
    "ANTHROPIC_AUTH_TOKEN",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CODE_USE_FOUNDRY",
)


class ClaudeCode(NpmHarness):
    name = "claude-code"
    default_version = "2.1.329"
    skills_folder = ".claude/skills"
    limits = (RunLimit(1, "its turn limit", r"^Error: Reached max turns \(\d+\)\s*$"),)
    entry = "node_modules/@anthropic-ai/claude-code/bin/claude.exe"
    info = HarnessInfo(
        homepage="https://code.claude.com",
        package="npm:@anthropic-ai/claude-code",
        wire_apis=("anthropic_messages",),
        runtime="native",
        features=frozenset({"stream", "resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"}),
        notes="Exits with 1 at its turn limit too, so the adapter reads its last line.",
        summary="Anthropic's agent for the terminal",
        command="claude",
    )

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        # Otherwise it assumes 1,000,000 tokens for a model that it does not know, and says so at each start.
        window = (
            {} if endpoint.context_length is None else {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context_length)}
        )
        return Connection(
            env={
                "ANTHROPIC_BASE_URL": endpoint.root_url,
                "ANTHROPIC_API_KEY": endpoint.api_key,
                **dict.fromkeys(_MODELS, endpoint.model),
                "API_TIMEOUT_MS": str(round(endpoint.request_timeout_seconds * 1000)),
                **window,
            },
            unset=_OTHER_ACCOUNTS,
            note="Claude Code asks once whether to use the API key: answer Yes.",
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection = self.make_connection(context, wire_api)
        milliseconds = str(context.command_timeout_seconds * 1000)
        argv = [*self.command(installed), "--print", "--dangerously-skip-permissions"]
        argv += ["--max-turns", str(context.max_steps)]
        argv += ["--continue"] if context.resume else []
        files = {}
        if context.mcp_servers:
            files[".claude/mcp.json"] = json_text({"mcpServers": mcp_table(context.mcp_servers, type="http")})
            argv += ["--strict-mcp-config", f"--mcp-config={context.home}/.claude/mcp.json"]
        argv += ["--", context.instruction]
        env = {
            "BASH_DEFAULT_TIMEOUT_MS": milliseconds,
            "BASH_MAX_TIMEOUT_MS": milliseconds,
            # As root it refuses to skip permissions unless it knows that it runs in a sandbox.
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        return make_launch_plan(connection, argv, env=env, files=files)
