"""Harbor folders: solved, half solved, unsolved, and agents that reach for the reward."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from polar_proxy.rewards import EvaluatorError
from polar_proxy.rewards.harbor import parse_reward
from polar_proxy.rollouts.git import WorkspaceError
from polar_proxy.rollouts.workspace import TaskNotPossibleError
from polar_proxy.tasks import Task, get_source
from polar_proxy.tasks.evaluation import HarborEvaluator
from polar_proxy.tasks.harbor import folder_digest
from tests.rewards.conftest import EXAMPLES, Try, needs, with_local_image

FOLDER = EXAMPLES / "harbor" / "running-mean"
KIND = needs("bubblewrap")
ORACLE = f"sh {FOLDER}/solution/solve.sh"


def task(folder: Path = FOLDER) -> Task:
    return get_source(str(folder)).task(0)


def with_script(tmp_path: Path, script: str) -> Task:
    """The example with another tests/test.sh."""
    folder = tmp_path / "task"
    shutil.copytree(FOLDER, folder)
    (folder / "tests" / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
    return task(folder)


@pytest.mark.parametrize("kind", [KIND])
async def test_oracle_noop_and_half_of_it(attempt: Try, kind: str) -> None:
    solved = await attempt(task(), ORACLE, kind, mount=FOLDER / "solution")
    assert (solved.reward, solved.detail["solved"]) == (1.0, True)
    assert solved.detail["rewards"] == {"reward": 1.0, "program": 1.0, "answer": 1.0}
    idle = await attempt(task(), "true", kind)
    assert (idle.reward, idle.detail["solved"]) == (0.0, False)
    half = await attempt(task(), "printf '6.0\\n9.0\\n6.0\\n6.0\\n' >answer.txt", kind)
    assert half.reward == 0.5


@pytest.mark.parametrize("kind", [KIND])
async def test_files_that_git_ignores_and_other_repositories_are_work(attempt: Try, kind: str, tmp_path: Path) -> None:
    own = with_script(
        tmp_path,
        "grep -q deep /app/sub/a && [ -x /app/run ] && [ ! -e /app/mean.py ]\n"
        "echo $((1 - $?)) >/logs/verifier/reward.txt",
    )
    script = (
        "echo '*' >.gitignore; git init -q sub; echo deep >sub/a; printf '\\0\\r\\n' >sub/b; git init -q .;"
        "echo '#!/bin/sh' >run; chmod +x run; rm mean.py"
    )
    assert (await attempt(own, script, kind)).reward == 1.0


@pytest.mark.parametrize("kind", [KIND])
@pytest.mark.parametrize(
    "script",
    [
        # its own sandbox has these folders too; they are not those of the evaluator
        "mkdir -p /logs/verifier /tests; echo 1 >/logs/verifier/reward.txt; "
        "echo 1 >/logs/verifier/reward.json; "
        "printf '#!/bin/sh\\necho 1 >/logs/verifier/reward.txt\\n' >/tests/test.sh; chmod +x /tests/test.sh",
        # a link out of the workspace, through which the patch would write
        "ln -s /logs/verifier out; echo 1 >out/reward.txt 2>/dev/null; true",
        # the program under test stays behind and waits for the script's end
        "printf 'import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(20)\\n"
        '    open("/logs/verifier/reward.json", "w").write("1")\\n\' >mean.py',
    ],
)
async def test_an_agent_cannot_write_its_reward(attempt: Try, kind: str, script: str) -> None:
    assert (await attempt(task(), script, kind)).reward == 0.0


@pytest.mark.parametrize("kind", [KIND])
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 0", "wrote neither"),
        (": >/logs/verifier/reward.txt", "is empty"),
        ("echo nan >/logs/verifier/reward.txt", "no finite number"),
        ('echo \'{"reward": "1"}\' >/logs/verifier/reward.json', "no finite number"),
        ('echo \'{"a": 1, "b": 0}\' >/logs/verifier/reward.json', "none is called reward"),
        ("echo 1 >/logs/verifier/reward.txt; kill -9 $$", "ended by signal 9"),
    ],
)
async def test_no_reward_is_not_0(attempt: Try, kind: str, tmp_path: Path, script: str, why: str) -> None:
    score = await attempt(with_script(tmp_path, script), "true", kind)
    assert score.reward is None
    assert why in score.detail["no_reward"]


@pytest.mark.parametrize("kind", [KIND])
async def test_a_script_out_of_time_is_no_reward(attempt: Try, kind: str, tmp_path: Path) -> None:
    slow = replace(with_script(tmp_path, "echo 1 >/logs/verifier/reward.txt; sleep 60"), timeout_seconds=0.5)
    score = await attempt(slow, "true", kind)
    assert score.reward is None
    assert score.detail["timed_out"]


@pytest.mark.parametrize("kind", [KIND])
async def test_tests_that_changed_since_they_were_read_are_not_run(attempt: Try, kind: str, tmp_path: Path) -> None:
    own = with_script(tmp_path, "echo 1 >/logs/verifier/reward.txt")
    (tmp_path / "task" / "tests" / "more.py").write_text("")
    with pytest.raises(EvaluatorError, match="has changed"):
        await attempt(own, "true", kind)


async def test_what_needs_an_image_says_so(attempt: Try) -> None:
    with pytest.raises(TaskNotPossibleError, match="process sandbox has no file system of its own"):
        await attempt(task(), "true", "process")
    built = replace(task(), environment=replace(task().environment, without_image=False))
    for kind in ("process", "bubblewrap"):
        with pytest.raises(TaskNotPossibleError, match="needs docker: its workspace comes from the Dockerfile"):
            await attempt(built, "true", kind)


@pytest.mark.parametrize("kind", [needs("docker")])
async def test_in_docker_the_image_is_built_from_the_dockerfile(attempt: Try, kind: str, tmp_path: Path) -> None:
    folder = with_local_image(FOLDER, tmp_path / "task")
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "RUN echo built >built\n")
    own = task(folder)
    solved = await attempt(own, f"grep -q built built && {ORACLE}", kind, mount=FOLDER / "solution")
    assert solved.reward == 1.0
    assert (await attempt(own, "true", kind)).reward == 0.0
    dockerfile.write_text(dockerfile.read_text() + "RUN exit 3\n")
    with pytest.raises(WorkspaceError, match=r"the image of .* cannot be built"):
        await attempt(task(folder), "true", kind)


def test_reward_files() -> None:
    assert parse_reward("reward.txt", "0.25\n") == {"reward": 0.25}
    assert parse_reward("reward.json", "-3") == {"reward": -3.0}
    assert parse_reward("reward.json", '{"x": 1}') == {"x": 1.0}
    for name, text in (("reward.txt", "one"), ("reward.json", "[1]"), ("reward.json", "1e999"), ("reward.json", "")):
        with pytest.raises(ValueError):
            parse_reward(name, text)


def test_the_digest_sees_names_modes_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    seen = {folder_digest(tmp_path)}
    (tmp_path / "a").chmod(0o755)
    seen.add(folder_digest(tmp_path))
    (tmp_path / "a").write_text("y")
    seen.add(folder_digest(tmp_path))
    (tmp_path / "b").write_text("")
    seen.add(folder_digest(tmp_path))
    assert len(seen) == 4
    assert isinstance(task().evaluators[0], HarborEvaluator)
