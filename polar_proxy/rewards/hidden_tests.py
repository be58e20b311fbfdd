"""The `tests` evaluator: hidden tests by name.

A task counts as solved when every test that had to turn green did, and none that was green turned red.
"""

from __future__ import annotations

from polar_proxy.rewards.base import (
    EvaluationInput,
    SandboxFactory,
    Score,
    Workspace,
    apply_patch,
    patch_does_not_apply,
)
from polar_proxy.tasks import Task, Verdict
from polar_proxy.tasks.evaluation import HiddenTestsEvaluator
from polar_proxy.tasks.log_parsers import get_parser
from polar_proxy.types import Json

_GOOD = ("passed", "xfailed")


async def hidden_tests(evaluation: HiddenTestsEvaluator, attempt: EvaluationInput, fresh: SandboxFactory) -> Score:
    """Run the task's hidden tests on the patched workspace, and with `before` on the unpatched one first."""
    task = attempt.task
    if evaluation.before and (score := await _before(evaluation, task, fresh)) is not None:
        return score
    async with fresh() as workspace:
        if (why := await apply_patch(attempt.patch, workspace)) is not None:
            return patch_does_not_apply(why)
        verdicts, log, timed_out = await _run(evaluation, task, workspace)
    missed = [name for name in task.fail_to_pass if verdicts.get(name) not in _GOOD]
    broken = [name for name in task.pass_to_pass if verdicts.get(name) not in _GOOD]
    solved = not missed and not broken and not timed_out
    detail: Json = {
        "solved": solved,
        "patch_applied": True,
        "fail_to_pass": {"passed": len(task.fail_to_pass) - len(missed), "total": len(task.fail_to_pass)},
        "pass_to_pass": {"passed": len(task.pass_to_pass) - len(broken), "total": len(task.pass_to_pass)},
        "missed": missed,
        "broken": broken,
        "timed_out": timed_out,
    }
    return Score(1.0 if solved else 0.0, detail, log)


async def _before(evaluation: HiddenTestsEvaluator, task: Task, fresh: SandboxFactory) -> Score | None:
    """None if the tests stand as the task says they do before the fix, else the score of a task at fault."""
    async with fresh() as workspace:
        verdicts, log, timed_out = await _run(evaluation, task, workspace)
    green = [name for name in task.fail_to_pass if verdicts.get(name) in _GOOD]
    red = [name for name in task.pass_to_pass if verdicts.get(name) not in _GOOD]
    if not green and not red and not timed_out:
        return None
    why = "the task is at fault: before the fix its tests do not stand as it says"
    return Score(None, {"no_reward": why, "already_green": green, "already_red": red, "timed_out": timed_out}, log)


async def _run(
    evaluation: HiddenTestsEvaluator, task: Task, workspace: Workspace
) -> tuple[dict[str, Verdict], bytes, bool]:
    await workspace.write_tree({name: text.encode() for name, text in task.hidden_files.items()})
    result = await workspace.exec(task.test_command, timeout=task.timeout_seconds)
    log = result.stdout + result.stderr
    return dict(get_parser(evaluation.parser)(log.decode(errors="replace"))), log, result.timed_out
