"""Tasks that were read from a file, a folder or a function: the good ones by position, the bad ones with the reason.

One bad task never stops the others, and none goes missing: every row or folder is in `tasks` or in `refused`.
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

from polar_proxy.errors import UsageError
from polar_proxy.tasks.check import check_task
from polar_proxy.tasks.evaluation import EVALUATORS, Evaluator
from polar_proxy.tasks.task import BadTaskError, Environment, Task

T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class RejectedTask:
    """A task that cannot be used: `where` is file and line, or the folder; `name` the task's own, if it has one."""

    where: str
    name: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.where}{f' ({self.name})' if self.name else ''}: {self.reason}"


class TaskList:
    """A source of so many tasks; seeds are positions, those of refused tasks included, so that none moves when one is
    put right."""

    def __init__(self, name: str, tasks: Mapping[int, Task], refused: Mapping[int, RejectedTask]) -> None:
        self.name = name
        self._tasks = dict(tasks)
        self._refused = dict(refused)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Positions of the tasks that can be run."""
        return tuple(sorted(self._tasks))

    @property
    def refused(self) -> tuple[RejectedTask, ...]:
        return tuple(self._refused[position] for position in sorted(self._refused))

    def task(self, seed: int) -> Task:
        """Raises `UsageError` where there is no such task, with the reason where it was refused."""
        if seed in self._tasks:
            return self._tasks[seed]
        if seed in self._refused:
            raise UsageError(f"refused: {self._refused[seed]}")
        raise UsageError(f"{self.name} has {len(self._tasks) + len(self._refused)} tasks; there is no number {seed}")


@dataclass(frozen=True)
class TaskCandidate:
    """One candidate: where it stands, its name if known, and how to make the task."""

    where: str
    name: str | None
    make: Callable[[int], Task]


def make_task_list(name: str, entries: Iterable[TaskCandidate]) -> TaskList:
    """Make and check every task; what raises `BadTaskError`, or has the id of an earlier one, is refused."""
    tasks: dict[int, Task] = {}
    refused: dict[int, RejectedTask] = {}
    seen: dict[str, str] = {}
    for position, entry in enumerate(entries):
        try:
            task = entry.make(position)
            check_task(task)
            if task.task_id in seen:
                raise BadTaskError(f"task_id {task.task_id!r} is also that of {seen[task.task_id]}")
        except BadTaskError as error:
            refused[position] = RejectedTask(entry.where, entry.name, str(error))
        else:
            tasks[position] = task
            seen[task.task_id] = entry.where
    return TaskList(name, tasks, refused)


def read_rows(path: Path, make: Callable[[Row, int], Task]) -> TaskList:
    """Tasks of a JSONL file, one object a line, or of a JSON file that holds a list of objects.

    A first line ``{"defaults": {...}}`` gives what the others leave out. Raises `UsageError` for a file that cannot be
    read at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    defaults: Row = {}
    entries = []
    for where, parse in _documents(path, text):
        try:
            row = parse()
        except BadTaskError as error:
            entries.append(TaskCandidate(where, None, partial(_refuse, error)))
            continue
        if not entries and set(row) == {"defaults"} and isinstance(row["defaults"], dict):
            defaults = row["defaults"]
            continue
        row = {**defaults, **row}
        name = row.get("task_id") or row.get("instance_id")
        entries.append(TaskCandidate(where, str(name) if name else None, partial(make, row)))
    return make_task_list(path.name, entries)


def _refuse(error: BadTaskError, position: int) -> Task:
    raise error


def _documents(path: Path, text: str) -> Iterable[tuple[str, Callable[[], Row]]]:
    """(place, how to read the row) of each row; a row that is no object fails when it is read."""
    if path.suffix != ".json":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{path.name}:{number}", partial(_object, line)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(rows, list):
        raise UsageError(f"{path} must hold a list of tasks")
    for number, row in enumerate(rows):
        yield f"{path.name}[{number}]", partial(_object, json.dumps(row))


def _object(line: str) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadTaskError(f"is no JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise BadTaskError("is no JSON object")
    return value


# ---------------------------------------------------------------- rows of Polar's own


def row_task(row: Row, position: int, folder: Path) -> Task:
    """A task from a row that has the fields of `Task`; paths in it are relative to `folder`. Raises `BadTaskError`."""
    row = dict(row)
    if "seed" in row:
        raise BadTaskError("seed: is the row's position and cannot be given")
    evaluators = row.pop("evaluators", None)
    if (one := row.pop("evaluator", None)) is not None:
        if evaluators is not None:
            raise BadTaskError("give evaluator (one) or evaluators (a list), not both")
        evaluators = [one]
    environment = dict(row.pop("environment", None) or {})
    if repository := environment.get("repository"):
        environment["repository"] = {**repository, "source": resolve_path(str(repository.get("source")), folder)}
    if environment.get("build"):
        environment["build"] = resolve_path(str(environment["build"]), folder)
    made = {"environment": build(Environment, environment, "environment")}
    if evaluators is not None:
        if not isinstance(evaluators, list) or not evaluators:
            raise BadTaskError("evaluators: must be a list of at least one")
        made["evaluators"] = tuple(evaluation(item, f"evaluators[{number}]") for number, item in enumerate(evaluators))  # type: ignore[assignment]
    return build(Task, {"family": "jsonl", **row, "seed": position, **made}, "")


def evaluation(item: object, where: str) -> Evaluator:
    """An evaluator from its JSON form. Raises `BadTaskError`."""
    if not isinstance(item, dict) or item.get("kind") not in EVALUATORS:
        raise BadTaskError(f"{where}: kind must be one of {', '.join(sorted(EVALUATORS))}")
    return build(EVALUATORS[item["kind"]], item, where)


def build(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    """A dataclass from JSON values, types checked. Raises `BadTaskError` that names the first wrong field."""
    at = f"{where}." if where else ""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - known):
        raise BadTaskError(f"{at}{unknown[0]}: no such field; there are {', '.join(sorted(known))}")
    try:
        return TypeAdapter(kind).validate_python(dict(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadTaskError(f"{at}{place}: {first['msg'].lower()}") from None


def resolve_path(source: str, folder: Path) -> str:
    """A path relative to `folder` made absolute; a URL stays."""
    return source if "://" in source else str((folder / source).absolute())
