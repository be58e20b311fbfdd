"""The `tests` evaluator: hidden tests, judged by name.

A task is solved when every test in `fail_to_pass` and `pass_to_pass` passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polar_proxy.errors import BadTaskError
from polar_proxy.rewards.base import (
    EvaluatedTask,
    EvaluationInput,
    Evaluator,
    SandboxFactory,
    Score,
    Workspace,
    patched_workspace,
)
from polar_proxy.rewards.log_parsers import Verdict, get_parser

_GOOD = ("passed", "xfailed")


@dataclass(frozen=True)
class HiddenTestsEvaluator(Evaluator):
    """Writes the task's `hidden_files` and runs its `test_command`; the reward is 1 if all named tests pass, else 0."""

    kind: Literal["tests"] = "tests"
    weight: float = 1.0
    parser: str = "unittest"
    """How to read the output: a name of `log_parsers.PARSERS`, or ``module:function``."""
    before: bool = False
    """Run the tests before the patch as well. If they do not fail and pass as the task declares, the task is wrong and
    the rollout gets no reward."""

    def check(self, task: EvaluatedTask) -> None:
        get_parser(self.parser)
        if not task.test_command:
            raise BadTaskError("test_command: required by the evaluator `tests`")
        if not (task.fail_to_pass or task.pass_to_pass):
            raise BadTaskError("fail_to_pass: name at least one test here or in pass_to_pass; else any result passes")

    @property
    def runs(self) -> int:
        return 2 if self.before else 1

    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        task = work.task
        if self.before and (score := await self._score_unpatched(task, sandboxes)) is not None:
            return score
        async with patched_workspace(sandboxes, work.patch) as workspace:
            verdicts, log, timed_out = await self._run(task, workspace)
        missed = [name for name in task.fail_to_pass if verdicts.get(name) not in _GOOD]
        broken = [name for name in task.pass_to_pass if verdicts.get(name) not in _GOOD]
        solved = not missed and not broken and not timed_out
        detail = {
            "solved": solved,
            "patch_applied": True,
            "fail_to_pass": {"passed": len(task.fail_to_pass) - len(missed), "total": len(task.fail_to_pass)},
            "pass_to_pass": {"passed": len(task.pass_to_pass) - len(broken), "total": len(task.pass_to_pass)},
            "missed": missed,
            "broken": broken,
            "timed_out": timed_out,
        }
        return Score(1.0 if solved else 0.0, detail, log)

    async def _score_unpatched(self, task: EvaluatedTask, sandboxes: SandboxFactory) -> Score | None:
        """Return None if the tests fail and pass as the task declares before the fix, else the score of a bad task."""
        async with sandboxes() as workspace:
            verdicts, log, timed_out = await self._run(task, workspace)
        green = [name for name in task.fail_to_pass if verdicts.get(name) in _GOOD]
        red = [name for name in task.pass_to_pass if verdicts.get(name) not in _GOOD]
        if not green and not red and not timed_out:
            return None
        reason = "the task is at fault: before the fix, its tests do not fail and pass as it says"
        detail = {"no_reward": reason, "already_green": green, "already_red": red, "timed_out": timed_out}
        return Score(None, detail, log)

    async def _run(self, task: EvaluatedTask, workspace: Workspace) -> tuple[dict[str, Verdict], bytes, bool]:
        """Return the verdicts by test id, the output, and whether the time ran out."""
        await workspace.write_tree({name: text.encode() for name, text in task.hidden_files.items()})
        result = await workspace.exec(task.test_command, timeout=task.timeout_seconds)
        log = result.stdout + result.stderr
        return dict(get_parser(self.parser)(log.decode(errors="replace"))), log, result.timed_out
