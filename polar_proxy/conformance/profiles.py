"""The tools and habits of each harness: what a scripted model must know to give answers that the program acts on.

Everything here was found by running the real programs; a profile holds for the versions that the adapter names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from harness_adapters.acp.adapter import AcpHarness
from harness_adapters.base import HarnessAdapter, HarnessError
from harness_adapters.definitions.harness import DefinedHarness
from polar_proxy.errors import first_problem

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class HarnessProfile:
    """The tools and habits of one harness.

    In tool arguments, `{command}` is replaced by the command and `{prompt}` by a sub-agent's task.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    tool: str = "bash"
    """The tool that runs a command; a request that does not offer it is a side call."""
    arguments: Arguments = field(default_factory=lambda: {"command": "{command}"})
    finish: tuple[str, Arguments] | None = None
    """The tool call that ends a run; None if an answer without a tool call ends it."""
    start_subagent: tuple[str, Arguments] | None = None
    wait_for_subagent: tuple[str, Arguments] | None = None
    """The tool call that waits for the sub-agent, if the call that starts it returns at once. `{agent}` is the
    sub-agent's id."""
    answer_format: Literal["tools", "terminus", "aider"] = "tools"
    """How the model acts: by tool calls, or by text in the format of Terminus 2 or aider."""
    command_suffix: str = ""
    """Text to append to each command, for a harness that sometimes loses the output of a command that ends at once."""
    one_request_per_turn: bool = False
    """True if the harness asks the model only once for each message of the user."""
    max_steps: int = 40
    refusal_status: int = 401
    """An HTTP status after which the harness gives up. Some harnesses retry forever after other statuses."""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Checks that do not apply to the harness, with the reason."""
    rebuilds_history: str = ""
    """The reason why the second turn does not extend the first turn's messages. The first call of the second turn then
    has the edge `root`. Empty if the second turn extends them."""
    context_error: bool = False
    """True if the harness ignores the reported usage, and summarises only after the error that a prompt is too long."""
    context_window: int | None = None
    """The context length to configure in the harness. None: the harness assumes a length of its own. Of the checks,
    only `compaction` configures a length."""
    full_prompt_tokens: int = 2_000_000
    """Prompt length in tokens at which the harness summarises its context, but does not yet stop with an error."""
    compaction_steps: int = 4
    """Number of commands in the check `compaction`: enough to make the harness summarise its context."""
    filling_command: str = "true"
    """The command that is run `compaction_steps` times. If the harness always keeps its newest tokens, the command's
    output must be longer than the part that is kept."""
    compacts_after_turn: bool = False
    """True if the harness summarises at the end of a turn, so the summary appears in the next turn."""


_DESCRIBED = {"command": "{command}", "description": "Runs a command"}
_ONE_REQUEST = "it asks the model once for each message of the user"
_NO_TOOLS = "its model acts by text, there are no tool calls"

PROFILES: Mapping[str, HarnessProfile] = {
    profile.name: profile
    for profile in (
        HarnessProfile(
            "codex",
            tool="exec_command",
            arguments={"cmd": "{command}"},
            start_subagent=("multi_agent_v1__spawn_agent", {"message": "{prompt}"}),
            wait_for_subagent=("multi_agent_v1__wait_agent", {"targets": ["{agent}"], "timeout_ms": 20000}),
            refusal_status=400,
        ),
        HarnessProfile(
            "claude-code",
            tool="Bash",
            arguments=_DESCRIBED,
            start_subagent=(
                "Agent",
                {"description": "A small task", "prompt": "{prompt}", "subagent_type": "general-purpose"},
            ),
            refusal_status=400,
        ),
        HarnessProfile(
            "qwen-code",
            tool="run_shell_command",
            arguments={**_DESCRIBED, "is_background": False},
            start_subagent=(
                "agent",
                {"description": "A small task", "prompt": "{prompt}", "subagent_type": "general-purpose"},
            ),
            full_prompt_tokens=172_000,
            # Seen in 2 of 10 runs: `Output: (empty)`, exit code 0, for a command that had printed.
            command_suffix="; sleep 0.3",
        ),
        HarnessProfile(
            "gemini-cli",
            tool="run_shell_command",
            arguments=_DESCRIBED,
            start_subagent=("invoke_agent", {"agent_name": "generalist", "prompt": "{prompt}"}),
            context_window=40_000,
            full_prompt_tokens=30_000,
            compaction_steps=6,
            filling_command="seq 10000 15000",
            compacts_after_turn=True,
        ),
        HarnessProfile(
            "pi",
            context_window=40_000,
            full_prompt_tokens=30_000,
            filling_command="seq -s , 10000 17000",
            compacts_after_turn=True,
        ),
        HarnessProfile(
            "opencode",
            arguments=_DESCRIBED,
            start_subagent=("task", {"description": "A small task", "prompt": "{prompt}", "subagent_type": "general"}),
            full_prompt_tokens=125_000,
        ),
        HarnessProfile(
            "mini-swe-agent",
            finish=("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && {command}"}),
            not_applicable={
                "second_turn": "it keeps no conversation that could continue",
                "compaction": "it has none: it ends at its limits",
            },
        ),
        HarnessProfile(
            "openhands",
            tool="terminal",
            arguments={"command": "{command}", "security_risk": "LOW", "summary": "runs a command"},
            start_subagent=(
                "task",
                {
                    "prompt": "{prompt}",
                    "description": "A small task",
                    "subagent_type": "default",
                    "security_risk": "LOW",
                },
            ),
            compaction_steps=45,
        ),
        HarnessProfile(
            "aider",
            answer_format="aider",
            tool="",
            one_request_per_turn=True,
            rebuilds_history="it rebuilds its messages: old turns before the files, reasoning inside the answers",
            not_applicable={
                "tool_round_trip": _NO_TOOLS,
                "parallel_calls": _NO_TOOLS,
                "long_run": _ONE_REQUEST,
                "compaction": _ONE_REQUEST + ", so its history does not grow within a run",
            },
        ),
        HarnessProfile(
            "terminus-2",
            answer_format="terminus",
            tool="",
            not_applicable={
                "parallel_calls": _NO_TOOLS + "; one answer holds several commands",
                "second_turn": "it keeps no conversation that could continue",
            },
            context_error=True,
        ),
        HarnessProfile(
            "cline",
            tool="run_commands",
            arguments={"commands": ["{command}"]},
            start_subagent=("spawn_agent", {"systemPrompt": "You are a small helper.", "task": "{prompt}"}),
            context_window=40_000,
            full_prompt_tokens=39_000,
            filling_command="seq -s , 10000 17000",
        ),
        HarnessProfile("mistral-vibe", full_prompt_tokens=400_000),
    )
}


def profile_of(adapter: HarnessAdapter) -> HarnessProfile:
    """Return the profile of a harness, from its definition file if there is one. An unknown harness is assumed to have
    a tool `bash` that takes a `command`. Raises HarnessError for a wrong definition."""
    if isinstance(adapter, AcpHarness):
        return replace(profile_of(adapter.agent), name=adapter.name)
    if isinstance(adapter, DefinedHarness):
        return _read_profile(adapter.name, adapter.definition.conformance)
    return PROFILES.get(adapter.name) or HarnessProfile(adapter.name)


def _read_profile(name: str, table: Mapping[str, Any]) -> HarnessProfile:
    try:
        return TypeAdapter(HarnessProfile).validate_python({"name": name, **table})
    except ValidationError as error:
        raise HarnessError(f"{name}: [conformance] {first_problem(error)}") from None
