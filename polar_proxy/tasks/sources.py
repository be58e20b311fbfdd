"""Finding tasks by the name that a user types: a built-in family, a file, a folder, or a Python class or function.

A bad task never stops the others: every row or folder becomes a task or a `TaskRefusal`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from polar_proxy.allowed_code import NO_CODE, AllowedCode, is_code
from polar_proxy.errors import BadTaskError, UsageError, first_problem
from polar_proxy.rewards import EVALUATORS, AnyEvaluator
from polar_proxy.tasks.harbor import harbor_task
from polar_proxy.tasks.swe_task import SweTaskSource
from polar_proxy.tasks.swebench import is_swebench_row, swebench_task
from polar_proxy.tasks.task import DialogueUser, Environment, Row, Task, TaskSource, check_task, resolve_path
from polar_proxy.tasks.task_folder import check_inside

_BUILT_IN: Mapping[str, Callable[[], TaskSource]] = {"swe-task": SweTaskSource}
_SUFFIXES = (".jsonl", ".json", ".ndjson")
_T = TypeVar("_T")


# ---------------------------------------------------------------- by name


def is_family(name: str) -> bool:
    """Return whether `name` is a built-in task family."""
    return name in _BUILT_IN


def get_source(name: str, code: AllowedCode = NO_CODE) -> TaskSource:
    """Return the task source with this name.

    `name` is one of these:

    * a built-in family, such as ``swe-task``;
    * the path of a JSONL or JSON file: rows of tasks, or rows in SWE-bench's form;
    * the path of a Harbor task folder, or of a folder that holds such folders;
    * if `code` allows it: ``module:Class``, a `TaskSource` of your own, or ``module:function``, which returns tasks (or
      rows).

    The rows of a file may name only functions that `code` allows; a `Task` that your own code makes may name any
    function. Tasks that cannot be used are listed in the source's `refused`. Raises `UsageError` if nothing has this
    name, or if the file or object with this name is not a source or cannot be read.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):  # False for a name that no file can have
        return _from_folder(path, code)
    if os.path.isfile(path):
        return make_task_list(path.name, _read_rows(path), path.parent, code)
    if is_code(name):
        return _from_python(name, code)
    if "/" in name or name.endswith(_SUFFIXES):
        raise UsageError(f"there is no task file or folder {name}")
    known = ", ".join(sorted(_BUILT_IN))
    raise UsageError(
        f"there is no task family {name!r}; give {known}, a file, a folder, module:Class or module:function"
    )


def load_tasks(
    name: str, seed: int | None, instances: int | None, code: AllowedCode = NO_CODE
) -> tuple[list[Task], tuple[TaskRefusal, ...] | None]:
    """Return the requested tasks, and the refused tasks with reasons.

    A file, folder or function gives a list of tasks, some of which may be refused. A family or class makes a task from
    any seed, and None is returned in place of the refused tasks. With `instances`, return at most `instances` tasks
    that can be run, starting at number `seed` (default 0). With `seed` alone, return this one task. With neither,
    return the whole list, or task 0 of a family or class. Raises UsageError if the source or the task `seed` does not
    exist, or if `seed` is given and all the requested tasks are refused.
    """
    source = get_source(name, code)
    if isinstance(source, TaskList):
        return source.select(seed, instances), source.refused
    first = seed or 0
    return [source.task(number) for number in range(first, first + (instances or 1))], None


def tasks_from_rows(
    name: str, rows: Sequence[Mapping[str, Any]], instances: int | None = None, code: AllowedCode = NO_CODE
) -> tuple[list[Task], tuple[TaskRefusal, ...]]:
    """Return tasks and refused tasks as `load_tasks` does, but from the rows of a task file. Paths in the rows are
    relative to the working directory."""
    source = _from_items(name, rows, code)
    return source.select(None, instances), source.refused


def _from_python(target: str, code: AllowedCode) -> TaskSource:
    source = code.load(target)()
    if isinstance(source, TaskSource):
        return source
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping):
        return _from_items(target, source, code)
    raise UsageError(
        f"{target} is not a task source: a class must have `name` and `task(seed)`; a function must return a list of "
        "tasks or rows"
    )


def _from_items(name: str, items: Iterable[object], code: AllowedCode) -> TaskList:
    return make_task_list(name, ((f"{name}[{number}]", item) for number, item in enumerate(items)), Path.cwd(), code)


