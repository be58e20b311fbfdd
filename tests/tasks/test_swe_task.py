"""The task family `swe-task`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from polar_proxy.allowed_code import NO_CODE
from polar_proxy.errors import UsageError
from polar_proxy.rewards.log_parsers import parse_unittest
from polar_proxy.tasks import Task, TaskSource, get_source
from polar_proxy.tasks.swe_task import TRAIN_SEEDS, SweTaskSource

pytestmark = pytest.mark.slow

SEEDS = [0, 1, 2, 17, 99_999, 1_000_000, 123_456_789]


def write(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def verdicts(root: Path, task: Task) -> dict[str, str]:
    argv = [sys.executable if part == "python3" else part for part in task.test_command]
    env = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=60, check=False)
    found = parse_unittest(done.stdout + done.stderr)
    assert (done.returncode == 0) == all(verdict == "passed" for verdict in found.values())
    return dict(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_hidden_tests_fail_before_the_fix_and_pass_after_it(seed: int, tmp_path: Path) -> None:
    source = SweTaskSource()
    task = source.task(seed)
    write(tmp_path, task.files)
    before = verdicts(tmp_path, task)
    write(tmp_path, task.hidden_files)
    hidden = verdicts(tmp_path, task)
    assert before == hidden
    assert all(hidden[test] == "failed" for test in task.fail_to_pass)
    assert all(hidden[test] == "passed" for test in task.pass_to_pass)
    write(tmp_path, source.solution(seed))
    after = verdicts(tmp_path, task)
    assert set(after) == {*task.fail_to_pass, *task.pass_to_pass}
    assert set(after.values()) == {"passed"}


def test_a_seed_gives_the_same_task_in_every_process() -> None:
    code = "from polar_proxy.tasks import get_source; print(repr(get_source('swe-task').task(7)))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert runs == {repr(SweTaskSource().task(7)) + "\n"}


def test_instances_are_distinct() -> None:
    source = SweTaskSource()
    tasks = [source.task(seed) for seed in range(300)]
    assert len({task.instruction for task in tasks}) == 300
    assert len({task.metadata["function"] for task in tasks}) >= 298
    assert len({task.metadata["path"] for task in tasks}) == 300


def test_the_report_does_not_name_the_file() -> None:
    source = SweTaskSource()
    for seed in range(100):
        task = source.task(seed)
        path = task.metadata["path"]
        assert path.removesuffix(".py").rpartition("/")[2] not in task.instruction
        assert path.partition("/")[0] not in task.instruction


def test_every_file_is_valid_python_and_every_name_is_used_once() -> None:
    for seed in range(100):
        task = SweTaskSource().task(seed)
        functions = []
        for path, text in task.files.items():
            if path.endswith(".py"):
                tree = ast.parse(text)
                functions += [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert len(functions) == len(set(functions))


def test_seeds_for_training_and_for_evaluation_are_disjoint() -> None:
    assert SweTaskSource().task(99_999).metadata["split"] == "eval"
    assert SweTaskSource().task(TRAIN_SEEDS[0]).metadata["split"] == "train"


def test_refuses_a_negative_seed() -> None:
    with pytest.raises(ValueError, match="seed must be 0 or more"):
        SweTaskSource().task(-1)


def test_finds_sources_by_name_and_by_class() -> None:
    assert isinstance(get_source("swe-task"), TaskSource)
    own, missing, other = (
        "polar_proxy.tasks.swe_task:SweTaskSource",
        "polar_proxy.tasks:Nothing",
        "collections:OrderedDict",
    )
    code = NO_CODE.including(own, missing, other)
    assert isinstance(get_source(own, code), SweTaskSource)
    with pytest.raises(UsageError, match="is not allowed here"):
        get_source(own)
    with pytest.raises(UsageError, match="give swe-task"):
        get_source("nothing")
    with pytest.raises(UsageError, match="cannot load"):
        get_source(missing, code)
    with pytest.raises(UsageError, match="is not a task source"):
        get_source(other, code)
