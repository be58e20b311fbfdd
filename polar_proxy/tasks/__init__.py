"""Task sources: what agents are asked to do."""

from polar_proxy.tasks.sources import get_source, list_sources
from polar_proxy.tasks.spec import task_from_json, task_to_json
from polar_proxy.tasks.task import BadTaskError, Environment, Repository, Task, TaskSource, UnknownTaskFamilyError
from polar_proxy.tasks.task_list import RejectedTask, TaskList
from polar_proxy.tasks.unittest_output import Verdict, parse_unittest

__all__ = [
    "BadTaskError",
    "Environment",
    "RejectedTask",
    "Repository",
    "Task",
    "TaskList",
    "TaskSource",
    "UnknownTaskFamilyError",
    "Verdict",
    "get_source",
    "list_sources",
    "parse_unittest",
    "task_from_json",
    "task_to_json",
]
