"""The evaluators `tests` and `swebench`: hidden tests are run on the patched workspace and judged by name.

`tests` runs the task's own command; every test in `fail_to_pass` and `pass_to_pass` must pass. `swebench` grades as the
SWE-bench family of benchmarks does: every FAIL_TO_PASS test must pass, and every PASS_TO_PASS test must pass or be
skipped. A test that is expected to fail and does (XFAIL) passes. Rules from swebench 5.0.2,
`swebench/harness/grading.py`:

* a FAIL_TO_PASS test that is skipped, or missing from the log, has failed;
* a test id that the data set cut off inside its brackets means all tests whose ids begin with it; if only some of them
  passed, the id counts as missing from the log;
* with `fail_only` (runners that name only failures) a test has failed only if the log says so, and the log must show
  that the suite ran;
* the log of a command that exits with an error is not trusted if it shows no failure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from polar_proxy.allowed_code import is_code
from polar_proxy.errors import BadTaskError
from polar_proxy.rewards.base import (
    EvaluatedTask,
    EvaluationInput,
    Evaluator,
    SandboxFactory,
    Score,
    Workspace,
    apply_patch,
    patched_files,
    patched_workspace,
)
from polar_proxy.rewards.guarded import GuardedResult, run_guarded
from polar_proxy.rewards.isolated import TestPlan, TestReport, plan_pytest, plan_shell_command, plan_unittest, run_tests
from polar_proxy.rewards.log_parsers import LogParser, Verdict, check_parser, get_parser
from polar_proxy.types import Json

_START = ">>>>> Start Test Output"
_END = ">>>>> End Test Output"
_EXIT = re.compile(r">>>>> Test Exit Code:\s*(-?\d+)")
_SUITE_RAN = re.compile(
    r"Executed [1-9]\d* of|TOTAL: [1-9]\d* (?:SUCCESS|FAILED)|[1-9]\d* passing|Tests:\s+[1-9]|^# tests [1-9]"
    r"|[1-9]\d* specs?, \d+ failures?",
    re.MULTILINE,
)
# Some runners append a test's duration to its name.
_DURATION = re.compile(r"\s*[\[(]?\s*(?:in )?\d+(?:\.\d+)?\s*m?s(?:ec(?:onds?)?)?\s*[\])]?$")
_GOOD = ("passed", "xfailed")
_BAD = ("failed", "error")


@dataclass(frozen=True)
class HiddenTestsEvaluator(Evaluator):
    """Writes the task's `hidden_files` and runs its `test_command`; the reward is 1 if all named tests pass, else 0."""

    kind: Literal["tests"] = "tests"
    weight: float = 1.0
    parser: str = "unittest"
    """How to read the output: a name of `log_parsers.PARSERS`, or ``module:function``."""
    before: bool = False
    """Also run the tests without the agent's patch. If fail_to_pass tests then pass, or pass_to_pass tests fail, the
    task is wrong and the rollout gets no reward."""
    by_value: bool = False
    """Run the hidden tests in one process and the agent's code in another, so that no code can forge a verdict. The
    tests may only call functions and compare plain values (numbers, texts, lists, ...). They must be tests of unittest
    in `hidden_files`."""

    def check(self, task: EvaluatedTask) -> None:
        check_parser(self.parser)
        if not task.test_command:
            raise BadTaskError("test_command: required by the evaluator `tests`")
        if self.by_value and self._plan(task) is None:
            raise BadTaskError("by_value: test_command must be python3 -m unittest with the names of hidden tests")
        if not (task.fail_to_pass or task.pass_to_pass):
            raise BadTaskError("fail_to_pass: name a test here or in pass_to_pass; without a test, any result passes")

    @property
    def code_names(self) -> Iterable[str]:
        return (self.parser,) if is_code(self.parser) else ()

    @property
    def runs(self) -> int:
        return 2 if self.before else 1

    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        task = work.task
        parse = get_parser(self.parser, work.code)
        if self.before and (score := await self._score_unpatched(task, sandboxes, parse)) is not None:
            return score
        async with patched_workspace(sandboxes, work) as workspace:
            report = await self._run(task, workspace, work.changed_paths, parse)
        missed = [name for name in task.fail_to_pass if report.verdicts.get(name) not in _GOOD]
        broken = [name for name in task.pass_to_pass if report.verdicts.get(name) not in _GOOD]
        detail = _report(task.fail_to_pass, task.pass_to_pass, missed, broken)
        detail["solved"] = detail["solved"] and not report.timed_out
        detail |= {"patch_applied": True, "timed_out": report.timed_out}
        return Score(float(detail["solved"]), detail, report.log, signs=report.signs)

    async def _score_unpatched(self, task: EvaluatedTask, sandboxes: SandboxFactory, parse: LogParser) -> Score | None:
        """Run the tests without a patch. Return None if all of `fail_to_pass` fail and all of `pass_to_pass` pass.

        On any other result, or if the tests run out of time, the task is at fault: return a score without a reward.
        """
        async with sandboxes() as workspace:
            report = await self._run(task, workspace, (), parse)
        green = [name for name in task.fail_to_pass if report.verdicts.get(name) in _GOOD]
        red = [name for name in task.pass_to_pass if report.verdicts.get(name) not in _GOOD]
        if not green and not red and not report.timed_out:
            return None
        reason = (
            "the task is at fault: without a patch, fail_to_pass tests pass, pass_to_pass tests fail, or the tests "
            "run out of time"
        )
        detail = {"no_reward": reason, "already_green": green, "already_red": red, "timed_out": report.timed_out}
        return Score(None, detail, report.log)

    def _plan(self, task: EvaluatedTask) -> TestPlan | None:
        """Return the plan with which Polar's own runner runs the tests; None if the task's command must run them."""
        if self.parser == "unittest":
            plan = plan_unittest(task.test_command)
            return replace(plan, style="values") if plan is not None and self.by_value else plan
        if self.parser in ("pytest", "pytest_v2") and not self.by_value:
            return plan_pytest(task.test_command)
        return None

    async def _run(
        self, task: EvaluatedTask, workspace: Workspace, changed_paths: Sequence[str], parse: LogParser
    ) -> TestReport:
        if not self.by_value:  # then nothing of the tests is in the workspace
            await workspace.write_tree({name: text.encode() for name, text in task.hidden_files.items()})
        if (plan := self._plan(task)) is not None:
            return await run_tests(workspace, plan, task.hidden_files, changed_paths, task.timeout_seconds)
        text = " ".join(task.test_command)
        ran = await run_guarded(workspace, task.test_command, text, changed_paths, seconds=task.timeout_seconds)
        verdicts = {} if ran.signs else ran.correct(parse(ran.log.decode(errors="replace")), parse)
        return TestReport(verdicts, ran.log, ran.result.timed_out, ran.signs)


