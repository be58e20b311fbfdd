"""Which tasks of a source are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polar_proxy.errors import UsageError
from polar_proxy.tasks.sources import from_items, get_source
from polar_proxy.tasks.task import Task, TaskSource, UnknownTaskFamilyError
from polar_proxy.tasks.task_list import RejectedTask, TaskList


def load_tasks(
    task: str, seed: int | None, instances: int | None
) -> tuple[list[Task], tuple[RejectedTask, ...] | None]:
    """The tasks of the source that `task` stands for (see `get_source`), and those of a file or folder that were
    refused (None: it is not a file). Raises UsageError where there is no such source, and for a `seed` that it does
    not hold.

    With neither `seed` nor `instances`: one of a family, all of a file or folder.
    """
    if seed is not None and instances is not None:
        raise UsageError("Give --seed (one instance) or --instances (many), not both.")
    try:
        source = get_source(task)
    except (UnknownTaskFamilyError, TypeError) as error:
        raise UsageError(str(error)) from error
    return _chosen(source, seed, instances), source.refused if isinstance(source, TaskList) else None


def tasks_from_rows(
    name: str, rows: Sequence[Mapping[str, Any]], instances: int | None = None
) -> tuple[list[Task], tuple[RejectedTask, ...]]:
    """As `load_tasks`, of rows as they would stand in a task file; paths in them are relative to the working
    directory."""
    source = from_items(name, rows)
    return _chosen(source, None, instances), source.refused


def _chosen(source: TaskSource, seed: int | None, instances: int | None) -> list[Task]:
    if seed is not None:
        return [source.task(seed)]
    if isinstance(source, TaskList):
        return [source.task(place) for place in source.seeds[:instances]]
    return [source.task(place) for place in range(instances or 1)]
