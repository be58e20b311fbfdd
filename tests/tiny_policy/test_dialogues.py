"""The offline simulation equals really running the commands, and the expert solves every instance."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from examples.tiny_policy.dialogues import Workspace, assistant, observation, opening, play_expert
from examples.tiny_policy.expert import SUBMIT, LostError, next_action, read_report
from polar_proxy.tasks import get_source
from polar_proxy.tasks.swe_task import SweTaskSource

pytestmark = pytest.mark.slow

SOURCE = get_source("swe-task")


def without_times(messages: list[dict[str, Any]]) -> str:
    return re.sub(r"in \d+\.\d+s", "in time", repr(messages))


@pytest.mark.parametrize("seed", range(12))
def test_offline_dialogue_equals_the_real_one(seed: int) -> None:
    task = SOURCE.task(seed)
    real = opening(task.instruction, "Linux")
    with Workspace(replace(task, timeout_seconds=120)) as workspace:
        for step in range(10):
            action = next_action(real)
            real.append(assistant(action.thought, action.command, f"call_{step}"))
            if action.command == SUBMIT:
                break
            output, code, exception = workspace.run(action.command, timeout=120)
            real.append(observation(output, code, f"call_{step}", exception))
        assert workspace.solved()
    assert without_times(real) == without_times(play_expert(task, "Linux", random.Random(0)))


def test_unchanged_workspace_is_not_solved() -> None:
    with Workspace(SOURCE.task(3)) as workspace:
        assert not workspace.solved()


def test_expert_parses_every_test_report() -> None:
    source = SweTaskSource()
    for seed in range(300):
        task = source.task(seed)
        report = read_report(task.instruction)
        assert report.function == task.metadata["function"]
        left, op1, right, op2, value = report.formula
        solution = source.solution(seed)[task.metadata["path"]]
        found = re.search(rf"def {report.function}\((\w+), (\w+)\):\n    return (.*)\n", solution)
        assert found is not None
        names = {"x": found[1], "y": found[2]}
        assert found[3] == f"{names[left]} {op1} {names[right]} {op2} {value}"


def test_expert_raises_when_it_is_lost() -> None:
    with pytest.raises(LostError, match="no bug report"):
        next_action([{"role": "user", "content": "Hello."}])
    messages = opening(SOURCE.task(1).instruction, "Linux")
    messages.append(assistant("x", "grep", "call_0"))
    messages.append(observation("", 1, "call_0"))
    with pytest.raises(LostError, match="grep did not find"):
        next_action(messages)


def test_cuts_long_output_like_mini_swe_agent() -> None:
    content = observation("<" + "a" * 10000, 0, "call_0")["content"]
    assert '"output_head": "\\u003caaa' in content
    assert '"elided_chars": 1,' in content


def test_stops_a_hanging_command() -> None:
    with Workspace(SOURCE.task(1)) as workspace:
        output, code, exception = workspace.run("echo before; sleep 60", timeout=2)
    assert (output, code) == ("before\n", -1)
    assert "timed out" in exception
