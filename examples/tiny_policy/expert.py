"""The expert: a scripted player of the family `swe-task`, which reads what the agent's model would read.

`next_action` is a pure function of the conversation. It never sees the task object: the name comes from the bug
report in the prompt, the file and the formula from the output of its own commands. Where
there are several equally good ways to go on, it picks one by a hash of the report, so that demonstrations vary
while each one is reproducible.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

_NAME = re.compile(r"`([a-z]+)[`(]")
_REPORT = re.compile(r"Please solve this issue: (.*?)\n\nYou can execute", re.DOTALL)
_FOUND = re.compile(r"^\./(\S+\.py):(\d+):def ", re.MULTILINE)


class LostError(Exception):
    """The conversation is not one that the expert can play on."""


@dataclass(frozen=True)
class Action:
    """What the expert does next: a thought and one shell command."""

    thought: str
    command: str

    def answer(self) -> str:
        """The action as the policy writes it: reasoning tags and a Hermes tool call, without the end of turn."""
        call = {"name": "bash", "arguments": {"command": self.command}}
        body = json.dumps(call, ensure_ascii=False)
        return f"<think>\n{self.thought}\n</think>\n\n<tool_call>\n{body}\n</tool_call>"


def read_report(text: str) -> str:
    """Return the function that a bug report of the family names. Raises `LostError` when it names none."""
    name = _NAME.search(text)
    if name is None:
        raise LostError("the report names no function")
    return name[1]


def next_action(messages: Sequence[Mapping[str, Any]]) -> Action:
    """Return the next action in a conversation in the Chat Completions form, as mini-swe-agent keeps it.

    Raises `LostError` when the conversation is not one of the family, or a command did not do what it should.
    """
    found = next((_REPORT.search(_text(m)) for m in messages if m["role"] == "user"), None)
    if found is None:
        raise LostError("there is no bug report in the conversation")
    function = read_report(found[1])
    rng = random.Random(f"expert/2/{found[1]}")
    # All choices are drawn at once, so that each depends on the report alone and not on how far the run is.
    finder = rng.choice(("", "", "--include='*.py' "))
    reader = rng.choice(("cat -n", "cat -n", "nl -ba"))
    pattern = rng.choice((".*", ".*", "return .*"))
    tests_it = rng.random() < 0.5
    opening = rng.choice(("Find", "Look for"))

    outputs = [_output(m) for m in messages if m["role"] == "tool"]
    if not outputs:
        return Action(f"{opening} {function}.", f"grep -rn 'def {function}' {finder}.")
    place = _FOUND.search(outputs[0])
    if place is None:
        raise LostError(f"grep did not find {function}")
    path = place[1]
    if len(outputs) == 1:
        return Action(f"It is in {path}.", f"{reader} {path}")
    if len(outputs) == 2:
        number, parameters, formula = _read_function(outputs[1], function)
        line = f"return {formula}"
        new = f"    {line}" if pattern == ".*" else line
        thought = f"{function}({parameters}): Return {formula}. Line {number}."
        return Action(thought, f"sed -i '{number}s/{pattern}/{new}/' {path}")
    if len(outputs) == 3 and tests_it:
        module = path.rpartition("/")[2].removesuffix(".py")
        return Action("Test it.", f"python3 -m unittest tests.test_{module}")
    return Action("Done.", SUBMIT)


def _read_function(listing: str, name: str) -> tuple[int, str, str]:
    """Return (number of the return line, parameters, formula of the docstring) from a numbered listing."""
    match = re.search(
        rf'\tdef {re.escape(name)}\((.*)\):\n *\d+\t    """Return (.*)\."""\n *(\d+)\t    return ', listing
    )
    if match is None:
        raise LostError(f"{name} is not in the listing")
    return int(match[3]), match[1], match[2]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def _output(message: Mapping[str, Any]) -> str:
    """The command's output from one of mini-swe-agent's observations, which are JSON."""
    return str(json.loads(_text(message)).get("output", ""))
