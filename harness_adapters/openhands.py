"""OpenHands CLI (https://github.com/OpenHands/OpenHands-CLI), headless, with its local terminal and file editor.

It uses litellm and does not stream. The model's name determines the wire API: Responses if the name contains ``gpt-5``
or ``codex-mini-latest``, Messages if it begins with ``anthropic/``, else Chat.
"""

from __future__ import annotations

import json

from harness_adapters.base import (
    Connection,
    Endpoint,
    ExitOutcome,
    HarnessError,
    HarnessInfo,
    Installation,
    LaunchContext,
    LaunchPlan,
    WireApi,
)
from harness_adapters.toolkit.adapter import json_text, make_launch_plan, mcp_table
from harness_adapters.toolkit.python_venv import LITELLM_ENV, LITELLM_UNSET, VenvHarness

# Names for which its SDK uses the Responses API.
_RESPONSES_NAMES = ("gpt-5", "codex-mini-latest")
# Every start clones skills from github.com/OpenHands into the prompt. This blocks the repositories of that owner only.
_GITCONFIG = '[url "file:///dev/null/"]\n\tinsteadOf = https://github.com/OpenHands/\n'


class OpenHands(VenvHarness):
    name = "openhands"
    default_version = "1.16.0"
    info = HarnessInfo(
        homepage="https://github.com/OpenHands/OpenHands-CLI",
        package="pypi:openhands",
        wire_apis=("openai_chat", "openai_responses", "anthropic_messages"),
        runtime="python 3.12",
        features=frozenset({"resume", "mcp", "skills", "subagents", "parallel_tools", "reasoning"}),
        notes="Exits with 0 even when it fails, so the adapter reads its events. Speaks Responses only to a model "
        "whose name contains gpt-5 or codex-mini-latest. Its first prompt contains the time to the microsecond. Has no "
        "step limit.",
        needs=("git",),
        version_command=("{root}/bin/openhands", "--version"),
        summary="The agent of OpenHands, in the terminal",
        command="openhands",
    )
    skills_folder = ".agents/skills"
    imports = "litellm, openhands_cli.entrypoint, openhands_cli.tui.textual_app"
    pythons = ("3.12",)

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        is_responses_name = any(name in endpoint.model.lower() for name in _RESPONSES_NAMES)
        if is_responses_name != (wire_api == "openai_responses") and wire_api != "anthropic_messages":
            raise HarnessError(
                f"openhands chooses its wire API by the model's name, and {endpoint.model!r} does not make it speak "
                f"{wire_api}: for Responses, serve the model under a name that contains gpt-5 or codex-mini-latest; "
                "for Chat, under a name that contains neither"
            )
        anthropic = wire_api == "anthropic_messages"
        return Connection(
            env={
                "LLM_BASE_URL": endpoint.root_url if anthropic else endpoint.base_url,
                "LLM_API_KEY": endpoint.api_key,
                "LLM_MODEL": f"{'anthropic' if anthropic else 'openai'}/{endpoint.model}",
            },
            arguments=("--override-with-envs",),
            unset=LITELLM_UNSET,
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection = self.make_connection(context, wire_api)
        argv = [str(installed.root / "bin" / "openhands"), "--headless", "--json", *connection.arguments]
        argv += ["--always-approve"]
        argv += ["--resume", "--last"] if context.resume else []
        argv += [f"--task={context.instruction}"]  # one word, because it may begin with a dash
        env = {
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "OPENHANDS_PERSISTENCE_DIR": f"{context.home}/.openhands",
            "OPENHANDS_WORK_DIR": context.workdir,
            "GIT_TERMINAL_PROMPT": "0",
            "TERM": "xterm-256color",
            # Its terminal is a tmux session if tmux is installed; two runs on one machine must not share the server.
            "TMUX_TMPDIR": context.home,
            **LITELLM_ENV,
        }
        files = {".gitconfig": _GITCONFIG}
        if context.mcp_servers:
            files[".openhands/mcp.json"] = json_text({"mcpServers": mcp_table(context.mcp_servers)})
        return make_launch_plan(connection, argv, env=env, files=files)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        if exit_code != 0:
            return super().interpret(exit_code, stdout_tail)
        # One event per line. After an error it still prints a farewell and its first prompt, and exits with 0.
        events = [line for line in stdout_tail.splitlines() if line.startswith('{"id": ')]
        last = json.loads(events[-1]) if events else {}
        if last.get("kind") == "ConversationErrorEvent":
            if last.get("code") == "MaxIterationsReached":
                return "ok", "ended by its step limit"
            return "failed", f"openhands gave up: {last.get('detail') or last.get('code')}"[:400]
        if "Agent finished" not in stdout_tail:
            return "failed", "openhands ended without reporting that it finished; see agent.log"
        return "ok", "finished"