@dataclass(frozen=True)
class SwebenchEvaluator(Evaluator):
    """Puts the benchmark's tests in place, runs them, and grades the log as the SWE-bench family of benchmarks does.

    The reward is 1 if the task is resolved, else 0."""

    kind: Literal["swebench"] = "swebench"
    weight: float = 1.0
    test_patch: str = ""
    """Git diff with the tests. It is applied after the files that it touches were restored from the base commit."""
    command: str = ""
    """Shell command that runs the tests; the word {test_files} is replaced by the paths of the test patch."""
    eval_script: str | None = None
    """The benchmark's own script, which applies the test patch itself; replaces `test_patch` and `command`."""
    parser: str = "pytest"
    fail_only: bool = False
    """The log names only tests that fail; a test that the log does not name has passed."""
    expected: Mapping[str, str] | None = None
    """R2E-Gym: exactly these tests must have exactly these verdicts. Replaces FAIL_TO_PASS and PASS_TO_PASS."""

    def check(self, task: EvaluatedTask) -> None:
        check_parser(self.parser)
        if not self.command and not self.eval_script:
            raise BadTaskError("command: give the command that runs the tests, or an eval_script")
        if not (task.fail_to_pass or task.pass_to_pass or self.expected):
            raise BadTaskError("FAIL_TO_PASS: name a test here or in PASS_TO_PASS; without a test, any result passes")

    @property
    def code_names(self) -> Iterable[str]:
        return (self.parser,) if is_code(self.parser) else ()

    @property
    def protected_files(self) -> Iterable[str]:
        # The tests of R2E-Gym are not in the row; its images and its command put them at these places.
        return (*patched_files(self.test_patch), *(("r2e_tests", "run_tests.sh") if self.expected else ()))

    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        task = work.task
        async with patched_workspace(sandboxes, work) as workspace:
            if self.eval_script is None and (error := await self._install_tests(task, workspace)) is not None:
                return await self._score_without_tests(task, sandboxes, error)
            if (plan := self._plan()) is not None:
                report = await run_tests(workspace, plan, {}, work.changed_paths, task.timeout_seconds)
                return self._score_report(task, report)
            ran = await self._run(work, workspace)
        text, status = self._test_output(ran.log.decode(errors="replace"), ran.result.exit_code)
        parse = get_parser(self.parser, work.code)
        verdicts = ran.correct(parse(text), parse)
        if self.expected is not None:
            detail = grade_exactly(verdicts, self.expected)
        else:
            detail = grade(verdicts, task.fail_to_pass, task.pass_to_pass, fail_only=self.fail_only)
            if doubt := self._doubt(verdicts, text, status):
                detail |= {"solved": False, "not_believed": doubt}
        if ran.result.timed_out or ran.signs:
            detail |= {"solved": False}
        detail |= {"patch_applied": True, "timed_out": ran.result.timed_out, "exit_code": status}
        return Score(float(detail["solved"]), detail, ran.log, signs=ran.signs)

    def _plan(self) -> TestPlan | None:
        """Return the plan with which Polar's own runner runs the tests; None if `command` or `eval_script` must
        run them."""
        own = self.parser == "unittest" and self.eval_script is None and not self.fail_only and self.expected is None
        return plan_shell_command(self.command) if own else None

    def _score_report(self, task: EvaluatedTask, report: TestReport) -> Score:
        detail = grade(report.verdicts, task.fail_to_pass, task.pass_to_pass, fail_only=False)
        detail |= {"solved": detail["solved"] and not report.timed_out, "patch_applied": True}
        detail |= {"timed_out": report.timed_out}
        return Score(float(detail["solved"]), detail, report.log, signs=report.signs)

    async def _install_tests(self, task: EvaluatedTask, workspace: Workspace) -> str | None:
        """Restore the files of the test patch from the base commit and apply the test patch; return git's error or
        None."""
        if not self.test_patch.strip():
            return None
        commit = task.base_commit or "HEAD"
        for path in patched_files(self.test_patch):
            # The patch creates a file that the base does not have, so the agent's file of that name is removed.
            script = 'git -c "safe.directory=*" checkout -q "$1" -- "$2" 2>/dev/null || rm -rf -- "$2"'
            await workspace.exec(("sh", "-c", script, "sh", commit, path), timeout=60)
        return await apply_patch(self.test_patch.encode(), workspace)

    async def _score_without_tests(self, task: EvaluatedTask, sandboxes: SandboxFactory, error: str) -> Score:
        """Return the score of a task whose test patch does not apply after the agent's patch. `error`: git's message.

        The reward is 0 if the test patch applies to the task's own files. Otherwise the task is at fault, and the
        reward is None.
        """
        async with sandboxes() as workspace:
            task_error = await self._install_tests(task, workspace)
        if task_error is not None:
            reason = "the task is at fault: its test patch does not apply to its base commit"
            return Score(None, {"no_reward": reason}, task_error.encode())
        return Score(0.0, {"patch_applied": True, "tests_applied": False, "solved": False}, error.encode())

    async def _run(self, work: EvaluationInput, workspace: Workspace) -> GuardedResult:
        path = f"{workspace.home}/polar-evaluation.sh"
        script = self.eval_script or self.command
        await workspace.write(path, script.encode())
        command = ("sh", "-c", f"exec bash {shlex.quote(path)} 2>&1")
        # R2E-Gym's script is in the image and runs pytest.
        text = f"{script} {self.parser} {'pytest' if self.expected else ''}"
        return await run_guarded(workspace, command, text, work.changed_paths, seconds=work.task.timeout_seconds)

    def _test_output(self, log: str, exit_code: int) -> tuple[str, int | None]:
        """Return the output and the exit status of the tests. The log of an `eval_script` marks where the output begins
        and ends, and names the exit status."""
        if self.eval_script is None:
            return log, exit_code
        found = _EXIT.search(log)
        text = log.partition(_START)[2].partition(_END)[0] if _START in log and _END in log else ""
        return text, int(found[1]) if found else None

    def _doubt(self, verdicts: Mapping[str, Verdict], text: str, status: int | None) -> str | None:
        """Return why the log is not trusted, or None."""
        if self.fail_only and not verdicts and not _SUITE_RAN.search(text):
            return "the log does not show that the tests ran"
        if verdicts and status not in (0, None) and not any(verdict in _BAD for verdict in verdicts.values()):
            return f"the test command exited with {status}, but its log shows no failure"
        return None


