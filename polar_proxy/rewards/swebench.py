"""The `swebench` evaluator: graded as the benchmark defines it.

Resolved is: every FAIL_TO_PASS test passes and every PASS_TO_PASS test passes or is skipped; a test that is expected to
fail and does (XFAIL) passes. Rules after swebench 5.0.2, `swebench/harness/grading.py`:

* a FAIL_TO_PASS test that is skipped or not in the log has failed;
* ids that the data set cut inside their brackets are matched by what is left of them, if all that match agree;
* under `fail_only` (runners that name failures alone) a test is failed only if the log says so, and the log must show
  that the suite ran;
* a command that exits with an error while its log shows no failure is not believed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from polar_proxy.rewards.base import (
    EvaluationInput,
    SandboxFactory,
    Score,
    Workspace,
    apply_patch,
    patch_does_not_apply,
)
from polar_proxy.tasks import Task, Verdict
from polar_proxy.tasks.evaluation import SwebenchEvaluator
from polar_proxy.tasks.log_parsers import get_parser
from polar_proxy.tasks.swebench import patched_files
from polar_proxy.types import Json

_START = ">>>>> Start Test Output"
_END = ">>>>> End Test Output"
_EXIT = re.compile(r">>>>> Test Exit Code:\s*(-?\d+)")
_RAN = re.compile(
    r"Executed [1-9]\d* of|TOTAL: [1-9]\d* (?:SUCCESS|FAILED)|[1-9]\d* passing|Tests:\s+[1-9]|^# tests [1-9]"
    r"|[1-9]\d* specs?, \d+ failures?",
    re.MULTILINE,
)
# Some runners put a test's time into its name.
_TIME = re.compile(r"\s*[\[(]?\s*(?:in )?\d+(?:\.\d+)?\s*m?s(?:ec(?:onds?)?)?\s*[\])]?$")
_GOOD = ("passed", "xfailed")
_BAD = ("failed", "error")


async def swebench(evaluation: SwebenchEvaluator, attempt: EvaluationInput, fresh: SandboxFactory) -> Score:
    """Apply the patch, put the benchmark's tests in place, run them, grade the log."""
    task = attempt.task
    async with fresh() as workspace:
        if (why := await apply_patch(attempt.patch, workspace)) is not None:
            return patch_does_not_apply(why)
        if evaluation.eval_script is None and (why := await _put_tests(evaluation, task, workspace)) is not None:
            return await _tests_do_not_apply(evaluation, task, fresh, why)
        exit_code, log, timed_out = await _run(evaluation, task, workspace)
    text, status = _sliced(log.decode(errors="replace"), evaluation, exit_code)
    verdicts = get_parser(evaluation.parser)(text)
    if evaluation.expected is not None:
        detail = grade_exactly(verdicts, evaluation.expected)
    else:
        detail = grade(verdicts, task.fail_to_pass, task.pass_to_pass, fail_only=evaluation.fail_only)
        if doubt := _doubt(verdicts, text, status, evaluation.fail_only):
            detail |= {"solved": False, "not_believed": doubt}
    if timed_out:
        detail |= {"solved": False}
    detail |= {"patch_applied": True, "timed_out": timed_out, "exit_code": status}
    return Score(1.0 if detail["solved"] else 0.0, detail, log)


def grade(
    verdicts: Mapping[str, Verdict], fail_to_pass: tuple[str, ...], pass_to_pass: tuple[str, ...], *, fail_only: bool
) -> Json:
    """The benchmark's report: which of both lists did not come out right, and whether the instance is resolved."""
    by_name = {_TIME.sub("", test): verdict for test, verdict in verdicts.items()} | dict(verdicts)

    def right(test: str, *good: Verdict) -> bool:
        if fail_only:
            return by_name.get(test) != "failed"
        return _verdict(test, by_name) in good

    missed = [test for test in fail_to_pass if not right(test, "passed", "xfailed")]
    broken = [test for test in pass_to_pass if not right(test, "passed", "xfailed", "skipped")]
    return {
        "solved": not missed and not broken,
        "fail_to_pass": {"passed": len(fail_to_pass) - len(missed), "total": len(fail_to_pass)},
        "pass_to_pass": {"passed": len(pass_to_pass) - len(broken), "total": len(pass_to_pass)},
        "missed": missed,
        "broken": broken,
    }


