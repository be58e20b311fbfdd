"""What a task is, and where tasks come from.

A task is pure data: it names no sandbox, no harness and no engine. The promise of a source is that the same
seed gives the same task, byte for byte, on every machine and Python version.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


class UnknownTaskFamilyError(LookupError):
    """No source has this name; the message lists those that exist."""


@dataclass(frozen=True)
class Task:
    """One thing an agent is asked to do, with the means to judge the result."""

    task_id: str
    """Unique and stable, for example ``swe-task-42``."""
    family: str
    """Name of the source that made it."""
    seed: int
    """The seed that reproduces it within its family."""
    instruction: str
    """What the agent is told, in plain language."""
    files: Mapping[str, str]
    """Workspace at the start, relative POSIX path to text; the rollout commits it to git."""
    hidden_files: Mapping[str, str]
    """Written over the patched workspace in the fresh evaluation sandbox; the agent never sees them."""
    test_command: tuple[str, ...]
    """Run in the root of the evaluated workspace; `parse_unittest` reads its output."""
    fail_to_pass: tuple[str, ...]
    """Test ids that fail before the fix and must pass after it."""
    pass_to_pass: tuple[str, ...]
    """Test ids that pass before the fix and must still pass."""
    timeout_seconds: float = 60.0
    """Limit of the test command, wall clock."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the instance for people and reports; JSON values only, and never shown to the agent."""


@runtime_checkable
class TaskSource(Protocol):
    """A family of tasks, numbered by seed."""

    name: str

    def task(self, seed: int) -> Task:
        """Return the task of `seed` (0 or more). The same seed gives an equal task, always."""
        ...


_BUILT_IN: Mapping[str, str] = {"swe-task": "polar_proxy.tasks.swe_task:SweTaskSource"}


def list_sources() -> tuple[str, ...]:
    """Names of the built-in families, sorted."""
    return tuple(sorted(_BUILT_IN))


def get_source(name: str) -> TaskSource:
    """Return the task source called `name`: a built-in family, or ``module:Class`` of your own.

    Raises `UnknownTaskFamilyError` when there is none, `TypeError` when the class is not a source.
    """
    target = _BUILT_IN.get(name, name)
    module_name, separator, class_name = target.partition(":")
    if not separator:
        known = ", ".join(list_sources())
        raise UnknownTaskFamilyError(f"no task family {name!r}; built in: {known}; or give module:Class")
    try:
        source = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        raise UnknownTaskFamilyError(f"cannot load task source {target!r}: {error}") from error
    if not isinstance(source, TaskSource):
        raise TypeError(f"{target} is no task source: it needs `name` and `task(seed)`")
    return source
