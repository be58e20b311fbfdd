"""mini-swe-agent (https://mini-swe-agent.com), version 2, with its own `mini.yaml` and its bash tool.

It speaks Chat Completions or Responses through litellm and does not stream. The whole program runs inside the sandbox,
and executes its commands there itself.
"""

from __future__ import annotations

from harness_adapters.base import Connection, Endpoint, HarnessInfo, Installation, LaunchContext, LaunchPlan, WireApi
from harness_adapters.toolkit.adapter import RunLimit, make_launch_plan
from harness_adapters.toolkit.python_venv import LITELLM_ENV, LITELLM_UNSET, VenvHarness


class MiniSweAgent(VenvHarness):
    name = "mini-swe-agent"
    default_version = "2.4.6"
    info = HarnessInfo(
        homepage="https://mini-swe-agent.com",
        package="pypi:mini-swe-agent",
        wire_apis=("openai_chat", "openai_responses"),
        runtime="python 3.11 or newer",
        features=frozenset({"parallel_tools", "reasoning"}),
        notes="Exits with 0 even when it gives up, so the adapter reads its last message.",
        needs=("bash",),
        summary="The agent of SWE-bench's authors, with one tool: bash",
        command="mini",
        version_command=(
            "{program}",
            "-c",
            "import importlib.metadata as m; print('mini-swe-agent', m.version('mini-swe-agent'))",
        ),
    )
    success = "submitted"
    # mini exits with 0 when it gives up, too; its last message is then the reason instead of a submission.
    limits = tuple(
        RunLimit(0, reason, rf"^Exit:\s*\n{reason}\s*$")
        for reason in ("LimitsExceeded", "TimeExceeded", "RepeatedFormatError")
    )
    imports = "litellm, minisweagent.run.mini, minisweagent.models.litellm_model"
    # litellm fails to import without mcp, and mini then retries silently for minutes.
    extra_requirements = ("mcp",)

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        return Connection(
            env={
                "OPENAI_API_BASE": endpoint.base_url,
                "OPENAI_API_KEY": endpoint.api_key,
                # Without it, its first start asks for a model and a key.
                "MSWEA_CONFIGURED": "true",
                # The model has no price.
                "MSWEA_COST_TRACKING": "ignore_errors",
            },
            arguments=("--model", f"openai/{endpoint.model}"),
            unset=LITELLM_UNSET,
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection = self.make_connection(context, wire_api)
        settings: dict[str, object] = {
            "agent.step_limit": context.max_steps,
            # The model has no price; 0 disables the limit.
            "agent.cost_limit": 0,
            "environment.timeout": context.command_timeout_seconds,
            # Arguments of litellm, which are not sent. mini retries around the SDK's own retries; one loop is enough.
            "model.model_kwargs.timeout": context.request_timeout_seconds,
            "model.model_kwargs.max_retries": 0,
        }
        if wire_api == "openai_responses":
            settings["model.model_class"] = "litellm_response"
        argv = [str(installed.program), "-m", "minisweagent.run.mini"]
        argv += [*connection.arguments, "--yolo", "--exit-immediately"]
        argv += ["--task", context.instruction, "--output", f"{context.home}/trajectory.json"]
        argv += ["--config", "mini.yaml"]
        for key, value in settings.items():
            argv += ["--config", f"{key}={value}"]
        env = {
            "MSWEA_GLOBAL_CONFIG_DIR": f"{context.home}/.config/mini-swe-agent",
            "MSWEA_SILENT_STARTUP": "1",
            # The default is ten attempts with waits of up to a minute; a dead endpoint should end the run.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            **LITELLM_ENV,
        }
        return make_launch_plan(connection, argv, env=env)
