"""The `command` evaluator: a program of the task's author judges the patched workspace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from polar_proxy.errors import BadTaskError
from polar_proxy.rewards.base import (
    EvaluatedTask,
    EvaluationInput,
    Evaluator,
    SandboxFactory,
    Score,
    check_relative_path,
    patched_workspace,
)
from polar_proxy.types import Json


@dataclass(frozen=True)
class CommandEvaluator(Evaluator):
    """Runs `argv` in the patched workspace, after writing `files` over it."""

    argv: tuple[str, ...]
    kind: Literal["command"] = "command"
    weight: float = 1.0
    files: Mapping[str, str] = field(default_factory=dict)
    reward: Literal["exit_code", "last_line"] = "exit_code"
    """`exit_code`: the reward is 1 for exit status 0, else 0. `last_line`: the last line of stdout is the reward, or
    ``null`` for none."""

    def check(self, task: EvaluatedTask) -> None:
        if not self.argv:
            raise BadTaskError("command: argv is empty")
        for name in self.files:
            check_relative_path("command: files", name)

    @property
    def protected_files(self) -> Iterable[str]:
        return self.files

    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        async with patched_workspace(sandboxes, work.patch) as workspace:
            await workspace.write_tree({name: text.encode() for name, text in self.files.items()})
            result = await workspace.exec(self.argv, timeout=work.task.timeout_seconds)
        log = result.stdout + result.stderr
        detail: Json = {"patch_applied": True, "exit_code": result.exit_code, "timed_out": result.timed_out}
        if self.reward == "exit_code":
            solved = result.exit_code == 0 and not result.timed_out
            return Score(float(solved), {**detail, "solved": solved}, log)
        if result.timed_out or result.exit_code != 0:
            reason = "it ran out of time" if result.timed_out else f"it exited with {result.exit_code}"
            return Score(None, {**detail, "no_reward": f"{self.argv[0]}: {reason}"}, log)
        value, reason_none = _last_number(result.stdout.decode(errors="replace"))
        if reason_none is not None:
            return Score(None, {**detail, "no_reward": f"{self.argv[0]}: {reason_none}"}, log)
        return Score(value, detail, log)


def _last_number(output: str) -> tuple[float | None, str | None]:
    """Return the number on the last non-empty line, or the reason why there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return None, "it printed nothing"
    if lines[-1] == "null":
        return None, "it printed null: no reward"
    try:
        value = float(lines[-1])
    except ValueError:
        return None, f"its last line is not a number: {lines[-1][:80]!r}"
    return (value, None) if math.isfinite(value) else (None, f"its last line is not a finite number: {lines[-1]}")
