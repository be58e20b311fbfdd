"""The evaluators `tests`, `command` and `python`, their combination, and the difference between no reward and 0."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from polar_proxy.allowed_code import NO_CODE
from polar_proxy.rewards import (
    CommandEvaluator,
    EvaluationInput,
    EvaluatorError,
    HiddenTestsEvaluator,
    PythonEvaluator,
    Score,
    Workspace,
    evaluate,
    reward_source,
    scoring_seconds,
)
from polar_proxy.rewards.evaluate import combine_scores
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.tasks import Task, get_source
from tests.rewards.conftest import EXAMPLES, ScriptRunner, needs

pytestmark = pytest.mark.slow

SOURCE = get_source(str(EXAMPLES / "jsonl" / "tasks.jsonl"), NO_CODE.including("examples.tasks.judges:shortness"))
GREET, SORTED, SHORT = (SOURCE.task(number) for number in range(3))
FIX = "printf 'import sys\\nprint(f\"Hello, {sys.argv[1]}!\")\\n' >greet.py"


@pytest.mark.parametrize("kind", [needs("process"), needs("bubblewrap")])
async def test_scores_by_named_tests(run_script: ScriptRunner, kind: str) -> None:
    assert (await run_script(GREET, FIX, kind)).reward == 1.0
    idle = await run_script(GREET, "true", kind)
    assert (idle.reward, idle.detail["missed"]) == (0.0, ["test_greet.TestGreet.test_name"])
    # Hidden tests overwrite files that the agent puts in their place.
    assert (await run_script(GREET, f"echo 'x = 1' >test_greet.py; {FIX}", kind)).reward == 1.0


async def test_gives_no_reward_if_the_tests_pass_before_the_fix(run_script: ScriptRunner) -> None:
    fixed = replace(GREET, files={"greet.py": 'import sys\nprint(f"Hello, {sys.argv[1]}!")\n'})
    score = await run_script(fixed, "true")
    assert score.reward is None
    assert score.detail["already_green"] == ["test_greet.TestGreet.test_name"]
    unchecked = replace(fixed, evaluators=(HiddenTestsEvaluator(),))
    assert (await run_script(unchecked, "true")).reward == 1.0


async def test_scores_by_exit_status(run_script: ScriptRunner) -> None:
    assert (await run_script(SORTED, "sort words.txt >sorted.txt")).reward == 1.0
    assert (await run_script(SORTED, "cp words.txt sorted.txt")).reward == 0.0
    slow = replace(SORTED, timeout_seconds=0.3, evaluators=(CommandEvaluator(("sleep", "30")),))
    assert (await run_script(slow, "true")).reward == 0.0


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("echo noise; echo 0.75; echo", 0.75),
        ("echo null", None),
        ("echo good", None),
        ("true", None),
        ("echo inf", None),
    ],
)
async def test_scores_by_last_line(run_script: ScriptRunner, script: str, reward: float | None) -> None:
    own = replace(
        SORTED, evaluators=(CommandEvaluator(("sh", "judge.sh"), files={"judge.sh": script}, reward="last_line"),)
    )
    score = await run_script(own, "echo 'echo 1' >judge.sh")
    assert score.reward == reward
    assert ("no_reward" in score.detail) == (reward is None)
    assert (
        await run_script(replace(own, evaluators=(CommandEvaluator(("false",), reward="last_line"),)), "true")
    ).reward is None


async def test_several_evaluators_give_their_weighted_mean(run_script: ScriptRunner) -> None:
    score = await run_script(SHORT, "echo 'print(42)' >answer.py")
    assert score.reward == pytest.approx((3 * 1.0 + 1 * 0.9) / 4)
    assert [part["kind"] for part in score.detail["parts"]] == ["command", "python"]
    assert reward_source(SHORT) == "command+python"
    wrong = await run_script(SHORT, "echo 'print(41)' >answer.py")
    assert wrong.reward == pytest.approx(0.9 / 4)


async def test_one_missing_reward_leaves_no_reward(run_script: ScriptRunner) -> None:
    silent = CommandEvaluator(("true",), reward="last_line")
    score = await run_script(replace(SORTED, evaluators=(*SORTED.evaluators, silent)), "sort words.txt >sorted.txt")
    assert score.reward is None
    assert [part["reward"] for part in score.detail["parts"]] == [1.0, None]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_patch_that_does_not_apply_scores_0(number: int) -> None:
    task = SOURCE.task(number)
    task_sandboxes = TaskSandboxes("process")
    for patch in (
        b"no patch at all",
        b"--- a/../x\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n",
        b"diff --git a/.git/config b/.git/config\nnew file mode 100644\n"
        b"--- /dev/null\n+++ b/.git/config\n@@ -0,0 +1 @@\n+x\n",
    ):
        score = await evaluate(
            EvaluationInput(task, patch, 0, code=NO_CODE.including(*task.code_names)),
            lambda: task_sandboxes.fresh(task, {}),
        )
        assert (score.reward, score.detail["patch_applied"]) == (0.0, False)


def patch_length(work: EvaluationInput, factor: float = 1.0) -> float:
    return factor * len(work.patch)


def no_reward(work: EvaluationInput) -> None:
    return None


def by_call(work: EvaluationInput) -> Score:
    return Score(None, {"why": "calls only"}, call_rewards={call.call_id: 0.5 for call in work.calls})


def cautious(work: EvaluationInput) -> Score:
    return Score(1.0, {"why": "odd"}, signs=("prints_answers",))


def unknown_call(work: EvaluationInput) -> Score:
    return Score(1.0, call_rewards={"call-of-another-run": 1.0})


def broken(work: EvaluationInput) -> float:
    raise ValueError("a bug")


def infinite(work: EvaluationInput) -> float:
    return float("inf")


async def counts_lines(work: EvaluationInput, workspace: Workspace) -> float:
    return float((await workspace.read(f"{workspace.workdir}/words.txt")).count(b"\n"))


def task_with_function(name: str, **options: object) -> Task:
    return replace(SORTED, evaluators=(PythonEvaluator(f"{__name__}:{name}", options=options),))


async def test_scores_by_python_function(run_script: ScriptRunner) -> None:
    assert (await run_script(task_with_function("patch_length"), "true")).reward == 0.0
    assert (await run_script(task_with_function("patch_length", factor=0.5), "echo x >y")).reward > 10
    assert (await run_script(task_with_function("no_reward"), "true")).reward is None
    assert (await run_script(task_with_function("counts_lines"), "echo z >>words.txt")).reward == 4.0
    for name, words in (
        ("broken", "ValueError: a bug"),
        ("infinite", "finite"),
        ("unknown_call", "not a call of this"),
    ):
        with pytest.raises(EvaluatorError, match=words):
            await run_script(task_with_function(name), "true")


async def test_keeps_the_signs_that_an_evaluator_reports(run_script: ScriptRunner) -> None:
    score = await run_script(task_with_function("cautious"), "true")
    assert (score.reward, score.detail) == (1.0, {"why": "odd", "signs": ["prints_answers"]})


async def test_rewards_single_calls() -> None:
    calls = [SimpleNamespace(call_id=name) for name in ("call-1", "call-2")]
    task = task_with_function("by_call")
    work = EvaluationInput(task, b"", 0, calls, code=NO_CODE.including(*task.code_names))  # type: ignore[arg-type]
    score = await task.evaluators[0].score(work, lambda: pytest.fail("no sandbox is needed"))
    assert (score.reward, score.call_rewards) == (None, {"call-1": 0.5, "call-2": 0.5})
    both = combine_scores(
        (PythonEvaluator("a:b", weight=1), PythonEvaluator("a:b", weight=3)),
        (Score(1.0, call_rewards={"call-1": 1.0}), Score(0.0, call_rewards={"call-1": 0.0, "call-2": None})),
    )
    assert both.reward == 0.25
    assert both.call_rewards == {"call-1": 0.25, "call-2": None}


def test_scoring_seconds_count_every_run() -> None:
    assert scoring_seconds(SORTED) == 30
    assert scoring_seconds(SHORT) == 60
    assert scoring_seconds(GREET) == 60  # before and after
