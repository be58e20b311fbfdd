"""The real npm harnesses, installed by their adapters, against the real gateway with the scripted engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness_adapters import HarnessAdapter, Installation, McpServer, Skill, get_adapter
from harness_adapters.base import WireApi
from polar_proxy.store import Store
from polar_proxy.types import CallRecord, ChatRequest, EngineRequest, ToolCall
from tests.conftest import Serve
from tests.fakes.scripted_engine import Reply, ScriptedEngine
from tests.harness_adapters import real_runs

# Several starts of programs of some hundred megabytes, on a machine that may be busy.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class AgentTools:
    """How a model runs a command with a harness's own tool."""

    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)
    command: str = "command"
    as_list: bool = False

    def call(self, command: str) -> ToolCall:
        value: object = [command] if self.as_list else command
        return real_runs.call(self.tool, json.dumps({self.command: value, **self.arguments}), number=len(command))


_DESCRIBED = {"description": "Runs a command"}
HANDS = {
    "claude-code": AgentTools("Bash", _DESCRIBED),
    "cline": AgentTools("run_commands", command="commands", as_list=True),
    "codex": AgentTools("exec_command", command="cmd"),
    "gemini-cli": AgentTools("run_shell_command", _DESCRIBED),
    "opencode": AgentTools("bash", _DESCRIBED),
    "pi": AgentTools("bash"),
    "qwen-code": AgentTools("run_shell_command", {**_DESCRIBED, "is_background": False}),
}
WIRES: list[tuple[str, WireApi]] = [(name, api) for name in HANDS for api in get_adapter(name).facts.wire_apis]
SKILL = Skill("say-hello", "---\nname: say-hello\ndescription: Says hello in a quaint way.\n---\nSay hello.\n")
# A server with one tool, in the words of the Model Context Protocol.
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
    """Filled as the tests go, so that one harness can be tested without installing the others."""
    return {}


def ready(
    name: str, installed: dict[str, Installation], factory: pytest.TempPathFactory
) -> tuple[HarnessAdapter, Installation]:
    adapter = get_adapter(name)
    if name not in installed:
        installed[name] = real_runs.install(adapter, factory)
    return adapter, installed[name]


def script(hand: AgentTools, *replies: Reply) -> Any:
    """`replies` for the conversation; a request that does not offer the shell is a side call."""
    play = real_runs.play(*replies)

    def answer(request: EngineRequest) -> Reply:
        assert isinstance(request, ChatRequest)
        return play(request) if offers(request, hand.tool) else "A side answer."

    return answer


def offers(request: ChatRequest, tool: str) -> bool:
    return f'"{tool}"' in json.dumps(list(request.tools or ()))


def main(calls: list[CallRecord], tool: str) -> list[str]:
    """What the requests of the main conversation said, all of it, as JSON texts one after the other."""
    return [
        "\n".join((b"\n".join(call.messages).decode(), (call.tools or b"").decode(), json.dumps(call.params)))
        for call in calls
        if f'"{tool}"'.encode() in (call.tools or b"")
    ]


@pytest.mark.parametrize(("name", "wire_api"), WIRES)
async def test_a_run_and_a_second_turn(
    name: str,
    wire_api: WireApi,
    installed: dict[str, Installation],
    tmp_path_factory: pytest.TempPathFactory,
    serve: Serve,
    store: Store,
    tmp_path: Path,
) -> None:
    adapter, harness = ready(name, installed, tmp_path_factory)
    hand = HANDS[name]
    # Seen once on a busy machine: qwen-code had read nothing of a command that ended as soon as it had printed.
    replies = [hand.call("pwd > where.txt; rev a.txt; sleep 1"), "All done.", "Still done."]
    async with serve(ScriptedEngine(script(hand, *replies))) as gateway:
        ran = await real_runs.run(adapter, harness, gateway, store, tmp_path, wire_api=wire_api)
        assert adapter.interpret(ran.exit_code, ran.output) == ("ok", "finished"), ran.output[-3000:]
        assert (ran.workdir / "where.txt").read_text() == f"{ran.workdir}\n"
        requests = main(ran.calls, hand.tool)
        assert len(requests) == 2
        assert json.dumps(real_runs.INSTRUCTION)[1:-1] in requests[0]
        assert "olleh" in requests[1], "the model does not see what its command printed"
        assert all(call.stream for call in ran.calls)
        assert real_runs.KEY not in ran.output
        if "resume" in adapter.facts.features:
            again = await real_runs.run(
                adapter, harness, gateway, store, tmp_path, wire_api=wire_api, resume=True, instruction="And now?"
            )
            assert adapter.interpret(again.exit_code, again.output) == ("ok", "finished"), again.output[-3000:]
            last = main(again.calls, hand.tool)[-1]
            assert "And now?" in last
            assert "All done." in last


@pytest.mark.parametrize("name", ["claude-code", "gemini-cli", "qwen-code"])
async def test_the_step_limit_ends_a_run(
    name: str,
    installed: dict[str, Installation],
    tmp_path_factory: pytest.TempPathFactory,
    serve: Serve,
    store: Store,
    tmp_path: Path,
) -> None:
    adapter, harness = ready(name, installed, tmp_path_factory)
    hand = HANDS[name]
    replies = [hand.call(f"echo {number}") for number in range(9)]
    async with serve(ScriptedEngine(script(hand, *replies))) as gateway:
        ran = await real_runs.run(adapter, harness, gateway, store, tmp_path, max_steps=3)
    assert adapter.interpret(ran.exit_code, ran.output) == ("ok", "ended by its turn limit"), ran.output[-3000:]
    assert len(main(ran.calls, hand.tool)) == 3


@pytest.mark.parametrize("name", sorted(HANDS))
async def test_skills_and_mcp_servers_reach_the_model(
    name: str,
    installed: dict[str, Installation],
    tmp_path_factory: pytest.TempPathFactory,
    serve: Serve,
    store: Store,
    tmp_path: Path,
) -> None:
    adapter, harness = ready(name, installed, tmp_path_factory)
    hand = HANDS[name]
    told = tmp_path / "told"
    server = McpServer("tester", ("python3", "-c", SERVER, str(told)))
    servers = (server,) if "mcp" in adapter.facts.features else ()
    # The tools of a server may come a moment after the first request.
    wait = f"for i in $(seq 900); do if [ -e {told} ]; then break; fi; sleep 0.1; done; sleep 1" if servers else "true"
    async with serve(ScriptedEngine(script(hand, hand.call(wait), "All done."))) as gateway:
        ran = await real_runs.run(adapter, harness, gateway, store, tmp_path, skills=(SKILL,), mcp_servers=servers)
    assert adapter.interpret(ran.exit_code, ran.output) == ("ok", "finished"), ran.output[-3000:]
    last = main(ran.calls, hand.tool)[-1]
    # Cline tells the name only, the others the description as well.
    assert SKILL.name in last
    if servers:
        assert "quaint_tool" in last
