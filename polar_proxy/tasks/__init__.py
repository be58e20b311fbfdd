"""Task sources: what agents are asked to do."""

from polar_proxy.tasks.base import Task, TaskSource, UnknownTaskFamilyError, get_source, list_sources
from polar_proxy.tasks.unittest_output import Verdict, parse_unittest

__all__ = [
    "Task",
    "TaskSource",
    "UnknownTaskFamilyError",
    "Verdict",
    "get_source",
    "list_sources",
    "parse_unittest",
]
