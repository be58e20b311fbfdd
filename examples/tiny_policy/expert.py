"""The expert: a scripted player of the family `swe-task`, which reads what the agent's model would read.

`next_action` is a pure function of the conversation. It never sees the task object: the name and the formula come
from the bug report in the prompt, the file and the parameter names from the output of its own commands. When
several next commands are equally good, it picks one by a hash of the report, so that demonstrations vary and each one
is reproducible.
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
_FORMULA = re.compile(r"`([xy]) ([-+*%]) ([xy]) ([-+]) (\d+)`")
_REPORT = re.compile(r"Please solve this issue: (.*?)\n\nYou can execute", re.DOTALL)
_FOUND = re.compile(r"^\./(\S+\.py):(\d+):def ", re.MULTILINE)


class LostError(Exception):
    """The conversation is not one that the expert can continue."""


@dataclass(frozen=True)
class Action:
    """The next action of the expert: a thought and one shell command."""

    thought: str
    command: str

    def answer(self) -> str:
        """Return the action as the policy writes it: reasoning tags and a Hermes tool call, without the end of turn."""
        call = {"name": "bash", "arguments": {"command": self.command}}
        body = json.dumps(call, ensure_ascii=False)
        return f"<think>\n{self.thought}\n</think>\n\n<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True)
class Report:
    """The content of a bug report: the function and the formula, as (x or y, operator, x or y, operator, value)."""

    function: str
    formula: tuple[str, str, str, str, str]


def read_report(text: str) -> Report:
    """Parse a bug report of the family. Raises `LostError` for another text."""
    name = _NAME.search(text)
    if name is None:
        raise LostError("the report names no function")
    formula = _FORMULA.search(text)
    if formula is None:
        raise LostError("the report states no formula")
    left, op1, right, op2, value = formula.groups()
    return Report(name[1], (left, op1, right, op2, value))


def next_action(messages: Sequence[Mapping[str, Any]]) -> Action:
    """Return the next action in a conversation in the Chat Completions form, as mini-swe-agent keeps it.

    Raises `LostError` when the conversation is not one of the family, or a command did not do what it should.
    """
    found = next((_REPORT.search(_text(m)) for m in messages if m["role"] == "user"), None)
    if found is None:
        raise LostError("there is no bug report in the conversation")
    report = read_report(found[1])
    rng = random.Random(f"expert/4/{found[1]}")
    # All choices are drawn at once, so that they depend on the report alone and not on the progress of the run.
    finder = rng.choice(("", "", "--include='*.py' "))
    reader = rng.choice(("cat -n", "cat -n", "nl -ba"))
    pattern = rng.choice((".*", ".*", "return .*"))
    tests_it = rng.random() < 0.5
    opening = rng.choice(("Find", "Look for"))

    outputs = [_output(m) for m in messages if m["role"] == "tool"]
    if not outputs:
        return Action(f"{opening} {report.function}.", f"grep -rn 'def {report.function}' {finder}.")
    place = _FOUND.search(outputs[0])
    if place is None:
        raise LostError(f"grep did not find {report.function}")
    path = place[1]
    if len(outputs) == 1:
        return Action(f"It is in {path}.", f"{reader} {path}")
    if len(outputs) == 2:
        number, first, second = _read_function(outputs[1], report.function)
        names = {"x": first, "y": second}
        left, op1, right, op2, value = report.formula
        line = f"return {names[left]} {op1} {names[right]} {op2} {value}"
        new = f"    {line}" if pattern == ".*" else line
        quoted = " ".join(report.formula)
        thought = f"`{quoted}`: x is {first}, y is {second}. Line {number} must be {line}."
        return Action(thought, f"sed -i '{number}s/{pattern}/{new}/' {path}")
    if len(outputs) == 3 and tests_it:
        module = path.rpartition("/")[2].removesuffix(".py")
        return Action("Test it.", f"python3 -m unittest tests.test_{module}")
    return Action("Done.", SUBMIT)


def _read_function(listing: str, name: str) -> tuple[int, str, str]:
    """Return (number of the return line, first parameter, second parameter) from a numbered listing."""
    lines = re.findall(r"^ *(\d+)\t(.*)$", listing, re.MULTILINE)
    for index, (_, text) in enumerate(lines):
        if match := re.match(rf"def {name}\((\w+), (\w+)\):", text):
            return int(lines[index + 1][0]), match[1], match[2]
    raise LostError(f"{name} is not in the listing")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def _output(message: Mapping[str, Any]) -> str:
    """Return the command's output from one of mini-swe-agent's observations, which are JSON."""
    return str(json.loads(_text(message)).get("output", ""))
