"""mini-swe-agent (https://mini-swe-agent.com), version 2, with its own `mini.yaml` and its bash tool.

It speaks Chat Completions or Responses through litellm, does not stream, and sends little beyond the conversation,
the model and the tool.
The whole program runs inside the sandbox with its local environment.
"""

from __future__ import annotations

import re

from harness_adapters.base import ExitOutcome, HarnessInfo, Installation, LaunchContext, LaunchPlan, require_supported
from harness_adapters.toolkit import litellm
from harness_adapters.toolkit.python_venv import VenvHarness

# How mini ends a run of its own accord, as its last message prints it.
_ENDS = ("LimitsExceeded", "TimeExceeded", "RepeatedFormatError")


class MiniSweAgent(VenvHarness):
    """Adapter of mini-swe-agent."""

    name = "mini-swe-agent"
    default_version = "2.4.6"
    facts = HarnessInfo(
        homepage="https://mini-swe-agent.com",
        package="pypi:mini-swe-agent",
        tested_versions=("2.4.6", "2.4.6"),
        wire_apis=("openai_chat", "openai_responses"),
        runtime="python 3.11 or newer",
        features=frozenset({"parallel_tools", "reasoning"}),
        notes="Exits with 0 when it gives up as well; the adapter reads its last message.",
        needs=("bash",),
        version_command=(
            "{program}",
            "-c",
            "import importlib.metadata as m; print('mini-swe-agent', m.version('mini-swe-agent'))",
        ),
    )
    imports = "litellm, minisweagent.run.mini, minisweagent.models.litellm_model"
    # litellm fails to import without mcp, and mini then retries silently for minutes.
    also = ("mcp",)

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        wire_api = require_supported(self.name, self.facts, context)
        settings: dict[str, object] = {
            "agent.step_limit": context.max_steps,
            # No prices are known for a model of one's own; 0 switches the limit off.
            "agent.cost_limit": 0,
            "environment.timeout": context.command_timeout_seconds,
            # Arguments of litellm, which never reach the request body. mini has a retry loop of its own
            # around the SDK's; one of them is enough.
            "model.model_kwargs.timeout": context.request_timeout_seconds,
            "model.model_kwargs.max_retries": 0,
        }
        if wire_api == "openai_responses":
            settings["model.model_class"] = "litellm_response"
        argv = [str(installed.program), "-m", "minisweagent.run.mini"]
        argv += ["--model", f"openai/{context.model}", "--yolo", "--exit-immediately"]
        argv += ["--task", context.instruction, "--output", f"{context.home}/trajectory.json"]
        argv += ["--config", "mini.yaml"]
        for key, value in settings.items():
            argv += ["--config", f"{key}={value}"]
        env = {
            "HOME": context.home,
            "OPENAI_API_BASE": context.base_url,
            "OPENAI_API_KEY": context.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{context.home}/.config/mini-swe-agent",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            # Ten tries with waits up to a minute are the default; a dead endpoint should end the run.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            **litellm.LITELLM_ENV,
        }
        return LaunchPlan(argv=tuple(argv), env=env, mounts=installed.mounts)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        if exit_code is None:
            return "timed_out", "mini-swe-agent was stopped by the clock"
        if exit_code != 0:
            lines = [line.strip() for line in stdout_tail.splitlines() if line.strip(" │╭╮╰╯─")]
            last = lines[-1][:400] if lines else "no output"
            return "failed", f"mini-swe-agent exited with {exit_code}: {last}"
        # mini exits 0 as well when it gives up; its last message is then the reason instead of a submission.
        ended = re.search(rf"^Exit:\s*\n({'|'.join(_ENDS)})\s*$", stdout_tail, re.MULTILINE)
        return "ok", f"ended by {ended[1]}" if ended else "submitted"
