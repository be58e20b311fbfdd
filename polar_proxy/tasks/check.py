"""What every task must hold to be run and judged, wherever it comes from."""

from __future__ import annotations

import math
import posixpath
from pathlib import Path

from polar_proxy.tasks.evaluation import (
    CommandEvaluator,
    Evaluator,
    HarborEvaluator,
    HiddenTestsEvaluator,
    PythonEvaluator,
    SwebenchEvaluator,
)
from polar_proxy.tasks.functions import load_function
from polar_proxy.tasks.log_parsers import get_parser
from polar_proxy.tasks.task import BadTaskError, Environment, Task


def check_task(task: Task) -> None:
    """Raise `BadTaskError` that names the field, for what would fail later or be judged wrongly."""
    if not task.task_id or any(letter.isspace() for letter in task.task_id):
        raise BadTaskError("task_id: must be text without spaces")
    if not task.instruction.strip():
        raise BadTaskError("instruction: is empty")
    _positive("timeout_seconds", task.timeout_seconds)
    if task.agent_seconds is not None:
        _positive("agent_seconds", task.agent_seconds)
    for place in ("files", "hidden_files"):
        for name in getattr(task, place):
            check_relative(place, name)
    if not task.evaluators:
        raise BadTaskError("evaluators: is empty")
    for evaluation in task.evaluators:
        _positive(f"{evaluation.kind}: weight", evaluation.weight)
        _check_evaluation(task, evaluation)
    _check_environment(task.environment, task)


def check_relative(place: str, name: str) -> None:
    """Raise `BadTaskError` for a name that is no path below the workspace, or that is inside its .git."""
    parts = name.split("/")
    if posixpath.isabs(name) or ".." in parts or posixpath.normpath(name) == "." or "\0" in name:
        raise BadTaskError(f"{place}: {name!r} is no path below the workspace")
    if ".git" in parts:
        raise BadTaskError(f"{place}: {name!r} is inside the repository's own folder")


def _positive(place: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise BadTaskError(f"{place}: must be above 0, not {value}")


def _check_evaluation(task: Task, evaluation: Evaluator) -> None:
    named = task.fail_to_pass or task.pass_to_pass
    match evaluation:
        case HiddenTestsEvaluator():
            get_parser(evaluation.parser)
            if not task.test_command:
                raise BadTaskError("test_command: the evaluator tests needs it")
            if not named:
                raise BadTaskError("fail_to_pass: names no test, nor does pass_to_pass; any result would be right")
        case SwebenchEvaluator():
            get_parser(evaluation.parser)
            if not evaluation.command and not evaluation.eval_script:
                raise BadTaskError("no command that runs the tests")
            if not named and not evaluation.expected:
                raise BadTaskError("FAIL_TO_PASS: names no test, nor does PASS_TO_PASS; any result would be right")
        case HarborEvaluator():
            if not Path(evaluation.tests).is_dir():
                raise BadTaskError(f"{evaluation.tests}: there is no such folder")
        case CommandEvaluator():
            if not evaluation.argv:
                raise BadTaskError("command: argv is empty")
            for name in evaluation.files:
                check_relative("command: files", name)
        case PythonEvaluator():
            load_function(evaluation.function)


def _check_environment(environment: Environment, task: Task) -> None:
    places = (*environment.folders, *environment.hide, *([environment.workdir] if environment.workdir else []))
    for place in places:
        if not posixpath.isabs(place) or posixpath.normpath(place) == "/":
            raise BadTaskError(f"environment: {place!r} must be absolute and not /")
    if environment.repository is not None:
        source = environment.repository.source
        if "://" not in source and not Path(source).exists():
            raise BadTaskError(f"environment.repository: {source} does not exist")
        if task.files:
            raise BadTaskError("files: the workspace is the repository; give one of them")
    if environment.build is not None and not (Path(environment.build) / "Dockerfile").is_file():
        raise BadTaskError(f"environment.build: {environment.build} holds no Dockerfile")
