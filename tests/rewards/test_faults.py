"""Work that breaks its evaluation scores 0; a task or a machine at fault gives no reward."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from polar_proxy.allowed_code import AllowedCode
from polar_proxy.rewards import (
    CommandEvaluator,
    EvaluationInput,
    EvaluatorError,
    PythonEvaluator,
    SandboxFactory,
    Score,
    Workspace,
)
from polar_proxy.rollouts.infrastructure import InfrastructureError
from polar_proxy.rollouts.scoring import score_work
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.tasks import Task, get_source
from sandboxes.base import SandboxEnded
from tests.rewards.conftest import EXAMPLES, ScriptRunner, needs
from tests.rewards.test_harbor import with_script

pytestmark = pytest.mark.slow

CONFINED = [needs("bubblewrap"), needs("docker")]
FAMILY = get_source("swe-task").task(0)
GREET = get_source(str(EXAMPLES / "jsonl" / "tasks.jsonl")).task(0)
PATCH = b"diff --git a/new b/new\nnew file mode 100644\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n"
BROKEN_BY_PATCH = replace(GREET, hidden_files={}, evaluators=(CommandEvaluator(("sh", "-c", "! test -e new")),))


def with_last_line(script: str) -> Task:
    return replace(GREET, hidden_files={}, evaluators=(CommandEvaluator(("sh", "-c", script), reward="last_line"),))


@pytest.mark.parametrize("kind", [needs("process"), *CONFINED])
async def test_a_patch_that_takes_the_verdict_away_scores_0(run_script: ScriptRunner, kind: str) -> None:
    task = with_last_line("test -e x && kill -9 $$; echo 0.5")
    assert (await run_script(task, "true", kind)).reward == 0.5
    score = await run_script(task, "echo x >x", kind)
    assert (score.reward, score.detail["solved"]) == (0.0, False)
    assert "it exited with 137" in score.detail["broke_evaluation"]
    faulty = await run_script(with_last_line("echo null"), "echo x >x", kind)
    assert faulty.reward is None
    assert "it printed null" in faulty.detail["no_reward"]


@pytest.mark.parametrize("kind", CONFINED)
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(-1, 9)",
        "import subprocess; subprocess.run(['sh', '-c', 'for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done'])",
        "import os; os.kill(os.getppid(), 9)",
        "x = bytearray(1 << 40)",
        "f = open('/tmp/full', 'wb')\nfor _ in range(4096): f.write(bytes(1 << 20))",
    ],
    ids=["everything", "each-process", "parent", "memory", "disk"],
)
async def test_code_that_ends_its_evaluation_scores_0(run_script: ScriptRunner, kind: str, code: str) -> None:
    package = next(name for name in sorted(FAMILY.files) if name.endswith("/__init__.py"))
    score = await run_script(FAMILY, f"cat >>{package} <<'EOF'\n{code}\nEOF", kind)
    assert score.reward == 0.0


@pytest.mark.parametrize("kind", [needs("bubblewrap")])
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("python3 /app/mean.py; echo 1 >/logs/verifier/reward.txt", "killed by signal"),
        ("echo 0 >/logs/verifier/reward.txt; python3 /app/mean.py", "reward.json and reward.txt"),
        ("echo 0 >/logs/verifier/reward.txt; python3 /app/mean.py", "a regular file"),
    ],
    ids=["kills", "writes-the-other-file", "link"],
)
async def test_a_harbor_evaluation_that_the_patch_breaks_scores_0(
    run_script: ScriptRunner, kind: str, tmp_path: Path, script: str, expected: str
) -> None:
    attack = {
        "killed by signal": "import os; os.kill(-1, 9)",
        "reward.json and reward.txt": 'open("/logs/verifier/reward.json", "w").write("1")',
        "a regular file": 'import os; p = "/logs/verifier/reward.txt"; os.unlink(p); os.symlink("/etc/hostname", p)',
    }[expected]
    task = with_script(tmp_path, script)
    score = await run_script(task, f"cat >mean.py <<'EOF'\n{attack}\nEOF", kind)
    assert score.reward == 0.0
    assert expected in score.detail["broke_evaluation"]


def failing(task: Task, failures: list[bool]) -> SandboxFactory:
    """Return a factory whose n-th sandbox has died if `failures[n]`."""
    sandboxes = TaskSandboxes("process")

    @contextlib.asynccontextmanager
    async def fresh() -> AsyncIterator[Workspace]:
        if failures.pop(0):
            raise SandboxEnded("the sandbox died")
        async with sandboxes.fresh(task, {}) as workspace:
            yield workspace

    return fresh


async def test_a_machine_at_fault_is_not_held_against_the_patch() -> None:
    work = EvaluationInput(BROKEN_BY_PATCH, PATCH)
    with pytest.raises(InfrastructureError, match="the sandbox died"):  # the control fails as well
        await score_work(work, failing(BROKEN_BY_PATCH, [True, True]))
    with pytest.raises(InfrastructureError):  # without a patch there is nothing to compare
        await score_work(replace(work, patch=b""), failing(BROKEN_BY_PATCH, [True]))
    passed = await score_work(replace(work, patch=b"\n"), failing(BROKEN_BY_PATCH, [False]))
    assert passed.reward == 1.0
    recovered = await score_work(work, failing(BROKEN_BY_PATCH, [True, False, False]))
    assert (recovered.reward, recovered.detail["exit_code"]) == (0.0, 1)
    blamed = await score_work(work, failing(BROKEN_BY_PATCH, [True, False, True]))
    assert (blamed.reward, blamed.detail) == (0.0, {"solved": False, "broke_evaluation": "the sandbox died"})


async def test_a_patch_that_first_fails_and_then_takes_the_verdict_away_scores_0() -> None:
    task = with_last_line("test -e new && kill -9 $$; echo 0.5")
    score = await score_work(EvaluationInput(task, PATCH), failing(task, [True, False, False]))
    assert (score.reward, score.detail["solved"]) == (0.0, False)
    assert "it exited with 137" in score.detail["broke_evaluation"]


def brittle_judge(work: EvaluationInput, fails_on: str) -> float | None:
    """Raise an exception, or withhold the reward, for a patch or for any work."""
    if fails_on == "any work" or (fails_on == "a patch" and work.patch):
        raise ValueError("the work is not as expected")
    return None if fails_on == "nothing" and work.patch else 0.5


async def judged(fails_on: str, *others: CommandEvaluator) -> Score:
    function = f"{__name__}:brittle_judge"
    evaluators = (*others, PythonEvaluator(function, options={"fails_on": fails_on}))
    task = replace(GREET, hidden_files={}, evaluators=evaluators)
    work = EvaluationInput(task, PATCH, code=AllowedCode([function]))
    return await score_work(work, failing(task, [False] * 8))


async def test_work_that_makes_the_tasks_function_fail_scores_0() -> None:
    score = await judged("a patch")
    assert (score.reward, score.detail["solved"]) == (0.0, False)
    assert "the work is not as expected" in score.detail["broke_evaluation"]
    with pytest.raises(EvaluatorError, match="the work is not as expected"):
        await judged("any work")


async def test_only_the_tasks_function_may_withhold_the_reward() -> None:
    assert (await judged("nothing")).reward is None
    passes = CommandEvaluator(("sh", "-c", "echo 1"), reward="last_line")
    assert (await judged("nothing", passes)).reward is None
    broken = CommandEvaluator(("sh", "-c", "test -e new && kill -9 $$; echo 1"), reward="last_line")
    score = await judged("nothing", broken)
    assert (score.reward, score.detail["solved"]) == (0.0, False)
    never = CommandEvaluator(("sh", "-c", "echo null"), reward="last_line")
    assert (await judged("no reason", never)).reward is None
