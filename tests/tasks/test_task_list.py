"""Reading tasks from files and functions, and refusing bad ones by name and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.allowed_code import NO_CODE
from polar_proxy.errors import BadTaskError, UsageError
from polar_proxy.rewards import CommandEvaluator, HiddenTestsEvaluator, PythonEvaluator
from polar_proxy.tasks import Task, TaskList, get_source, load_tasks, task_from_json, task_to_json

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"
GOOD: dict[str, Any] = {"task_id": "t", "instruction": "Do it.", "evaluator": {"kind": "command", "argv": ["true"]}}
TESTS = {"test_command": ["python3"], "fail_to_pass": ["x"]}


CODE = NO_CODE.including(
    "examples.tasks.judges:shortness", "examples.tasks.arithmetic:tasks", f"{__name__}:tasks", f"{__name__}:no_tasks"
)


def source(path: Path | str) -> TaskList:
    found = get_source(str(path), CODE)
    assert isinstance(found, TaskList)
    return found


def refusals(tmp_path: Path, *rows: object) -> list[str]:
    file = tmp_path / "f.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return [str(refusal) for refusal in source(file).refused]


def test_reads_every_example() -> None:
    for name in ("jsonl/tasks.jsonl", "swebench/rows.jsonl", "harbor", "harbor/running-mean"):
        found = source(EXAMPLES / name)
        assert found.refused == ()
        assert found.seeds
        assert all(found.task(seed).seed == seed for seed in found.seeds)
    greet, ordered, short = (source(EXAMPLES / "jsonl/tasks.jsonl").task(seed) for seed in range(3))
    assert greet.evaluators == (HiddenTestsEvaluator(before=True),)
    assert isinstance(ordered.evaluators[0], CommandEvaluator)
    assert isinstance(short.evaluators[1], PythonEvaluator)
    assert short.evaluators[0].weight == 3
    assert greet.timeout_seconds == 30  # from the file's defaults


def test_keeps_line_separators_within_a_text(tmp_path: Path) -> None:
    row = {"task_id": "t", "instruction": "one\u2028two\x85three", "evaluator": {"kind": "command", "argv": ["x"]}}
    (tmp_path / "f.jsonl").write_text(json.dumps(row, ensure_ascii=False))
    assert source(tmp_path / "f.jsonl").task(0).instruction == row["instruction"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"instruction": "  "}, "instruction: is empty"),
        ({"instruction": None}, "instruction: input should be a valid string"),
        ({"task_id": "a b"}, "task_id: must be text without spaces"),
        ({"instructions": "x"}, "instructions: there is no such field"),
        ({"seed": 3}, "seed: cannot be set"),
        ({"timeout_seconds": 0}, "timeout_seconds: must be above 0"),
        ({"files": {"../x": ""}}, "'../x' is not a path below the workspace"),
        ({"files": {"/x": ""}}, "'/x' is not a path below the workspace"),
        ({"hidden_files": {".git/config": ""}}, "inside the folder .git"),
        ({"files": {"a": 1}}, "files.a: input should be a valid string"),
        ({"evaluator": {"kind": "magic"}}, "evaluators[0]: kind must be one of command, harbor, python"),
        ({"evaluator": {"kind": "command", "argv": []}}, "argv is empty"),
        ({"evaluator": {"kind": "command", "argv": ["x"], "weight": -1}}, "weight: must be above 0"),
        ({"evaluator": {"kind": "command", "argv": ["x"], "rewrd": 1}}, "evaluators[0].rewrd: there is no such field"),
        ({"evaluator": {"kind": "python", "function": "no.such:thing"}}, "the code no.such:thing is not allowed here"),
        ({"evaluator": {"kind": "tests"}}, "test_command: required by the evaluator `tests`"),
        ({"evaluator": {"kind": "tests", "by_value": True}}, "test_command: required by the evaluator `tests`"),
        ({"evaluator": {"kind": "tests"}, "test_command": ["x"]}, "any result passes"),
        ({"evaluator": {"kind": "tests", "parser": "nunit"}, **TESTS}, "no log parser 'nunit'"),
        ({"evaluators": []}, "not both"),
        ({"environment": {"repository": {"source": "gone", "commit": "x"}}}, "gone does not exist"),
        ({"environment": {"repository": {"source": "--upload-pack=touch x://", "commit": "x"}}}, "is not a URL with"),
        ({"environment": {"repository": {"source": "ext::sh -c 'touch x' ://", "commit": "x"}}}, "is not a URL with"),
        ({"environment": {"repository": {"source": "ext://x", "commit": "x"}}}, "is not a URL with"),
        (
            {"environment": {"repository": {"source": ".", "commit": "--upload-pack=touch x"}}},
            "not the name of a commit",
        ),
        (
            {"environment": {"repository": {"source": ".", "commit": "x"}}, "files": {"a": ""}},
            "files or repository, not both",
        ),
        ({"environment": {"workdir": "app"}}, "'app' must be an absolute path"),
        ({"environment": {"build": "."}}, "has no Dockerfile"),
    ],
)
def test_refuses_a_bad_row_by_name_line_and_field(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (refusal,) = refusals(tmp_path, GOOD, {**GOOD, "task_id": "u", **change})
    name = change.get("task_id", "u")
    assert refusal.startswith(f"f.jsonl:2 ({name}): ")
    assert words in refusal


def test_refuses_lines_that_are_not_rows(tmp_path: Path) -> None:
    found = refusals(tmp_path, "{", "", "[1]", GOOD, GOOD)
    assert found == [
        "f.jsonl:1: is not JSON: Expecting property name enclosed in double quotes at column 2",
        "f.jsonl:3: is not a JSON object",
        "f.jsonl:5 (t): task_id 't' is already used by f.jsonl:4",
    ]


def test_refused_rows_keep_their_position(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text(json.dumps([GOOD, 5, {**GOOD, "task_id": "u"}]))
    found = source(file)
    assert found.seeds == (0, 2)
    assert found.task(2).task_id == "u"
    with pytest.raises(UsageError, match=r"cannot be used: f.json\[1\]"):
        found.task(1)
    with pytest.raises(UsageError, match="there is no number 3"):
        found.task(3)


def test_reports_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    (tmp_path / "y.csv").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in (("x.json", "is not JSON"), ("y.csv", "must end in"), ("empty", "has no task")):
        with pytest.raises(UsageError, match=words):
            get_source(str(tmp_path / name))
    with pytest.raises(UsageError, match="no task file or folder"):
        get_source("./nothing.jsonl")


def test_tasks_round_trip_through_json() -> None:
    for name in (
        "swe-task",
        *(str(EXAMPLES / name) for name in ("jsonl/tasks.jsonl", "swebench/rows.jsonl", "harbor")),
    ):
        found = get_source(name, CODE)
        for seed in found.seeds if isinstance(found, TaskList) else (0, 1):
            task = found.task(seed)
            assert task_from_json(json.loads(json.dumps(task_to_json(task)))) == task
    with pytest.raises(BadTaskError, match="evaluators"):
        task_from_json({**task_to_json(task), "evaluators": [{"kind": "from a later version"}]})


def tasks() -> list[object]:
    return [
        Task("a", "x", 7, "Do.", evaluators=(CommandEvaluator(("true",)),)),
        {**GOOD, "task_id": "b"},
        5,
        {"task_id": "c"},
    ]


def no_tasks() -> int:
    return 5


def test_reads_tasks_and_rows_from_a_function() -> None:
    found = source(f"{__name__}:tasks")
    assert [found.task(seed).task_id for seed in found.seeds] == ["a", "b"]
    assert found.task(0).seed == 0
    assert [refusal.where.rpartition(":")[2] for refusal in found.refused] == ["tasks[2]", "tasks[3]"]
    assert source("examples.tasks.arithmetic:tasks").seeds == (0, 1, 2)
    with pytest.raises(UsageError, match="is not a task source"):
        get_source(f"{__name__}:no_tasks", CODE)


@pytest.mark.parametrize(
    ("seed", "instances", "expected"),
    [
        (None, None, [0]),
        (None, 3, [0, 1, 2]),
        (500, None, [500]),
        (500, 3, [500, 501, 502]),
    ],
)
def test_seed_and_instances_choose_the_instances_of_a_family(
    seed: int | None, instances: int | None, expected: list[int]
) -> None:
    tasks, refused = load_tasks("swe-task", seed, instances)
    assert ([task.seed for task in tasks], refused) == (expected, None)


@pytest.mark.parametrize(
    ("seed", "instances", "expected"),
    [
        (None, None, [0, 2, 3]),
        (None, 2, [0, 2]),
        (2, None, [2]),
        (1, 2, [2, 3]),  # task 1 is refused
        (2, 40, [2, 3]),
    ],
)
def test_seed_and_instances_choose_the_tasks_of_a_file(
    tmp_path: Path, seed: int | None, instances: int | None, expected: list[int]
) -> None:
    file = tmp_path / "f.json"
    file.write_text(json.dumps([GOOD, 5, {**GOOD, "task_id": "u"}, {**GOOD, "task_id": "v"}]))
    tasks, refused = load_tasks(str(file), seed, instances)
    assert [task.seed for task in tasks] == expected
    assert len(refused or ()) == 1
    with pytest.raises(UsageError, match="there is no number 4"):
        load_tasks(str(file), 4, 2)
