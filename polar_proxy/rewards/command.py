"""The `command` evaluator: a program of the task's author judges the patched workspace."""

from __future__ import annotations

import math

from polar_proxy.rewards.base import EvaluationInput, SandboxFactory, Score, apply_patch, patch_does_not_apply
from polar_proxy.tasks.evaluation import CommandEvaluator
from polar_proxy.types import Json


async def command(evaluation: CommandEvaluator, attempt: EvaluationInput, fresh: SandboxFactory) -> Score:
    """By its exit status, or by the last line that it prints: see `CommandEvaluator.reward`."""
    async with fresh() as workspace:
        if (why := await apply_patch(attempt.patch, workspace)) is not None:
            return patch_does_not_apply(why)
        await workspace.write_tree({name: text.encode() for name, text in evaluation.files.items()})
        result = await workspace.exec(evaluation.argv, timeout=attempt.task.timeout_seconds)
    log = result.stdout + result.stderr
    detail: Json = {"patch_applied": True, "exit_code": result.exit_code, "timed_out": result.timed_out}
    if evaluation.reward == "exit_code":
        solved = result.exit_code == 0 and not result.timed_out
        return Score(float(solved), {**detail, "solved": solved}, log)
    if result.timed_out or result.exit_code != 0:
        why = "it ran out of time" if result.timed_out else f"it exited with {result.exit_code}"
        return Score(None, {**detail, "no_reward": f"{evaluation.argv[0]}: {why}"}, log)
    value, why_none = last_number(result.stdout.decode(errors="replace"))
    if why_none is not None:
        return Score(None, {**detail, "no_reward": f"{evaluation.argv[0]}: {why_none}"}, log)
    return Score(value, detail, log)


def last_number(output: str) -> tuple[float | None, str | None]:
    """The number on the last line that is not empty, or the reason why there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return None, "it printed nothing"
    if lines[-1] == "null":
        return None, "it said null: no reward"
    try:
        value = float(lines[-1])
    except ValueError:
        return None, f"its last line is no number: {lines[-1][:80]!r}"
    return (value, None) if math.isfinite(value) else (None, f"its last line is no finite number: {lines[-1]}")
