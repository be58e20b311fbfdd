"""A list of tasks read from a file, a folder or a function, and the rows of a task file.

A bad task never stops the others: every row or folder becomes a task or a `TaskRefusal`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from polar_proxy.errors import BadTaskError, UsageError
from polar_proxy.rewards import EVALUATORS, AnyEvaluator
from polar_proxy.tasks.task import Environment, Task, check_task

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class TaskRefusal:
    """A task that cannot be used. `where` is its file and line, or its folder; `name` is the task's id, if known."""

    where: str
    name: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.where}{f' ({self.name})' if self.name else ''}: {self.reason}"


class TaskList:
    """A source with a fixed number of tasks, whose seeds are positions.

    Rejected tasks keep their position, so that no other task moves when one is corrected."""

    def __init__(self, name: str, tasks: Mapping[int, Task], refused: Mapping[int, TaskRefusal]) -> None:
        self.name = name
        self._tasks = dict(tasks)
        self._refused = dict(refused)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The positions of the tasks that can be run."""
        return tuple(sorted(self._tasks))

    @property
    def refused(self) -> tuple[TaskRefusal, ...]:
        return tuple(self._refused[position] for position in sorted(self._refused))

    def task(self, seed: int) -> Task:
        """Return the task at this position. Raises `UsageError` if there is none or it was refused."""
        if seed in self._tasks:
            return self._tasks[seed]
        if seed in self._refused:
            raise UsageError(f"This task cannot be used: {self._refused[seed]}")
        count = len(self._tasks) + len(self._refused)
        raise UsageError(f"{self.name} has {count} tasks, numbered from 0; there is no number {seed}.")


@dataclass(frozen=True)
class TaskCandidate:
    """A task that has not been read yet: its location, its name if known, and a function that reads it."""

    where: str
    name: str | None
    make: Callable[[int], Task]


def make_task_list(name: str, candidates: Iterable[TaskCandidate]) -> TaskList:
    """Read and check every task. One that raises `BadTaskError`, or repeats an earlier id, is refused."""
    tasks: dict[int, Task] = {}
    refused: dict[int, TaskRefusal] = {}
    seen: dict[str, str] = {}
    for position, candidate in enumerate(candidates):
        try:
            task = candidate.make(position)
            check_task(task)
            if task.task_id in seen:
                raise BadTaskError(f"task_id {task.task_id!r} is also that of {seen[task.task_id]}")
        except BadTaskError as error:
            refused[position] = TaskRefusal(candidate.where, candidate.name, str(error))
        else:
            tasks[position] = task
            seen[task.task_id] = candidate.where
    return TaskList(name, tasks, refused)


def read_rows(path: Path, make: Callable[[Row, int], Task]) -> TaskList:
    """Read a JSONL file with one object per line, or a JSON file with a list of objects.

    A first line ``{"defaults": {...}}`` holds values for fields that the others leave out. Raises `UsageError` for a
    file that cannot be read at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    defaults: Row = {}
    candidates = []
    for where, parse in _documents(path, text):
        try:
            row = parse()
        except BadTaskError as error:
            candidates.append(TaskCandidate(where, None, partial(_raise, error)))
            continue
        if not candidates and set(row) == {"defaults"} and isinstance(row["defaults"], dict):
            defaults = row["defaults"]
            continue
        row = {**defaults, **row}
        name = row.get("task_id") or row.get("instance_id")
        candidates.append(TaskCandidate(where, str(name) if name else None, partial(make, row)))
    return make_task_list(path.name, candidates)


def _raise(error: BadTaskError, position: int) -> Task:
    raise error


def _documents(path: Path, text: str) -> Iterable[tuple[str, Callable[[], Row]]]:
    """Yield the location of each row and a function that reads it, which raises for a row that is not an object."""
    if path.suffix != ".json":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{path.name}:{number}", partial(_object, line)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise UsageError(f"{path} must hold a list of tasks")
    for number, row in enumerate(rows):
        yield f"{path.name}[{number}]", partial(_object, json.dumps(row))


def _object(line: str) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadTaskError(f"is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise BadTaskError("is not a JSON object")
    return value


def row_task(row: Row, position: int, folder: Path) -> Task:
    """Make a task from a row with the fields of `Task`; paths in it are relative to `folder`. Raises `BadTaskError`."""
    row = dict(row)
    if "seed" in row:
        raise BadTaskError("seed: cannot be set; it is the row's position")
    evaluators = row.pop("evaluators", None)
    if (one := row.pop("evaluator", None)) is not None:
        if evaluators is not None:
            raise BadTaskError("give either evaluator (one) or evaluators (a list), not both")
        evaluators = [one]
    environment = dict(row.pop("environment", None) or {})
    if repository := environment.get("repository"):
        environment["repository"] = {**repository, "source": resolve_path(str(repository.get("source")), folder)}
    if environment.get("build"):
        environment["build"] = resolve_path(str(environment["build"]), folder)
    made: Row = {"environment": build(Environment, environment, "environment")}
    if evaluators is not None:
        if not isinstance(evaluators, list) or not evaluators:
            raise BadTaskError("evaluators: must be a list of at least one")
        made["evaluators"] = tuple(
            make_evaluator(item, f"evaluators[{number}]") for number, item in enumerate(evaluators)
        )
    return build(Task, {"family": "jsonl", **row, "seed": position, **made}, "")


def make_evaluator(item: object, where: str) -> AnyEvaluator:
    """Make an evaluator from its JSON form. Raises `BadTaskError`."""
    if not isinstance(item, dict) or item.get("kind") not in EVALUATORS:
        raise BadTaskError(f"{where}: kind must be one of {', '.join(sorted(EVALUATORS))}")
    return build(EVALUATORS[item["kind"]], item, where)


def build(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    """Make a dataclass from JSON values. Raises `BadTaskError` that names the first wrong field."""
    at = f"{where}." if where else ""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - known):
        raise BadTaskError(f"{at}{unknown[0]}: there is no such field; choose from {', '.join(sorted(known))}")
    try:
        return TypeAdapter(kind).validate_python(dict(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadTaskError(f"{at}{place}: {first['msg'].lower()}") from None


def resolve_path(source: str, folder: Path) -> str:
    """Make a path relative to `folder` absolute; return a URL unchanged."""
    return source if "://" in source else str((folder / source).absolute())
