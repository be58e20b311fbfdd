"""What a model has to say to each harness so that it does something: tool names and argument shapes, as data.

Everything here was found by running the real programs; a profile is for the versions which its adapter names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polar_proxy.conformance.scenarios import Finish, RunCommands, StartSubagent, Step, WaitForSubagent
from polar_proxy.engines.scripted import Reply
from polar_proxy.types import ToolCall, new_id

Arguments = Mapping[str, Any]
Speak = Callable[["HarnessProfile", Step, str, str], Reply]


@dataclass(frozen=True)
class HarnessProfile:
    """One harness. `{command}` in arguments is the command, `{prompt}` the sub-agent's task."""

    name: str
    tool: str = "bash"
    """Runs a command; a request that does not offer it is a side call."""
    arguments: Arguments = field(default_factory=lambda: {"command": "{command}"})
    finish: tuple[str, Arguments] | None = None
    """Tool call that ends a run; None: a text does."""
    delegate: tuple[str, Arguments] | None = None
    wait: tuple[str, Arguments] | None = None
    """Waits for the sub-agent, where `delegate` does not; `{agent}` is the id that starting it gave."""
    speak: Speak | None = None
    """Says a step, for a harness whose model acts by text."""
    lingers: str = ""
    """Put behind each command, for a harness that now and then loses the output of one that ends at once."""
    one_answer: bool = False
    """It asks the model once for each message of the user."""
    max_steps: int = 40
    refusal: int = 401
    """Status at which it gives up rather than trying for ever."""
    model: str = "scripted-model"
    missing: Mapping[str, str] = field(default_factory=dict)
    """Checks that it cannot have, with the reason."""
    rebuilds: str = ""
    """Why the second turn does not extend the first one's messages, so that it is a `root`."""
    context_error: bool = False
    """It summarises when the endpoint says that the prompt is too long, and not by the usage that it is told."""
    window: int | None = None
    """Tokens that it is told the model reads; None: what it takes for granted."""
    full: int = 2_000_000
    """Tokens of a prompt at which its context is full, and not so full that it gives up."""
    compaction_steps: int = 4
    """Commands after which it has summarised."""
    fills_with: str = "true"
    """Command of those steps: a harness that keeps the newest tokens needs more than that to have anything to do."""
    compacts_at_end: bool = False
    """It summarises at the end of a turn: what comes of it is seen in the next."""


def say(profile: HarnessProfile, step: Step, tag: str, child: str, agent: str = "") -> Reply:
    """The answer that takes `step`. `tag` stands in it, so that later requests tell how far the run is. `child` marks
    the task of a sub-agent, `agent` is the id of the one that was started."""
    if profile.speak is not None:
        return profile.speak(profile, step, tag, child)
    thought = f"I thought of thought-{tag}."
    if isinstance(step, RunCommands):
        commands = [_telling(tag, number, text) + profile.lingers for number, text in enumerate(step.commands)]
        calls = [(profile.tool, _fill(profile.arguments, command=command)) for command in commands]
        return Reply(reasoning=thought, calls=_calls(calls))
    if isinstance(step, StartSubagent) and profile.delegate is not None:
        name, arguments = profile.delegate
        prompt = f"{child}: run one command in a shell, then say what it printed. ({tag})"
        return Reply(reasoning=thought, calls=_calls([(name, _fill(arguments, prompt=prompt))]))
    if isinstance(step, WaitForSubagent):
        if profile.wait is None:
            return say(profile, RunCommands((f"sleep 1; echo {tag}",)), tag, child)
        name, arguments = profile.wait
        return Reply(text=f"Waiting: {tag}.", reasoning=thought, calls=_calls([(name, _fill(arguments, agent=agent))]))
    if profile.finish is not None:
        name, arguments = profile.finish
        return Reply(reasoning=thought, calls=_calls([(name, _fill(arguments, command=f"echo {tag}"))]))
    return Reply(text=f"It is done: {tag}.", reasoning=thought)


def _telling(tag: str, number: int, command: str) -> str:
    """The command behind one that prints `ran-42` (43, ...), which stands nowhere in it. Without substitutions, which
    some harnesses refuse to run."""
    return f"printf '%s ran-%d\\n' {tag} 0{0o52 + number:o}; {command}"


def _fill(arguments: Arguments, **values: str) -> Json:
    def fill(value: Any) -> Any:
        if isinstance(value, str):
            for name, text in values.items():
                value = value.replace("{" + name + "}", text)
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        return value

    return {key: fill(value) for key, value in arguments.items()}


Json = dict[str, Any]