def grade(
    verdicts: Mapping[str, Verdict], fail_to_pass: Sequence[str], pass_to_pass: Sequence[str], *, fail_only: bool
) -> Json:
    """Return the benchmark's report: the tests of `fail_to_pass` and of `pass_to_pass` that have a wrong result, and
    whether the task is resolved."""
    by_name = {_DURATION.sub("", test): verdict for test, verdict in verdicts.items()} | dict(verdicts)

    def right(test: str, *good: Verdict) -> bool:
        if fail_only:
            return by_name.get(test) != "failed"
        return _find_verdict(test, by_name) in good

    missed = [test for test in fail_to_pass if not right(test, "passed", "xfailed")]
    broken = [test for test in pass_to_pass if not right(test, "passed", "xfailed", "skipped")]
    return _report(fail_to_pass, pass_to_pass, missed, broken)


def grade_exactly(verdicts: Mapping[str, Verdict], expected: Mapping[str, str]) -> Json:
    """Apply R2E-Gym's rule: exactly the expected tests have exactly the expected verdicts."""
    words = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "skipped": "SKIPPED", "xfailed": "XFAIL"}
    got = {test: words[verdict] for test, verdict in verdicts.items()}
    differing = sorted(test for test in {*got, *expected} if got.get(test) != expected.get(test))
    return {"solved": not differing, "expected": len(expected), "differing": differing}


def _find_verdict(test: str, verdicts: Mapping[str, Verdict]) -> Verdict | None:
    found = verdicts.get(test) or verdicts.get(_DURATION.sub("", test))
    if found is None and test.count("[") > test.count("]"):
        matching = [verdict for name, verdict in verdicts.items() if name.startswith(test)]
        if matching and len({verdict in _GOOD for verdict in matching}) == 1:
            return matching[0]
    return found


def _report(
    fail_to_pass: Sequence[str], pass_to_pass: Sequence[str], missed: Sequence[str], broken: Sequence[str]
) -> Json:
    return {
        "solved": not missed and not broken,
        "fail_to_pass": {"passed": len(fail_to_pass) - len(missed), "total": len(fail_to_pass)},
        "pass_to_pass": {"passed": len(pass_to_pass) - len(broken), "total": len(pass_to_pass)},
        "missed": missed,
        "broken": broken,
    }
