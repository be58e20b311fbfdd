"""The `harbor` evaluator: solved, half solved and unsolved tasks, and agents that try to write their reward."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from polar_proxy.rewards import EvaluatorError, HarborEvaluator
from polar_proxy.rewards.harbor import files_digest, folder_files, parse_reward
from polar_proxy.rollouts.workspace import TaskNotPossibleError, WorkspaceError
from polar_proxy.tasks import Task, get_source
from tests.rewards.conftest import EXAMPLES, ScriptRunner, needs, with_local_image

pytestmark = pytest.mark.slow

FOLDER = EXAMPLES / "harbor" / "running-mean"
KIND = needs("bubblewrap")
ORACLE = f"sh {FOLDER}/solution/solve.sh"


def task(folder: Path = FOLDER) -> Task:
    return get_source(str(folder)).task(0)


def with_script(tmp_path: Path, script: str) -> Task:
    """Return the example with another tests/test.sh."""
    folder = tmp_path / "task"
    shutil.copytree(FOLDER, folder)
    (folder / "tests" / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    return task(folder)


@pytest.mark.parametrize("kind", [KIND])
async def test_scores_a_full_a_missing_and_a_half_solution(run_script: ScriptRunner, kind: str) -> None:
    solved = await run_script(task(), ORACLE, kind, mount=FOLDER / "solution")
    assert (solved.reward, solved.detail["solved"]) == (1.0, True)
    assert solved.detail["rewards"] == {"reward": 1.0, "program": 1.0, "answer": 1.0}
    idle = await run_script(task(), "true", kind)
    assert (idle.reward, idle.detail["solved"]) == (0.0, False)
    half = await run_script(task(), "printf '6.0\\n9.0\\n6.0\\n6.0\\n' >answer.txt", kind)
    assert half.reward == 0.5


@pytest.mark.parametrize("kind", [KIND])
async def test_ignored_files_and_nested_repositories_count_as_work(
    run_script: ScriptRunner, kind: str, tmp_path: Path
) -> None:
    own = with_script(
        tmp_path,
        "grep -q deep /app/sub/a && [ -x /app/run ] && [ ! -e /app/mean.py ]\n"
        "echo $((1 - $?)) >/logs/verifier/reward.txt",
    )
    script = (
        "echo '*' >.gitignore; git init -q sub; echo deep >sub/a; printf '\\0\\r\\n' >sub/b; git init -q .;"
        "echo '#!/bin/sh' >run; chmod +x run; rm mean.py"
    )
    assert (await run_script(own, script, kind)).reward == 1.0


@pytest.mark.parametrize("kind", [KIND])
@pytest.mark.parametrize(
    "script",
    [
        # the same folders in the agent's own sandbox
        "mkdir -p /logs/verifier /tests; echo 1 >/logs/verifier/reward.txt; "
        "echo 1 >/logs/verifier/reward.json; "
        "printf '#!/bin/sh\\necho 1 >/logs/verifier/reward.txt\\n' >/tests/test.sh; chmod +x /tests/test.sh",
        # a link out of the workspace, through which the patch would write
        "ln -s /logs/verifier out; echo 1 >out/reward.txt 2>/dev/null; true",
        # the program under test keeps running until the script has ended
        "printf 'import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(2)\\n"
        '    open("/logs/verifier/reward.json", "w").write("1")\\n\' >mean.py',
    ],
)
async def test_an_agent_cannot_write_its_reward(run_script: ScriptRunner, kind: str, script: str) -> None:
    assert (await run_script(task(), script, kind)).reward == 0.0


@pytest.mark.parametrize("kind", [KIND])
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 0", "wrote neither"),
        (": >/logs/verifier/reward.txt", "is empty"),
        ("echo nan >/logs/verifier/reward.txt", "not a finite number"),
        ('echo \'{"reward": "1"}\' >/logs/verifier/reward.json', "not a finite number"),
        ('echo \'{"a": 1, "b": 0}\' >/logs/verifier/reward.json', "has no reward; it has: a, b"),
        ("echo 1 >/logs/verifier/reward.txt; kill -9 $$", "killed by signal 9"),
    ],
)
async def test_gives_no_reward_without_a_usable_reward_file(
    run_script: ScriptRunner, kind: str, tmp_path: Path, script: str, why: str
) -> None:
    score = await run_script(with_script(tmp_path, script), "true", kind)
    assert score.reward is None
    assert why in score.detail["no_reward"]


@pytest.mark.parametrize("kind", [KIND])
async def test_gives_no_reward_if_the_script_times_out(run_script: ScriptRunner, kind: str, tmp_path: Path) -> None:
    slow = replace(with_script(tmp_path, "echo 1 >/logs/verifier/reward.txt; sleep 60"), timeout_seconds=0.5)
    score = await run_script(slow, "true", kind)
    assert score.reward is None
    assert score.detail["timed_out"]


@pytest.mark.parametrize("kind", [KIND])
async def test_refuses_tests_that_changed_since_they_were_read(
    run_script: ScriptRunner, kind: str, tmp_path: Path
) -> None:
    own = with_script(tmp_path, "echo 1 >/logs/verifier/reward.txt")
    (tmp_path / "task" / "tests" / "more.py").write_text("")
    with pytest.raises(EvaluatorError, match="has changed"):
        await run_script(own, "true", kind)


async def test_names_the_sandbox_that_a_task_needs(run_script: ScriptRunner) -> None:
    with pytest.raises(TaskNotPossibleError, match="process sandbox has no file system of its own"):
        await run_script(task(), "true", "process")
    built = replace(task(), environment=replace(task().environment, without_image=False))
    for kind in ("process", "bubblewrap"):
        with pytest.raises(TaskNotPossibleError, match="needs docker: its workspace comes from the Dockerfile"):
            await run_script(built, "true", kind)


@pytest.mark.parametrize("kind", [needs("docker")])
async def test_docker_builds_the_image_from_the_dockerfile(run_script: ScriptRunner, kind: str, tmp_path: Path) -> None:
    folder = with_local_image(FOLDER, tmp_path / "task")
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "RUN echo built >built\n")
    own = task(folder)
    solved = await run_script(own, f"grep -q built built && {ORACLE}", kind, mount=FOLDER / "solution")
    assert solved.reward == 1.0
    assert (await run_script(own, "true", kind)).reward == 0.0
    dockerfile.write_text(dockerfile.read_text() + "RUN exit 3\n")
    with pytest.raises(WorkspaceError, match=r"the image of .* cannot be built"):
        await run_script(task(folder), "true", kind)


def test_parses_reward_files() -> None:
    assert parse_reward("reward.txt", "0.25\n") == {"reward": 0.25}
    assert parse_reward("reward.json", "-3") == {"reward": -3.0}
    assert parse_reward("reward.json", '{"x": 1}') == {"x": 1.0}
    for name, text in (("reward.txt", "one"), ("reward.json", "[1]"), ("reward.json", "1e999"), ("reward.json", "")):
        with pytest.raises(ValueError):
            parse_reward(name, text)


def test_the_digest_covers_names_modes_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    seen = {files_digest(folder_files(tmp_path))}
    (tmp_path / "a").chmod(0o755)
    seen.add(files_digest(folder_files(tmp_path)))
    (tmp_path / "a").write_text("y")
    seen.add(files_digest(folder_files(tmp_path)))
    (tmp_path / "b").write_text("")
    seen.add(files_digest(folder_files(tmp_path)))
    assert len(seen) == 4
    assert isinstance(task().evaluators[0], HarborEvaluator)
