"""Terminus 2, the agent of Harbor and Terminal-Bench (https://harborframework.com).

It has no tools: the model answers with JSON that names the keys to type into a tmux terminal. Harbor has no command
that runs the agent alone, so `terminus_2_runner.py`, which the sandbox mounts, runs harbor's own class.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

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
from harness_adapters.toolkit.adapter import RunLimit, make_launch_plan
from harness_adapters.toolkit.python_venv import LITELLM_ENV, LITELLM_UNSET, VenvHarness

RUNNER = Path(__file__).with_name("terminus_2_runner.py")


class Terminus2(VenvHarness):
    name = "terminus-2"
    default_version = "0.24.0"
    info = HarnessInfo(
        homepage="https://github.com/harbor-framework/harbor",
        package="pypi:harbor",
        wire_apis=("openai_chat", "openai_responses"),
        runtime="python 3.12 or 3.13",
        features=frozenset({"mcp", "skills"}),
        notes="The version is harbor's. The prompt tells the agent which MCP servers and skills there are. "
        "The harness harness_adapters.terminus_2:Terminus2RolloutDetails also requests token ids and "
        "log-probabilities.",
        needs=("tmux", "bash"),
        version_command=("{program}", "-c", "import importlib.metadata as m; print('harbor', m.version('harbor'))"),
        summary="Terminal-Bench's agent, which harbor starts on harbor's own tasks",
        command="harbor",
    )
    success = "declared the task complete"
    limits = (RunLimit(0, "its turn limit", r"^terminus-2 ended after .*: out of turns$"),)
    skills_folder = "skills"
    imports = "litellm, harbor.agents.terminus_2.terminus_2"
    # litellm fails to import without mcp.
    extra_requirements = ("mcp",)
    pythons = ("3.12", "3.13")
    rollout_details = False
    """Whether to request `logprobs` and `return_token_ids`, and to send a session id, as harbor does for training."""

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        found = super().install(cache_root, version)
        return replace(found, mounts=(*found.mounts, RUNNER))

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        return Connection(
            env={"OPENAI_API_KEY": endpoint.api_key},
            arguments=(
                *("run", "--agent", "terminus-2", "--model", f"openai/{endpoint.model}"),
                *("--agent-kwarg", f"api_base={endpoint.base_url}"),
            ),
            unset=LITELLM_UNSET,
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        connection = self.make_connection(context, wire_api)
        argv = [str(installed.program), str(RUNNER)]
        argv += ["--model", f"openai/{context.model}", "--api-base", context.base_url]
        argv += ["--max-turns", str(context.max_steps), "--request-timeout", str(context.request_timeout_seconds)]
        argv += ["--logs", f"{context.home}/terminus-2"]
        if wire_api == "openai_responses":
            argv += ["--responses"]
        if self.rollout_details:
            # One run has one key. The hash does not reveal it.
            session = hashlib.sha256(context.api_key.encode()).hexdigest()[:16]
            argv += ["--rollout-details", "--session-id", session]
        if context.mcp_servers:
            argv += ["--mcp", json.dumps([_server(server) for server in context.mcp_servers])]
        if context.skills:
            argv += ["--skills-dir", f"{context.home}/{self.skills_folder}"]
        argv += ["--", context.instruction]
        return make_launch_plan(connection, argv, env={"HARBOR_TELEMETRY": "0", **LITELLM_ENV})


class Terminus2RolloutDetails(Terminus2):
    """Terminus 2 with the options that harbor uses to collect training data."""

    rollout_details = True


def _server(server: McpServer) -> dict[str, object]:
    if server.url is not None:
        return {"name": server.name, "transport": "streamable-http", "url": server.url}
    command, *arguments = server.command
    return {"name": server.name, "transport": "stdio", "command": command, "args": arguments}