def _calls(calls: Sequence[tuple[str, Arguments]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(new_id("call"), name, json.dumps(dict(arguments))) for name, arguments in calls)


def _terminus(profile: HarnessProfile, step: Step, tag: str, child: str) -> Reply:
    """Terminus 2 reads one JSON object: keystrokes for its terminal, or that the task is complete."""
    done = isinstance(step, Finish)
    commands = step.commands if isinstance(step, RunCommands) else ()
    keys = [{"keystrokes": _telling(tag, number, text) + "\n", "duration": 0.3} for number, text in enumerate(commands)]
    value = {"analysis": f"I am at {tag}.", "plan": "Go on.", "commands": keys, "task_complete": done}
    return Reply(text=json.dumps(value), reasoning=f"I thought of thought-{tag}.")


def _aider(profile: HarnessProfile, step: Step, tag: str, child: str) -> Reply:
    """aider takes whole files out of the text."""
    if isinstance(step, Finish):
        return Reply(text=f"Nothing is left to do: {tag}.", reasoning=f"I thought of thought-{tag}.")
    text = f"I change the file: {tag}.\n\na.txt\n```\nhello\n{tag}\n```\n"
    return Reply(text=text, reasoning=f"I thought of thought-{tag}.")


_DESCRIBED = {"command": "{command}", "description": "Runs a command"}
_ONE_ANSWER = "it asks the model once for each message of the user"
_NO_TOOLS = "its model acts by text, there are no tool calls"

PROFILES: Mapping[str, HarnessProfile] = {
    profile.name: profile
    for profile in (
        HarnessProfile(
            "codex",
            tool="exec_command",
            arguments={"cmd": "{command}"},
            delegate=("multi_agent_v1__spawn_agent", {"message": "{prompt}"}),
            wait=("multi_agent_v1__wait_agent", {"targets": ["{agent}"], "timeout_ms": 20000}),
            refusal=400,
        ),
        HarnessProfile(
            "claude-code",
            tool="Bash",
            arguments=_DESCRIBED,
            delegate=(
                "Agent",
                {"description": "A small task", "prompt": "{prompt}", "subagent_type": "general-purpose"},
            ),
            refusal=400,
        ),
        HarnessProfile(
            "qwen-code",
            tool="run_shell_command",
            arguments={**_DESCRIBED, "is_background": False},
            delegate=(
                "agent",
                {"description": "A small task", "prompt": "{prompt}", "subagent_type": "general-purpose"},
            ),
            full=172_000,
            # Seen in 2 of 10 runs: `Output: (empty)`, exit code 0, for a command that had printed.
            lingers="; sleep 0.3",
        ),
        HarnessProfile(
            "gemini-cli",
            tool="run_shell_command",
            arguments=_DESCRIBED,
            delegate=("invoke_agent", {"agent_name": "generalist", "prompt": "{prompt}"}),
            window=40_000,
            full=30_000,
            compaction_steps=6,
            fills_with="seq 10000 15000",
            compacts_at_end=True,
        ),
        HarnessProfile("pi", window=40_000, full=30_000, fills_with="seq -s , 10000 17000", compacts_at_end=True),
        HarnessProfile(
            "opencode",
            arguments=_DESCRIBED,
            delegate=("task", {"description": "A small task", "prompt": "{prompt}", "subagent_type": "general"}),
            full=125_000,
        ),
        HarnessProfile(
            "mini-swe-agent",
            finish=("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && {command}"}),
            missing={
                "second_turn": "it keeps no conversation to go on with",
                "compaction": "it has none: it ends at its limits",
            },
        ),
        HarnessProfile(
            "openhands",
            tool="terminal",
            arguments={"command": "{command}", "security_risk": "LOW", "summary": "runs a command"},
            delegate=(
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
            speak=_aider,
            tool="",
            one_answer=True,
            rebuilds="it makes its messages anew: old turns before the files, thoughts inside the answers",
            missing={
                "tool_round_trip": _NO_TOOLS,
                "parallel_calls": _NO_TOOLS,
                "long_run": _ONE_ANSWER,
                "compaction": _ONE_ANSWER + ", so its history does not grow within a run",
            },
        ),
        HarnessProfile(
            "terminus-2",
            speak=_terminus,
            tool="",
            missing={
                "parallel_calls": _NO_TOOLS + "; one answer holds several commands",
                "second_turn": "it keeps no conversation to go on with",
            },
            context_error=True,
        ),
        HarnessProfile(
            "cline",
            tool="run_commands",
            arguments={"commands": ["{command}"]},
            delegate=("spawn_agent", {"systemPrompt": "You are a small helper.", "task": "{prompt}"}),
            window=40_000,
            full=39_000,
            fills_with="seq -s , 10000 17000",
        ),
        HarnessProfile("mistral-vibe", full=400_000),
    )
}


def profile_of(name: str) -> HarnessProfile:
    """The profile of a harness; for one that is not known here, one with a tool `bash` that takes a `command`."""
    return PROFILES.get(name) or HarnessProfile(name)
