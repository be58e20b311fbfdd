"""Plays the task family without harness and gateway: the same conversations, thousands of times faster.

`play_expert` answers the expert's few commands by computing their output; `Workspace.run` really runs commands in
a temporary directory, for policies that may type anything. Both speak exactly as mini-swe-agent 2.4.6 does: the
prompt was captured from a real run (`mini_swe_agent_prompt.json`), and observations go through its own template.
`tests/tiny_policy` compares the two with each other, `verify_export.py` with what Polar recorded.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from examples.tiny_policy.expert import SUBMIT, Action, next_action
from polar_proxy.tasks import Task

Message = dict[str, Any]

PROMPT: dict[str, Any] = json.loads((Path(__file__).parent / "mini_swe_agent_prompt.json").read_text())
TOOLS: list[Message] = PROMPT["tools"]
# Possible outputs of `uname`: the prompt contains one, and the policy should not depend on it.
_SYSTEMS = (
    "Linux 6.8.0-{a}-generic #{b}-Ubuntu SMP PREEMPT_DYNAMIC x86_64",
    "Linux 5.15.0-{a}-generic #{b}~20.04.1-Ubuntu SMP x86_64",
    "Linux 6.{b}.{a} #1 SMP PREEMPT_DYNAMIC @0 x86_64",
    "Linux 6.1.0-{b}-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.{a}-1 x86_64",
    "Linux 6.{b}.{a}-linuxkit #1 SMP aarch64",
    "Linux 5.15.{a}.1-microsoft-standard-WSL2 #1 SMP x86_64",
)


def opening(instruction: str, system: str) -> list[Message]:
    """Return the system and the user message with which mini-swe-agent begins."""
    user = PROMPT["user"].replace("{system}", system).replace("{task}", instruction)
    return [{"role": "system", "content": PROMPT["system"]}, {"role": "user", "content": user}]


def some_system(rng: random.Random) -> str:
    """Return a line as `platform.uname` makes it."""
    return rng.choice(_SYSTEMS).format(a=rng.randrange(10, 200), b=rng.randrange(1, 99))


def assistant(thought: str, command: str, call_id: str) -> Message:
    """Return an assistant message as mini-swe-agent sends it back: without the key `content` if it has a tool call."""
    arguments = json.dumps({"command": command}, ensure_ascii=False)
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "reasoning_content": thought, "tool_calls": [call]}


def observation(output: str, returncode: int, call_id: str, exception: str = "") -> Message:
    """Return a tool message as mini-swe-agent's template makes it (jinja's `tojson` escapes for HTML)."""

    def quoted(text: str) -> str:
        dumped = json.dumps(text)
        for character in "<>&'":
            dumped = dumped.replace(character, f"\\u{ord(character):04x}")
        return dumped

    if len(output) < 10000:
        body = f'{{\n  "returncode": {returncode},\n  "output": {quoted(output)}'
    else:
        body = (
            f'{{\n  "returncode": {returncode},\n  "output_head": {quoted(output[:5000])},\n'
            f'  "output_tail": {quoted(output[-5000:])},\n  "elided_chars": {len(output) - 10000},\n'
            '  "warning": "Output too long."'
        )
    if exception:
        body += f', "exception_info": {quoted(exception)}'
    return {"role": "tool", "tool_call_id": call_id, "content": body + "\n}"}


def play_expert(task: Task, system: str, rng: random.Random) -> list[Message]:
    """Return the whole dialogue of the expert with `task`: the messages of the last request and its answer."""
    files = dict(task.files)
    messages = opening(task.instruction, system)
    for step in range(10):
        action = next_action(messages)
        call_id = f"call_{step}"
        messages.append(assistant(action.thought, action.command, call_id))
        if action.command == SUBMIT:
            return messages
        messages.append(observation(_emulate(action, files, rng), 0, call_id))
    raise AssertionError("the expert does not finish")


def _emulate(action: Action, files: dict[str, str], rng: random.Random) -> str:
    """Return the output of one of the expert's commands on `files`, and apply its edit."""
    command = action.command
    if match := re.match(r"grep -rn '(.*?)' ", command):
        return "".join(
            f"./{path}:{number}:{line}\n"
            for path, text in files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if match[1] in line
        )
    if match := re.match(r"(?:cat -n|nl -ba) (\S+)$", command):
        lines = files[match[1]].splitlines()
        return "".join(f"{number:6}\t{line}\n" for number, line in enumerate(lines, 1))
    if match := re.match(r"sed -i '(\d+)s/(.*?)/(.*)/' (\S+)$", command):
        lines = files[match[4]].splitlines()
        index = int(match[1]) - 1
        lines[index] = re.sub(match[2], lambda _: match[3], lines[index], count=1)
        files[match[4]] = "\n".join(lines) + "\n"
        return ""
    if match := re.match(r"python3 -m unittest (\S+)$", command):
        count = files[match[1].replace(".", "/") + ".py"].count("def test_")
        # Most runs take under half a millisecond; a few take longer.
        milliseconds = rng.choice((0, 0, 0, 0, 1, 1, 2, 3))
        return f"{'.' * count}\n{'-' * 70}\nRan {count} tests in 0.{milliseconds:03}s\n\nOK\n"
    raise AssertionError(f"the expert does not type {command!r}")


class Workspace:
    """A task's repository in a temporary directory, where commands really run. A context manager."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._directory = tempfile.TemporaryDirectory(prefix="tiny-policy-")
        self.root = Path(self._directory.name)
        self._write(task.files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._directory.cleanup()

    def _write(self, files: Mapping[str, str]) -> None:
        for path, text in files.items():
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    def run(self, command: str, timeout: float = 10.0) -> tuple[str, int, str]:
        """Run a shell command; return (output, return code, exception text), as mini's local environment does."""
        env = {"PATH": os.environ["PATH"], "HOME": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            shell=True,
            text=True,
            errors="replace",
            cwd=self.root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return output, -1, f"An error occurred while executing the command: timed out after {timeout} s"
        return output, process.returncode, ""

    def solved(self) -> bool:
        """Return whether the hidden tests pass now. Call it last, because it writes them into the workspace."""
        self._write(self._task.hidden_files)
        _, code, _ = self.run(" ".join(self._task.test_command), self._task.timeout_seconds)
        return code == 0
