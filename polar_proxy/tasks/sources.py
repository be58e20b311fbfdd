"""From what a user types to a source of tasks: a name, a path, or something of theirs in Python."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from polar_proxy.errors import UsageError
from polar_proxy.tasks import harbor, swebench
from polar_proxy.tasks.task import BadTaskError, Task, TaskSource, UnknownTaskFamilyError
from polar_proxy.tasks.task_list import Row, TaskCandidate, TaskList, make_task_list, read_rows, row_task

_BUILT_IN: Mapping[str, str] = {"swe-task": "polar_proxy.tasks.swe_task:SweTaskSource"}
_SUFFIXES = (".jsonl", ".json", ".ndjson")


def list_sources() -> tuple[str, ...]:
    """Names of the built-in families, sorted."""
    return tuple(sorted(_BUILT_IN))


def get_source(name: str) -> TaskSource:
    """Return the task source that `name` stands for:

    * a built-in family, such as ``swe-task``;
    * the path of a JSONL or JSON file: rows of tasks, or rows shaped like SWE-bench's;
    * the path of a Harbor task folder, or of a folder that holds such folders;
    * ``module:Class``, a `TaskSource` of your own, or ``module:function`` that returns tasks (or rows).

    Raises `UnknownTaskFamilyError` when there is none, `TypeError` when it is no source, `UsageError` when a file
    cannot be read. Tasks that are bad by themselves are in the source's `refused`.
    """
    if name in _BUILT_IN:
        return _from_python(_BUILT_IN[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return harbor.read_folder(path)
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise UsageError(f"{name} is no task file: its name must end in {', '.join(_SUFFIXES)}")
        return read_rows(path, lambda row, position: _row(row, position, path.parent))
    if ":" in name and "/" not in name:
        return _from_python(name)
    if "/" in name or name.endswith(_SUFFIXES):
        raise UnknownTaskFamilyError(f"there is no task file or folder {name}")
    known = ", ".join(list_sources())
    raise UnknownTaskFamilyError(
        f"no task family {name!r}; built in: {known}; or give a file, a folder, module:Class or module:function"
    )


def _row(row: Row, position: int, folder: Path) -> Task:
    if swebench.is_swebench_row(row):
        return swebench.swebench_task(row, position, folder)
    return row_task(row, position, folder)


def _from_python(target: str) -> TaskSource:
    module_name, _, attribute = target.partition(":")
    try:
        source = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError) as error:
        raise UnknownTaskFamilyError(f"cannot load task source {target!r}: {error}") from error
    if isinstance(source, TaskSource):
        return source
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping):
        return from_items(target, source)
    raise TypeError(f"{target} is no task source: it needs `name` and `task(seed)`, or must return tasks")


def from_items(target: str, items: Iterable[object]) -> TaskList:
    """Tasks, or rows as a task file has them; paths in a row are relative to the working directory."""

    def entries() -> Iterator[TaskCandidate]:
        for number, item in enumerate(items):
            where = f"{target}[{number}]"
            yield TaskCandidate(where, _name(item), partial(_item, item))

    return make_task_list(target, entries())


def _name(item: object) -> str | None:
    if isinstance(item, Task):
        return item.task_id
    name = item.get("task_id") or item.get("instance_id") if isinstance(item, Mapping) else None
    return str(name) if name else None


def _item(item: object, position: int) -> Task:
    if isinstance(item, Task):
        return replace(item, seed=position)
    if isinstance(item, Mapping):
        return _row(dict(item), position, Path.cwd())
    raise BadTaskError("is neither a Task nor a row")
