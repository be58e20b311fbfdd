"""The real npm harnesses, installed by their adapters, against the real gateway with the scripted engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness_adapters.base import HarnessAdapter, Installation, McpServer, Skill, WireApi, get_adapter
from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, ChatRequest, EngineRequest, ToolCall
from tests.conftest import Serve
from tests.harness_adapters import real_runs

# Several starts of large programs on a busy machine.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class AgentTools:
    """The tool by which the model of a harness runs a command."""

    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)
    command: str = "command"
    as_list: bool = False

    def call(self, command: str) -> ToolCall:
        value: object = [command] if self.as_list else command
        return real_runs.call(self.tool, json.dumps({self.command: value, **self.arguments}), number=len(command))


_DESCRIBED = {"description": "Runs a command"}
AGENT_TOOLS = {
    "claude-code": AgentTools("Bash", _DESCRIBED),
    "cline": AgentTools("run_commands", command="commands", as_list=True),
    "codex": AgentTools("exec_command", command="cmd"),
    "gemini-cli": AgentTools("run_shell_command", _DESCRIBED),
    "opencode": AgentTools("bash", _DESCRIBED),
    "pi": AgentTools("bash"),
    "qwen-code": AgentTools("run_shell_command", {**_DESCRIBED, "is_background": False}),
}
WIRES: list[tuple[str, WireApi]] = [(name, api) for name in AGENT_TOOLS for api in get_adapter(name).info.wire_apis]
SKILL = Skill("say-hello", "---\nname: say-hello\ndescription: Says hello in a quaint way.\n---\nSay hello.\n")
# A server of the Model Context Protocol with one tool.
SERVER = """
import json, pathlib, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    result = {}
    if message["method"] == "initialize":
        version = message["params"]["protocolVersion"]
        info = {"name": "tester", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif message["method"] == "tools/list":
        schema = {"type": "object", "properties": {}}
        result = {"tools": [{"name": "quaint_tool", "description": "Is quaint.", "inputSchema": schema}]}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
    if message["method"] == "tools/list":
        pathlib.Path(sys.argv[1]).touch()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Installation]:
    """Installations by name, filled by the tests, so that one harness can be tested without the others."""
    return {}


def ready(
    name: str, installed: dict[str, Installation], factory: pytest.TempPathFactory
) -> tuple[HarnessAdapter, Installation]:
    adapter = get_adapter(name)
    if name not in installed:
        installed[name] = real_runs.install(adapter, factory)
    return adapter, installed[name]


def script(shell: AgentTools, *replies: ScriptedAnswer) -> Any:
    """Return a script with `replies` for the conversation. A request that does not offer the shell is a side call."""
    play = real_runs.play(*replies)

    def answer(request: EngineRequest) -> ScriptedAnswer:
        assert isinstance(request, ChatRequest)
        return play(request) if offers(request, shell.tool) else "A side answer."

    return answer


def offers(request: ChatRequest, tool: str) -> bool:
    return f'"{tool}"' in json.dumps(list(request.tools or ()))


def main(calls: list[CallRecord], tool: str) -> list[str]:
    """Return the requests of the main conversation as JSON texts: messages, tools and parameters."""
    return [
        "\n".join((b"\n".join(call.messages).decode(), (call.tools or b"").decode(), json.dumps(call.params)))
        for call in calls
        if f'"{tool}"'.encode() in (call.tools or b"")
    ]


@pytest.mark.parametrize(("name", "wire_api"), WIRES)
async def test_run_and_second_turn(
    name: str,
    wire_api: WireApi,
    installed: dict[str, Installation],
    tmp_path_factory: pytest.TempPathFactory,
    serve: Serve,
    store: Store,
    tmp_path: Path,
) -> None:
    adapter, harness = ready(name, installed, tmp_path_factory)
    shell = AGENT_TOOLS[name]
    # The sleep: on a busy machine qwen-code may miss the output of a command that ends at once.
    replies = [shell.call("pwd > where.txt; rev a.txt; sleep 1"), "All done.", "Still done."]
    async with serve(ScriptedEngine(script(shell, *replies))) as gateway:
        ran = await real_runs.run(adapter, harness, gateway, store, tmp_path, wire_api=wire_api)
        assert adapter.interpret(ran.exit_code, ran.output) == ("ok", "finished"), ran.output[-3000:]
        assert (ran.workdir / "where.txt").read_text() == f"{ran.workdir}\n"
        requests = main(ran.calls, shell.tool)
        assert len(requests) == 2
        assert json.dumps(real_runs.INSTRUCTION)[1:-1] in requests[0]
        assert "olleh" in requests[1], "the model does not see the output of its command"
        assert all(call.stream for call in ran.calls)
        assert real_runs.KEY not in ran.output
        if "resume" in adapter.info.features:
            again = await real_runs.run(
                adapter, harness, gateway, store, tmp_path, wire_api=wire_api, resume=True, instruction="And now?"
            )
            assert adapter.interpret(again.exit_code, again.output) == ("ok", "finished"), again.output[-3000:]
            last = main(again.calls, shell.tool)[-1]
            assert "And now?" in last
            assert "All done." in last


@pytest.mark.parametrize("name", ["claude-code", "gemini-cli", "qwen-code"])
async def test_step_limit_ends_a_run(
    name: str,
    installed: dict[str, Installation],
    tmp_path_factory: pytest.TempPathFactory,
    serve: Serve,
    store: Store,
    tmp_path: Path,
) -> None:
    adapter, harness = ready(name, installed, tmp_path_factory)
    shell = AGENT_TOOLS[name]
    replies = [shell.call(f"echo {number}") for number in range(9)]
    async with serve(ScriptedEngine(script(shell, *replies))) as gateway:
        ran = await real_runs.run(adapter, harness, gateway, store, tmp_path, max_steps=3)
    assert adapter.interpret(ran.exit_code, ran.output) == ("ok", "ended by its turn limit"), ran.output[-3000:]
    assert len(main(ran.calls, shell.tool)) == 3


@pytest.mark.parametrize("name", sorted(AGENT_TOOLS))
async def test_skills_and_mcp_servers_reach_the_model(
    name: str,
    installed: dict[str, Installation],
    tmp_path_factory: pytest.TempPathFactory,
    serve: Serve,
    store: Store,
    tmp_path: Path,
) -> None:
    adapter, harness = ready(name, installed, tmp_path_factory)
    shell = AGENT_TOOLS[name]
    listed = tmp_path / "listed"
    server = McpServer("tester", ("python3", "-c", SERVER, str(listed)))
    servers = (server,) if "mcp" in adapter.info.features else ()
    # The tools of a server may arrive shortly after the first request.
    wait = (
        f"for i in $(seq 900); do if [ -e {listed} ]; then break; fi; sleep 0.1; done; sleep 1" if servers else "true"
    )
    async with serve(ScriptedEngine(script(shell, shell.call(wait), "All done."))) as gateway:
        ran = await real_runs.run(adapter, harness, gateway, store, tmp_path, skills=(SKILL,), mcp_servers=servers)
    assert adapter.interpret(ran.exit_code, ran.output) == ("ok", "finished"), ran.output[-3000:]
    last = main(ran.calls, shell.tool)[-1]
    # Cline sends the name only, the others also the description.
    assert SKILL.name in last
    if servers:
        assert "quaint_tool" in last
