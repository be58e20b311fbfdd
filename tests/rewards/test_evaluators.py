"""`tests`, `command` and `python`, several together, and the difference between no reward and 0."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from polar_proxy.rewards import (
    EvaluationInput,
    EvaluatorError,
    Score,
    Workspace,
    combine_scores,
    evaluate,
    reward_source,
    scoring_seconds,
)
from polar_proxy.rewards.python import python
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.tasks import Task, get_source
from polar_proxy.tasks.evaluation import CommandEvaluator, HiddenTestsEvaluator, PythonEvaluator
from tests.rewards.conftest import EXAMPLES, Try, needs

SOURCE = get_source(str(EXAMPLES / "jsonl" / "tasks.jsonl"))
GREET, SORTED, SHORT = (SOURCE.task(number) for number in range(3))
FIX = "printf 'import sys\\nprint(f\"Hello, {sys.argv[1]}!\")\\n' >greet.py"


@pytest.mark.parametrize("kind", [needs("process"), needs("bubblewrap")])
async def test_named_tests(attempt: Try, kind: str) -> None:
    assert (await attempt(GREET, FIX, kind)).reward == 1.0
    idle = await attempt(GREET, "true", kind)
    assert (idle.reward, idle.detail["missed"]) == (0.0, ["test_greet.TestGreet.test_name"])
    # A hidden test is written over what the agent put in its place.
    assert (await attempt(GREET, f"echo 'x = 1' >test_greet.py; {FIX}", kind)).reward == 1.0


async def test_a_task_whose_tests_are_green_before_the_fix_gives_no_reward(attempt: Try) -> None:
    fixed = replace(GREET, files={"greet.py": 'import sys\nprint(f"Hello, {sys.argv[1]}!")\n'})
    score = await attempt(fixed, "true")
    assert score.reward is None
    assert score.detail["already_green"] == ["test_greet.TestGreet.test_name"]
    unchecked = replace(fixed, evaluators=(HiddenTestsEvaluator(),))
    assert (await attempt(unchecked, "true")).reward == 1.0


async def test_a_command_by_its_exit_status(attempt: Try) -> None:
    assert (await attempt(SORTED, "sort words.txt >sorted.txt")).reward == 1.0
    assert (await attempt(SORTED, "cp words.txt sorted.txt")).reward == 0.0
    slow = replace(SORTED, timeout_seconds=0.3, evaluators=(CommandEvaluator(("sleep", "30")),))
    assert (await attempt(slow, "true")).reward == 0.0


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
async def test_a_command_by_its_last_line(attempt: Try, script: str, reward: float | None) -> None:
    own = replace(
        SORTED, evaluators=(CommandEvaluator(("sh", "judge.sh"), files={"judge.sh": script}, reward="last_line"),)
    )
    score = await attempt(own, "echo 'echo 1' >judge.sh")
    assert score.reward == reward
    assert ("no_reward" in score.detail) == (reward is None)
    assert (
        await attempt(replace(own, evaluators=(CommandEvaluator(("false",), reward="last_line"),)), "true")
    ).reward is None


async def test_several_by_weight(attempt: Try) -> None:
    score = await attempt(SHORT, "echo 'print(42)' >answer.py")
    assert score.reward == pytest.approx((3 * 1.0 + 1 * 0.9) / 4)
    assert [part["kind"] for part in score.detail["parts"]] == ["command", "python"]
    assert reward_source(SHORT) == "command+python"
    wrong = await attempt(SHORT, "echo 'print(41)' >answer.py")
    assert wrong.reward == pytest.approx(0.9 / 4)


async def test_a_part_without_a_reward_leaves_the_whole_without_one(attempt: Try) -> None:
    silent = CommandEvaluator(("true",), reward="last_line")
    score = await attempt(replace(SORTED, evaluators=(*SORTED.evaluators, silent)), "sort words.txt >sorted.txt")
    assert score.reward is None
    assert [part["reward"] for part in score.detail["parts"]] == [1.0, None]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_patch_that_does_not_apply_is_bad_work(number: int) -> None:
    task = SOURCE.task(number)
    environments = TaskSandboxes("process")
    for patch in (
        b"no patch at all",
        b"--- a/../x\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n",
        b"diff --git a/.git/config b/.git/config\nnew file mode 100644\n"
        b"--- /dev/null\n+++ b/.git/config\n@@ -0,0 +1 @@\n+x\n",
    ):
        score = await evaluate(EvaluationInput(task, patch, 0), lambda: environments.fresh(task, {}))
        assert (score.reward, score.detail["patch_applied"]) == (0.0, False)


# ---------------------------------------------------------------- python


def whole(attempt: EvaluationInput, factor: float = 1.0) -> float:
    return factor * len(attempt.patch)


def nothing(attempt: EvaluationInput) -> None:
    return None


def by_call(attempt: EvaluationInput) -> Score:
    return Score(None, {"why": "calls only"}, calls={call.call_id: 0.5 for call in attempt.calls})


def stranger(attempt: EvaluationInput) -> Score:
    return Score(1.0, calls={"call-of-another-run": 1.0})


def broken(attempt: EvaluationInput) -> float:
    raise ValueError("a bug")


def infinite(attempt: EvaluationInput) -> float:
    return float("inf")


async def reads(attempt: EvaluationInput, workspace: Workspace) -> float:
    return float((await workspace.read(f"{workspace.workdir}/words.txt")).count(b"\n"))


def judged_by(name: str, **options: object) -> Task:
    return replace(SORTED, evaluators=(PythonEvaluator(f"{__name__}:{name}", options=options),))


async def test_python_functions(attempt: Try) -> None:
    assert (await attempt(judged_by("whole"), "true")).reward == 0.0
    assert (await attempt(judged_by("whole", factor=0.5), "echo x >y")).reward > 10
    assert (await attempt(judged_by("nothing"), "true")).reward is None
    assert (await attempt(judged_by("reads"), "echo z >>words.txt")).reward == 4.0
    for name, words in (("broken", "ValueError: a bug"), ("infinite", "finite"), ("stranger", "no call of this")):
        with pytest.raises(EvaluatorError, match=words):
            await attempt(judged_by(name), "true")


async def test_single_calls_are_rewarded() -> None:
    calls = [SimpleNamespace(call_id=name) for name in ("call-1", "call-2")]
    task = judged_by("by_call")
    evaluation = task.evaluators[0]
    assert isinstance(evaluation, PythonEvaluator)
    score = await python(evaluation, EvaluationInput(task, b"", 0, calls), lambda: pytest.fail("no sandbox is needed"))  # type: ignore[arg-type]
    assert (score.reward, score.calls) == (None, {"call-1": 0.5, "call-2": 0.5})
    both = combine_scores(
        (PythonEvaluator("a:b", weight=1), PythonEvaluator("a:b", weight=3)),
        (Score(1.0, calls={"call-1": 1.0}), Score(0.0, calls={"call-1": 0.0, "call-2": None})),
    )
    assert both.reward == 0.25
    assert both.calls == {"call-1": 0.25, "call-2": None}


def test_the_budget_counts_every_run_of_the_tests() -> None:
    assert scoring_seconds(SORTED) == 30
    assert scoring_seconds(SHORT) == 60
    assert scoring_seconds(GREET) == 60  # before and after
