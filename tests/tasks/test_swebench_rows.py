"""Rows as the data sets publish them, shortened, and the example's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.tasks.swebench.make import make
from polar_proxy.errors import BadTaskError
from polar_proxy.rewards import SwebenchEvaluator
from polar_proxy.tasks import Environment, Task, TaskList, get_source
from polar_proxy.tasks.swebench import named_tests

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"
PATCH = (
    "diff --git a/tests/a/test_x.py b/tests/a/test_x.py\n--- a/tests/a/test_x.py\n+++ b/tests/a/test_x.py\n"
    "@@ -1 +1 @@\n-a\n+b\n"
)
DATA = PATCH + PATCH.replace("test_x.py", "data.json")
BASE: dict[str, Any] = {
    "instance_id": "org__name-1",
    "repo": "org/name",
    "base_commit": "a" * 40,
    "problem_statement": "It is broken.",
    "test_patch": PATCH,
    "FAIL_TO_PASS": '["t1"]',
    "PASS_TO_PASS": ["t2"],
}


def read(tmp_path: Path, *rows: dict[str, Any]) -> TaskList:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = get_source(str(tmp_path / "rows.jsonl"))
    assert isinstance(found, TaskList)
    return found


def one(tmp_path: Path, *rows: dict[str, Any]) -> tuple[Task, Environment, SwebenchEvaluator]:
    found = read(tmp_path, *rows)
    assert found.refused == ()
    task = found.task(0)
    (evaluation,) = task.evaluators
    assert isinstance(evaluation, SwebenchEvaluator)
    return task, task.environment, evaluation


def test_swe_bench_5(tmp_path: Path) -> None:
    row = {**BASE, "image": "img:1", "eval_script": "run", "log_parser": "parse_log_django", "eval_type": "fail_only"}
    task, environment, evaluation = one(tmp_path, row)
    assert (task.task_id, task.instruction) == ("org__name-1", "It is broken.")
    assert (task.fail_to_pass, task.pass_to_pass) == (("t1",), ("t2",))
    assert (environment.image, environment.workdir, environment.base_commit) == ("img:1", "/testbed", "a" * 40)
    assert (evaluation.eval_script, evaluation.parser, evaluation.fail_only) == ("run", "parse_log_django", True)
    assert environment.needs_image


def test_swe_bench_and_swe_gym_by_repository_with_images_from_defaults(tmp_path: Path) -> None:
    defaults = {"defaults": {"image": "swebench/sweb.eval.x86_64.{instance_id_1776}:latest"}}
    row = {**BASE, "instance_id": "django__django-1", "repo": "django/django", "test_patch": DATA}
    _, environment, evaluation = one(tmp_path, defaults, row)
    assert environment.image == "swebench/sweb.eval.x86_64.django_1776_django-1:latest"
    assert evaluation.command.endswith("runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 a.test_x")
    assert "activate testbed" in evaluation.command
    assert evaluation.parser == "django"


def test_swe_rebench(tmp_path: Path) -> None:
    config = {"test_cmd": "pytest -rA --no-header", "log_parser": "parse_log_pytest"}
    _, environment, evaluation = one(tmp_path, {**BASE, "docker_image": "reb:1", "install_config": config})
    assert environment.image == "reb:1"
    assert evaluation.command.endswith("\npytest -rA --no-header tests/a/test_x.py")


def test_swe_rebench_v2(tmp_path: Path) -> None:
    config = {"test_cmd": ["make build", "go test -v ./..."], "log_parser": "parse_log_gotest"}
    _, environment, evaluation = one(tmp_path, {**BASE, "image_name": "reb2:1", "install_config": config})
    assert (environment.image, environment.workdir) == ("reb2:1", "/name")
    assert evaluation.command.endswith("\nmake build\ngo test -v ./...")


def test_r2e_gym(tmp_path: Path) -> None:
    row = {
        "repo_name": "pillow",
        "docker_image": "r2e:1",
        "commit_hash": "b" * 40,
        "problem_statement": "x",
        "expected_output_json": '{"TestA.test_b": "PASSED", "TestA.test_c": "FAILED"}',
    }
    task, environment, evaluation = one(tmp_path, row)
    assert task.task_id == "pillow-" + "b" * 12
    assert evaluation.expected == {"TestA.test_b": "PASSED", "TestA.test_c": "FAILED"}
    # The row names the commit of the fix, so history ends at the image's HEAD; tests and answers are hidden.
    assert environment.base_commit is None
    assert {"/r2e_tests", "/testbed/run_tests.sh", "/testbed/expected_test_output.json"} <= set(environment.hide)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": None}, "has neither image nor repository"),
        ({"base_commit": ""}, "base_commit: is missing"),
        ({"problem_statement": ""}, "problem_statement: is missing"),
        ({"test_patch": None}, "test_patch: is missing"),
        ({"FAIL_TO_PASS": "t1, t2"}, "FAIL_TO_PASS: is text, but not a JSON list"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS: must be a list of test names"),
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, "any result passes"),
        ({"test_command": None}, "no known command for 'org/name'"),
        ({"log_parser": "parse_log_cobol"}, "no log parser 'parse_log_cobol'"),
    ],
)
def test_refuses_bad_rows(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    good = {**BASE, "image": "x", "test_command": "pytest"}
    found = read(tmp_path, good, {**good, "instance_id": "other", **change})
    (refusal,) = found.refused
    assert str(refusal).startswith("rows.jsonl:2 (other): ")
    assert words in refusal.reason
    assert found.seeds == (0,)


def test_the_example_equals_the_output_of_its_script(tmp_path: Path) -> None:
    """Compares rows and patches, which name the commits; the bundle's bytes may differ between versions of git."""
    make(tmp_path)
    for name in ("rows.jsonl", "example__tally-1.gold.patch", "example__tally-2.gold.patch"):
        assert (tmp_path / name).read_text() == (EXAMPLES / "swebench" / name).read_text()


def test_reads_test_names_from_a_list_or_its_json() -> None:
    assert named_tests({"x": '["a", "b"]'}, "x") == named_tests({"x": ["a", "b"]}, "x") == ("a", "b")
    assert named_tests({"x": ""}, "x") == ()
    for wrong in ("a", None, [1], {"a": 1}):
        with pytest.raises(BadTaskError):
            named_tests({"x": wrong}, "x")
