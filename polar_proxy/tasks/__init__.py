"""Tasks, and the sources that they come from."""

from polar_proxy.tasks.sources import get_source, list_sources, load_tasks, tasks_from_rows
from polar_proxy.tasks.task import (
    Environment,
    Repository,
    Task,
    TaskSource,
    UnknownTaskFamilyError,
    task_from_json,
    task_to_json,
)
from polar_proxy.tasks.task_list import RefusedTask, TaskList

__all__ = [
    "Environment",
    "RefusedTask",
    "Repository",
    "Task",
    "TaskList",
    "TaskSource",
    "UnknownTaskFamilyError",
    "get_source",
    "list_sources",
    "load_tasks",
    "task_from_json",
    "task_to_json",
    "tasks_from_rows",
]