def _from_folder(path: Path, code: AllowedCode) -> TaskList:
    """Read the Harbor task in this folder, or the tasks in the folders directly below it."""
    if (path / "task.toml").is_file():
        found = [path]
    else:
        folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
        found = [child for child in folders if (child / "task.toml").is_file() or (child / "instruction.md").is_file()]
    if not found:
        raise UsageError(f"{path} has no task: there is no task.toml in it or in a folder directly below it.")
    return make_task_list(path.name, ((folder.name, _inside(path, folder)) for folder in found), path, code)


def _inside(path: Path, folder: Path) -> Path | BadTaskError:
    try:
        check_inside(path, folder)
    except BadTaskError as error:
        return error
    return folder.absolute()


def _read_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield each line of a JSONL file, or each element of the list in a JSON file, as (where, row).

    `where` names the row in messages, such as ``tasks.jsonl:3``. A line that is not JSON gives a `BadTaskError` in
    place of its row.

    A first row ``{"defaults": {...}}`` holds values for fields that the other rows leave out. Raises `UsageError` for a
    file that cannot be read at all.
    """
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"{path} is not a task file: its name must end in {', '.join(_SUFFIXES)}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    defaults: Row = {}
    rows = _rows_of_list(path, text) if path.suffix == ".json" else _rows_of_lines(path, text)
    for number, (where, row) in enumerate(rows):
        if not isinstance(row, dict):
            yield where, row
        elif number == 0 and set(row) == {"defaults"} and isinstance(row["defaults"], dict):
            defaults = row["defaults"]
        else:
            yield where, {**defaults, **row}


def _rows_of_lines(path: Path, text: str) -> Iterator[tuple[str, object]]:
    # Not splitlines(): a JSON string may contain other separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                row = BadTaskError(f"is not JSON: {error.msg} at column {error.colno}")
            yield f"{path.name}:{number}", row


def _rows_of_list(path: Path, text: str) -> Iterator[tuple[str, object]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise UsageError(f"{path} must hold a list of tasks")
    return ((f"{path.name}[{number}]", row) for number, row in enumerate(rows))


# ---------------------------------------------------------------- a list of tasks


@dataclass(frozen=True)
class TaskRefusal:
    """A task that cannot be used. `where` is its file and line, or its folder; `name` is the task's id, if known."""

    where: str
    name: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.where}{f' ({self.name})' if self.name else ''}: {self.reason}"


class TaskList:
    """A source with a fixed number of tasks. The seed of a task is its position in the list.

    Refused tasks keep their position, so that correcting a refused task moves no other task."""

    def __init__(self, name: str, entries: Sequence[Task | TaskRefusal]) -> None:
        self.name = name
        self._entries = entries

    @property
    def seeds(self) -> tuple[int, ...]:
        """The positions of the tasks that can be run."""
        return tuple(position for position, entry in enumerate(self._entries) if isinstance(entry, Task))

    @property
    def refused(self) -> tuple[TaskRefusal, ...]:
        return tuple(entry for entry in self._entries if isinstance(entry, TaskRefusal))

    def select(self, seed: int | None, instances: int | None) -> list[Task]:
        """Return at most `instances` of the tasks that can be run, starting at position `seed` (see `load_tasks`)."""
        if seed is None:
            return [self.task(position) for position in self.seeds[:instances]]
        following = [position for position in self.seeds if position >= seed][:instances]
        if instances is None or not following:
            following = [seed]  # `task` raises the error if it cannot be used
        return [self.task(position) for position in following]

    def task(self, seed: int) -> Task:
        """Return the task at position `seed`. Raises `UsageError` if there is no such task, or if it was refused."""
        count = len(self._entries)
        if not 0 <= seed < count:
            raise UsageError(f"{self.name} has {count} tasks, numbered from 0; there is no number {seed}.")
        entry = self._entries[seed]
        if isinstance(entry, TaskRefusal):
            raise UsageError(f"This task cannot be used: {entry}")
        return entry


