"""Task sources: what agents are asked to do."""

from polar_proxy.tasks.base import BadTaskError, Environment, Repository, Task, TaskSource, UnknownTaskFamilyError
from polar_proxy.tasks.listed import ListedTasks, Refusal
from polar_proxy.tasks.sources import get_source, list_sources
from polar_proxy.tasks.spec import from_spec, to_spec
from polar_proxy.tasks.unittest_output import Verdict, parse_unittest

__all__ = [
    "BadTaskError",
    "Environment",
    "ListedTasks",
    "Refusal",
    "Repository",
    "Task",
    "TaskSource",
    "UnknownTaskFamilyError",
    "Verdict",
    "from_spec",
    "get_source",
    "list_sources",
    "parse_unittest",
    "to_spec",
]