def grade_exactly(verdicts: Mapping[str, Verdict], expected: Mapping[str, str]) -> Json:
    """R2E-Gym's rule: the same tests with the same verdicts, neither more nor less."""
    words = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "skipped": "SKIPPED", "xfailed": "XFAIL"}
    got = {test: words[verdict] for test, verdict in verdicts.items()}
    differing = sorted(test for test in {*got, *expected} if got.get(test) != expected.get(test))
    return {"solved": not differing, "expected": len(expected), "differing": differing}


def _verdict(test: str, verdicts: Mapping[str, Verdict]) -> Verdict | None:
    found = verdicts.get(test) or verdicts.get(_TIME.sub("", test))
    if found is None and test.count("[") > test.count("]"):
        matching = [verdict for name, verdict in verdicts.items() if name.startswith(test)]
        if matching and len({verdict in _GOOD for verdict in matching}) == 1:
            return matching[0]
    return found


def _doubt(verdicts: Mapping[str, Verdict], text: str, status: int | None, fail_only: bool) -> str | None:
    if fail_only and not verdicts and not _RAN.search(text):
        return "the log does not show that the tests ran"
    if verdicts and status not in (0, None) and not any(verdict in _BAD for verdict in verdicts.values()):
        return f"the tests' command exited with {status}, yet its log shows no failure"
    return None


def _sliced(log: str, evaluation: SwebenchEvaluator, exit_code: int) -> tuple[str, int | None]:
    """The tests' own output and exit status; the benchmark's script marks both, since it does more than run tests."""
    if evaluation.eval_script is None:
        return log, exit_code
    found = _EXIT.search(log)
    text = log.partition(_START)[2].partition(_END)[0] if _START in log and _END in log else ""
    return text, int(found[1]) if found else None


async def _put_tests(evaluation: SwebenchEvaluator, task: Task, workspace: Workspace) -> str | None:
    """Put the files of the test patch back to the base commit, then apply it; the reason why that failed, or None."""
    if not evaluation.test_patch.strip():
        return None
    repository = task.environment.repository
    commit = (repository.commit if repository else task.environment.base_commit) or "HEAD"
    for path in patched_files(evaluation.test_patch):
        # What the base does not have, the patch will make: the agent's file of that name has to go.
        script = 'git -c "safe.directory=*" checkout -q "$1" -- "$2" 2>/dev/null || rm -rf -- "$2"'
        await workspace.exec(("sh", "-c", script, "sh", commit, path), timeout=60)
    return await apply_patch(evaluation.test_patch.encode(), workspace)


async def _tests_do_not_apply(evaluation: SwebenchEvaluator, task: Task, fresh: SandboxFactory, why: str) -> Score:
    """Bad work if the tests do apply without it, else a task at fault."""
    async with fresh() as workspace:
        at_fault = await _put_tests(evaluation, task, workspace)
    if at_fault is not None:
        reason = "the task is at fault: its test patch does not apply to its base commit"
        return Score(None, {"no_reward": reason}, at_fault.encode())
    return Score(0.0, {"patch_applied": True, "tests_applied": False, "solved": False}, why.encode())


async def _run(evaluation: SwebenchEvaluator, task: Task, workspace: Workspace) -> tuple[int, bytes, bool]:
    """Exit status, output in its order (both streams in one), whether the time ran out."""
    script = evaluation.eval_script or evaluation.command
    place = f"{workspace.home}/polar-evaluation.sh"
    await workspace.write(place, script.encode())
    result = await workspace.exec(("sh", "-c", f"exec bash {shlex.quote(place)} 2>&1"), timeout=task.timeout_seconds)
    return result.exit_code, result.stdout + result.stderr, result.timed_out