def make_task_list(
    name: str, items: Iterable[tuple[str, object]], folder: Path, code: AllowedCode = NO_CODE
) -> TaskList:
    """Make a list of tasks from pairs (where, item). `where` names the item in messages, such as `tasks.jsonl:3`.

    An item is a task, a row whose paths are relative to `folder`, the path of a Harbor task, or a `BadTaskError` if it
    could not be read. Items that raise `BadTaskError` or repeat an earlier id become `TaskRefusal` entries.
    """
    entries: list[Task | TaskRefusal] = []
    seen: dict[str, str] = {}
    for position, (where, item) in enumerate(items):
        try:
            task = _make_task(item, position, folder)
            # The code that made a `Task` may name functions; a row may not.
            check_task(task, code.including(*task.code_names) if isinstance(item, Task) else code)
            if task.task_id in seen:
                raise BadTaskError(f"task_id {task.task_id!r} is already used by {seen[task.task_id]}")
            seen[task.task_id] = where
            entries.append(task)
        except BadTaskError as error:
            entries.append(TaskRefusal(where, _item_name(item), str(error)))
    return TaskList(name, entries)


def _make_task(item: object, position: int, folder: Path) -> Task:
    match item:
        case Task():
            return dataclasses.replace(item, seed=position)
        case Path():
            return harbor_task(item, position)
        case Mapping():
            make: Callable[[Row, int, Path], Task] = swebench_task if is_swebench_row(item) else row_task
            return make(dict(item), position, folder)
        case BadTaskError():
            raise item
    raise BadTaskError("is not a JSON object")


def _item_name(item: object) -> str | None:
    if isinstance(item, Task):
        return item.task_id
    name = item.get("task_id") or item.get("instance_id") if isinstance(item, Mapping) else None
    return str(name) if name else None


# ---------------------------------------------------------------- rows with the fields of a task


def row_task(row: Row, position: int, folder: Path) -> Task:
    """Make a task from a row with the fields of `Task`. Paths in the row are relative to `folder`. Raises
    `BadTaskError` if the row is not a valid task."""
    if "seed" in row:
        raise BadTaskError("seed: cannot be set; it is the row's position")
    evaluators = row.pop("evaluators", None)
    if (one := row.pop("evaluator", None)) is not None:
        if evaluators is not None:
            raise BadTaskError("give either evaluator (one) or evaluators (a list), not both")
        evaluators = [one]
    environment = dict(_object(row.pop("environment", None), "environment"))
    if repository := _object(environment.get("repository"), "environment.repository"):
        environment["repository"] = {**repository, "source": resolve_path(str(repository.get("source")), folder)}
    if environment.get("build"):
        environment["build"] = resolve_path(str(environment["build"]), folder)
    made: Row = {"environment": _build(Environment, environment, "environment")}
    if (user := row.pop("user", None)) is not None:
        made["user"] = _build(DialogueUser, _object(user, "user"), "user")
    if evaluators is not None:
        if not isinstance(evaluators, list) or not evaluators:
            raise BadTaskError("evaluators: must be a list of at least one evaluator")
        made["evaluators"] = tuple(
            _make_evaluator(item, f"evaluators[{number}]") for number, item in enumerate(evaluators)
        )
    return _build(Task, {"family": "jsonl", **row, "seed": position, **made})


def _object(value: object, where: str) -> Mapping[str, Any]:
    """Return `value`, a JSON object; an empty one if `value` is None. Raises `BadTaskError` for other values."""
    if value is not None and not isinstance(value, Mapping):
        raise BadTaskError(f"{where}: must be a JSON object")
    return value or {}


def _make_evaluator(item: object, where: str) -> AnyEvaluator:
    kind = item.get("kind") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(kind, str) or kind not in EVALUATORS:
        raise BadTaskError(f"{where}: kind must be one of {', '.join(sorted(EVALUATORS))}")
    return _build(EVALUATORS[kind], item, where)


def _build(kind: type[_T], data: Mapping[str, Any], where: str = "") -> _T:
    """Make a dataclass from JSON values. Raises `BadTaskError` that names the first wrong field."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - known):
        name = f"{where}.{unknown[0]}" if where else unknown[0]
        raise BadTaskError(f"{name}: there is no such field; choose from {', '.join(sorted(known))}")
    try:
        reader: TypeAdapter[_T] = _reader(cast(Any, kind))
        return reader.validate_python(dict(data))
    except ValidationError as error:
        raise BadTaskError(first_problem(error, where)) from None


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
