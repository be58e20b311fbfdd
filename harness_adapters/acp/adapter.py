"""The harness ``acp:NAME``, such as ``acp:gemini-cli``: it runs another harness over the Agent Client Protocol.

The protocol's client, `client.py`, is mounted into the sandbox, which must have Python 3.9 or newer to run the client.
The first start of the client leaves the agent running. A start with `resume` sends the user's next message to this
running agent, in the same session.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from harness_adapters.base import (
    Connection,
    Endpoint,
    ExitOutcome,
    Feature,
    HarnessAdapter,
    HarnessError,
    Installation,
    LaunchContext,
    LaunchPlan,
    McpServer,
    WireApi,
)
from harness_adapters.toolkit.adapter import ConnectableHarness, RunLimit

CLIENT = Path(__file__).with_name("client.py")
_PYTHON = "python3"


class AcpHarness(ConnectableHarness):
    """A harness whose agent is driven over the Agent Client Protocol."""

    error_prefixes = ("acp:",)
    success = "ended its turn"
    limits = (
        RunLimit(0, "its limit of model calls", r"^acp: the turn ended: max_turn_requests$"),
        RunLimit(0, "the token limit of an answer", r"^acp: the turn ended: max_tokens$"),
    )

    def __init__(self, agent: HarnessAdapter, *, name: str | None = None) -> None:
        """`name` defaults to ``acp:`` followed by the agent's name. Raises `HarnessError` if the agent is not a
        `ConnectableHarness`."""
        if not isinstance(agent, ConnectableHarness):
            raise HarnessError(f"{agent.name} cannot be driven by ACP: describe it by a TOML file with an [acp] table")
        self.agent = agent
        self.name = name or f"acp:{agent.name}"
        self.default_version = agent.default_version
        added: frozenset[Feature] = frozenset({"resume", "mcp"})
        self.info = replace(agent.info, features=agent.info.features | added, needs=(*agent.info.needs, _PYTHON))
        self.skills_folder = agent.skills_folder

    @property
    def speaks_only_acp(self) -> bool:
        return True

    @property
    def install_command(self) -> tuple[str, ...]:
        return self.agent.install_command

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        found = self.agent.install(cache_root, version)
        return replace(found, name=self.name, mounts=(*found.mounts, CLIENT))

    def is_installed(self, cache_root: Path, version: str | None = None) -> bool:
        return self.agent.is_installed(cache_root, version)

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        return self.agent.make_connection(endpoint, wire_api)

    def interpret(self, exit_code: int | None, stdout_tail: str) -> tuple[ExitOutcome, str]:
        outcome, detail = super().interpret(exit_code, stdout_tail)
        if outcome == "ok" and self.agent.interpret(0, stdout_tail)[0] == "failed":
            # ACP reports a failed model call as an ordinary message of the agent.
            return self.agent.interpret(0, stdout_tail)
        return outcome, detail

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        # The client names MCP servers and continues the session; the settings of the agent must not do so as well.
        plan = self.agent.make_acp_plan(installed, replace(context, resume=False, mcp_servers=()), wire_api)
        argv = [_PYTHON, str(CLIENT)]
        argv += ["--resume"] if context.resume else []
        argv += [f"--mcp={json.dumps([_server(server) for server in context.mcp_servers])}"]
        argv += [f"--prompt={context.instruction}", "--", *plan.argv]
        return replace(plan, argv=tuple(argv))


def _server(server: McpServer) -> dict[str, object]:
    if server.url is not None:
        return {"type": "http", "name": server.name, "url": server.url, "headers": []}
    command, *arguments = server.command
    variables = [{"name": name, "value": value} for name, value in server.env.items()]
    return {"name": server.name, "command": command, "args": arguments, "env": variables}
