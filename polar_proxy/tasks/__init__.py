"""Tasks, and the sources that they come from."""

from polar_proxy.tasks.sources import TaskList, TaskRefusal, get_source, is_family, load_tasks, tasks_from_rows
from polar_proxy.tasks.task import (
    DialogueUser,
    Environment,
    GitRepository,
    Task,
    TaskSource,
    check_task,
    task_from_json,
    task_to_json,
)

__all__ = [
    "DialogueUser",
    "Environment",
    "GitRepository",
    "Task",
    "TaskList",
    "TaskRefusal",
    "TaskSource",
    "check_task",
    "get_source",
    "is_family",
    "load_tasks",
    "task_from_json",
    "task_to_json",
    "tasks_from_rows",
]
