"""Finding tasks by the name that a user types: a built-in family, a path, or a Python class or function."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from polar_proxy.errors import BadTaskError, UsageError
from polar_proxy.tasks import harbor, swebench
from polar_proxy.tasks.task import Task, TaskSource, UnknownTaskFamilyError
from polar_proxy.tasks.task_list import Row, TaskCandidate, TaskList, TaskRefusal, make_task_list, read_rows, row_task

_BUILT_IN: Mapping[str, str] = {"swe-task": "polar_proxy.tasks.swe_task:SweTaskSource"}
_SUFFIXES = (".jsonl", ".json", ".ndjson")


def list_sources() -> tuple[str, ...]:
    """Return the names of the built-in families, sorted."""
    return tuple(sorted(_BUILT_IN))


def get_source(name: str) -> TaskSource:
    """Return the task source that `name` denotes:

    * a built-in family, such as ``swe-task``;
    * the path of a JSONL or JSON file: rows of tasks, or rows in SWE-bench's form;
    * the path of a Harbor task folder, or of a folder that holds such folders;
    * ``module:Class``, a `TaskSource` of your own, or ``module:function`` that returns tasks (or rows).

    Raises `UnknownTaskFamilyError` if nothing has this name, `TypeError` if it is not a source, `UsageError` if a file
    cannot be read. Single tasks that cannot be used are listed in the source's `refused`.
    """
    if name in _BUILT_IN:
        return _from_python(_BUILT_IN[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return harbor.read_folder(path)
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise UsageError(f"{name} is not a task file: its name must end in {', '.join(_SUFFIXES)}.")
        return read_rows(path, lambda row, position: _task_of_row(row, position, path.parent))
    if ":" in name and "/" not in name:
        return _from_python(name)
    if "/" in name or name.endswith(_SUFFIXES):
        raise UnknownTaskFamilyError(f"there is no task file or folder {name}")
    known = ", ".join(list_sources())
    raise UnknownTaskFamilyError(
        f"there is no task family {name!r}; give {known}, a file, a folder, module:Class or module:function"
    )


def load_tasks(name: str, seed: int | None, instances: int | None) -> tuple[list[Task], tuple[TaskRefusal, ...] | None]:
    """Return the tasks that a user asked for, and the refused ones of a file or folder (None if the source is a
    family).

    With neither `seed` nor `instances`: one task of a family, all tasks of a file or folder. Raises UsageError if
    there is no such source, or the source has no such seed.
    """
    if seed is not None and instances is not None:
        raise UsageError("Give --seed (one instance) or --instances (many), not both.")
    try:
        source = get_source(name)
    except (UnknownTaskFamilyError, TypeError) as error:
        raise UsageError(str(error)) from error
    return _select(source, seed, instances), source.refused if isinstance(source, TaskList) else None


def tasks_from_rows(
    name: str, rows: Sequence[Mapping[str, Any]], instances: int | None = None
) -> tuple[list[Task], tuple[TaskRefusal, ...]]:
    """Like `load_tasks`, for the rows of a task file; paths in them are relative to the working directory."""
    source = _from_items(name, rows)
    return _select(source, None, instances), source.refused


def _select(source: TaskSource, seed: int | None, instances: int | None) -> list[Task]:
    if seed is not None:
        return [source.task(seed)]
    if isinstance(source, TaskList):
        return [source.task(position) for position in source.seeds[:instances]]
    return [source.task(number) for number in range(instances or 1)]


def _task_of_row(row: Row, position: int, folder: Path) -> Task:
    make = swebench.swebench_task if swebench.is_swebench_row(row) else row_task
    return make(row, position, folder)


def _from_python(target: str) -> TaskSource:
    module_name, _, attribute = target.partition(":")
    try:
        source = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError) as error:
        raise UnknownTaskFamilyError(f"cannot load task source {target!r}: {error}") from error
    if isinstance(source, TaskSource):
        return source
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping):
        return _from_items(target, source)
    raise TypeError(f"{target} is not a task source: it needs `name` and `task(seed)`, or must return tasks")


def _from_items(target: str, items: Iterable[object]) -> TaskList:
    """Make a task list of tasks, or of rows as in a task file with paths relative to the working directory."""

    def candidates() -> Iterator[TaskCandidate]:
        for number, item in enumerate(items):
            yield TaskCandidate(f"{target}[{number}]", _item_name(item), partial(_task_of_item, item))

    return make_task_list(target, candidates())


def _item_name(item: object) -> str | None:
    if isinstance(item, Task):
        return item.task_id
    name = item.get("task_id") or item.get("instance_id") if isinstance(item, Mapping) else None
    return str(name) if name else None


def _task_of_item(item: object, position: int) -> Task:
    if isinstance(item, Task):
        return replace(item, seed=position)
    if isinstance(item, Mapping):
        return _task_of_row(dict(item), position, Path.cwd())
    raise BadTaskError("is neither a Task nor a row")
