"""The `swebench` evaluator: rows in the form of SWE-bench's, graded by its rules."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from polar_proxy.rewards import SwebenchEvaluator
from polar_proxy.rewards.hidden_tests import grade, grade_exactly
from polar_proxy.tasks import Environment, Task, get_source
from sandboxes import images
from tests.rewards.conftest import EXAMPLES, ScriptRunner, needs

pytestmark = pytest.mark.slow

ROWS = EXAMPLES / "swebench"
KINDS = [needs("process"), needs("bubblewrap"), needs("docker")]


def task(number: int = 0) -> Task:
    return get_source(str(ROWS / "rows.jsonl")).task(number)


def gold(number: int = 0) -> str:
    return f"git apply {ROWS}/example__tally-{number + 1}.gold.patch"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 1])
async def test_only_the_gold_patch_resolves_a_task(run_script: ScriptRunner, kind: str, number: int) -> None:
    solved = await run_script(task(number), gold(number), kind, mount=ROWS)
    assert (solved.reward, solved.detail["solved"]) == (1.0, True)
    assert solved.detail["fail_to_pass"] == {"passed": 1, "total": 1}
    idle = await run_script(task(number), "true", kind)
    assert (idle.reward, idle.detail["missed"]) == (0.0, list(task(number).fail_to_pass))
    assert idle.detail["broken"] == []


async def test_a_fix_that_breaks_something_else_is_not_resolved(run_script: ScriptRunner) -> None:
    script = f"{gold()} && sed -i 's/, 0) + 1/, 1) + 1/' tally.py"
    score = await run_script(task(), script, mount=ROWS)
    assert score.reward == 0.0
    assert score.detail["broken"] == ["tests.test_count.TestCount.test_counts"]


@pytest.mark.parametrize(
    "script",
    [
        # overwrite existing tests and the paths of the hidden ones
        "for f in tests/test_count.py tests/test_most_common.py; do printf 'import unittest\\n' >$f; done",
        "mkdir -p tests/test_most_common.py && touch tests/test_most_common.py/x",
        "rm -rf tests && echo >tests",
        "rm -rf tests && ln -s . tests",
        # a test that prints that others passed
        'printf \'import sys\\nprint("test_order (tests.test_most_common.TestMostCommon.test_order) ... ok", '
        "file=sys.stderr)\\n' >>tests/__init__.py",
        "rm -rf .git",
        "git commit -q --allow-empty -m x; git update-ref -d HEAD",
    ],
)
async def test_tests_cannot_be_replaced_or_destroyed(run_script: ScriptRunner, script: str) -> None:
    assert (await run_script(task(), script)).reward == 0.0


async def test_agent_tests_of_the_same_name_do_not_break_a_right_fix(run_script: ScriptRunner) -> None:
    script = f"{gold()} && echo 'raise SystemExit(0)' >tests/test_most_common.py"
    assert (await run_script(task(), script, mount=ROWS)).reward == 1.0


async def test_gives_no_reward_if_the_test_patch_never_applies(run_script: ScriptRunner) -> None:
    (evaluator,) = task().evaluators
    assert isinstance(evaluator, SwebenchEvaluator)
    broken = replace(evaluator, test_patch="diff --git a/no b/no\n--- a/no\n+++ b/no\n@@ -1 +1 @@\n-x\n+y\n")
    score = await run_script(replace(task(), evaluators=(broken,)), gold(), mount=ROWS)
    assert score.reward is None
    assert "at fault" in score.detail["no_reward"]


async def test_grades_the_marked_output_of_the_benchmarks_own_script(run_script: ScriptRunner) -> None:
    (evaluator,) = task().evaluators
    assert isinstance(evaluator, SwebenchEvaluator)
    script = f"""
    echo 'test_order (tests.test_most_common.TestMostCommon.test_order) ... FAIL'
    git apply - <<'EOF_114329324912'
{evaluator.test_patch}EOF_114329324912
    set -x
    : '>>>>> Start Test Output'
    {evaluator.command}
    code=$?
    : '>>>>> End Test Output'
    echo ">>>>> Test Exit Code: $code"
    """
    own = replace(task(), evaluators=(SwebenchEvaluator(eval_script=script, parser="unittest"),))
    solved = await run_script(own, gold(), mount=ROWS)
    assert (solved.reward, solved.detail["exit_code"]) == (1.0, 0)
    assert (await run_script(own, "true")).reward == 0.0


async def test_distrusts_a_failing_exit_without_a_failing_test(run_script: ScriptRunner) -> None:
    names = task().fail_to_pass + task().pass_to_pass
    claims = "".join(f"echo '{n.rpartition('.')[2]} ({n}) ... ok'\n" for n in names)
    own = replace(task(), evaluators=(SwebenchEvaluator(command=claims + "exit 1", parser="unittest"),))
    score = await run_script(own, "true")
    assert score.reward == 0.0
    assert "exited with 1" in score.detail["not_believed"]


def test_grades_by_the_benchmarks_rules() -> None:
    def solved(verdicts: dict[str, str], **more: bool) -> bool:
        return bool(grade(verdicts, ("a",), ("b",), fail_only=more.get("fail_only", False))["solved"])  # type: ignore[arg-type]

    assert solved({"a": "passed", "b": "passed"})
    assert solved({"a": "xfailed", "b": "skipped"})
    assert not solved({"a": "skipped", "b": "passed"})
    assert not solved({"a": "passed"})
    assert not solved({"b": "passed"})
    assert not solved({"a": "passed", "b": "error"})
    assert solved({}, fail_only=True)
    assert not solved({"b": "failed"}, fail_only=True)
    assert grade({"t[x y]": "failed"}, ("t[x",), (), fail_only=True)["solved"]  # fail_only does not match cut names
    # Names that the data set cut inside their brackets, and names that contain a duration.
    cut = {"t[log(photon s^-1]": "passed", "t[log(photon cm]": "passed", "b": "passed"}
    assert grade(cut, ("t[log(photon",), ("b",), fail_only=False)["solved"]  # type: ignore[arg-type]
    mixed = {**cut, "t[log(photon cm]": "failed"}
    assert not grade(mixed, ("t[log(photon",), ("b",), fail_only=False)["solved"]  # type: ignore[arg-type]
    timed = {"a (12 ms)": "passed", "b": "passed"}
    assert grade(timed, ("a (3 ms)",), ("b",), fail_only=False)["solved"]  # type: ignore[arg-type]


def test_r2e_gym_requires_exactly_the_expected_verdicts() -> None:
    expected = {"T.a": "PASSED", "T.b": "FAILED"}
    assert grade_exactly({"T.a": "passed", "T.b": "failed"}, expected)["solved"]
    for other in (
        {"T.a": "passed", "T.b": "passed"},
        {"T.a": "passed"},
        {"T.a": "passed", "T.b": "failed", "c": "passed"},
    ):
        assert not grade_exactly(other, expected)["solved"]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [needs("docker")])
async def test_docker_uses_the_repository_of_the_image(run_script: ScriptRunner, kind: str, tmp_path: Path) -> None:
    """Like the data sets' images: a clone with its full history at /testbed, reset to the base commit."""
    given = task()
    assert given.environment.repository is not None
    base = given.environment.repository.commit
    shutil.copy(ROWS / "tally.bundle", tmp_path)
    (tmp_path / "Dockerfile").write_text(
        f"FROM {images.tag()}\nCOPY tally.bundle /\nRUN git clone -q /tally.bundle /testbed && cd /testbed"
        f" && git checkout -q {base} && echo built >built.txt && mkdir /r2e_tests\nWORKDIR /testbed\n"
    )
    environment = Environment(
        build=str(tmp_path), workdir="/testbed", base_commit=base, hide=("/tally.bundle", "/r2e_tests")
    )
    own = replace(given, environment=environment)
    secrets = (
        "! git log --all --format=%s | grep 'most frequent first' && [ ! -e /tally.bundle ] && [ ! -e /r2e_tests ]"
    )
    solved = await run_script(own, f"{secrets} && grep -q built built.txt && {gold()}", kind, mount=ROWS)
    assert (solved.reward, "signs" in solved.detail) == (1.0, False)
    assert (await run_script(own, "true", kind)).reward == 0.0
