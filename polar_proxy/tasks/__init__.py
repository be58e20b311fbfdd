"""Tasks, and the sources that they come from."""

from polar_proxy.tasks.sources import get_source, list_sources, load_tasks, tasks_from_rows
from polar_proxy.tasks.task import (
    Environment,
    GitRepository,
    Task,
    TaskSource,
    UnknownTaskFamilyError,
    task_from_json,
    task_to_json,
)
from polar_proxy.tasks.task_list import TaskList, TaskRefusal

__all__ = [
    "Environment",
    "GitRepository",
    "Task",
    "TaskList",
    "TaskRefusal",
    "TaskSource",
    "UnknownTaskFamilyError",
    "get_source",
    "list_sources",
    "load_tasks",
    "task_from_json",
    "task_to_json",
    "tasks_from_rows",
]
