"""What a task is.

A task is pure data: it names no harness and no engine, and no sandbox beyond what it needs of one. The promise of a
source is that the same seed gives the same task, byte for byte, on every machine and Python version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from polar_proxy.errors import UsageError
from polar_proxy.tasks.evaluation import Evaluator, HiddenTestsEvaluator


class UnknownTaskFamilyError(LookupError):
    """No source has this name; the message lists those that exist."""


class BadTaskError(UsageError):
    """One task of a source cannot be used; the text says why, its caller knows which task."""


@dataclass(frozen=True)
class Repository:
    """A git repository of this machine, or one that it can fetch."""

    source: str
    """Path of a repository or of a bundle, or a URL that git understands."""
    commit: str
    """The commit that the agent begins at; its ancestors are all that the agent can see."""


@dataclass(frozen=True)
class Environment:
    """What a task needs of the place in which the agent works. The default is an empty sandbox of any kind."""

    image: str | None = None
    """Image of a docker sandbox; it holds the workspace at `workdir`."""
    build: str | None = None
    """Folder of this machine with a Dockerfile, of which the image is made (once for each content)."""
    without_image: bool = False
    """The task can do without `image` and `build`: then `files` are the workspace, in any sandbox that has its own
    file system."""
    repository: Repository | None = None
    """The workspace is this repository, with the history up to its commit and nothing later."""
    base_commit: str | None = None
    """Commit in the image's own repository at which history ends; None: where its HEAD stands."""
    workdir: str | None = None
    """Absolute path of the workspace; None: the sandbox's own."""
    folders: tuple[str, ...] = ()
    """Empty writable folders beside it, absolute."""
    hide: tuple[str, ...] = ()
    """What of the image the agent must not see, absolute: removed before it starts."""
    snapshot: bool = False
    """The workspace is handed over as it is and not as a git repository. What changed is told from a snapshot kept
    apart, files that git would ignore included; a repository that it holds is neither cleaned nor compared."""
    executable: tuple[str, ...] = ()
    """Which of the task's `files` are programs (mode 755)."""
    env: Mapping[str, str] = field(default_factory=dict)
    memory_mb: int | None = None
    cpus: float | None = None

    @property
    def needs_image(self) -> bool:
        return (self.image is not None or self.build is not None) and not self.without_image


@dataclass(frozen=True)
class Task:
    """One thing an agent is asked to do, with the means to judge the result."""

    task_id: str
    """Unique and stable, for example ``swe-task-42``."""
    family: str
    """Name of the source that made it."""
    seed: int
    """The seed that reproduces it within its family; in a file or folder of tasks its position, from 0."""
    instruction: str
    """What the agent is told, in plain language."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Workspace at the start, relative POSIX path to text; the rollout commits it to git."""
    hidden_files: Mapping[str, str] = field(default_factory=dict)
    """Written over the patched workspace in the fresh evaluation sandbox; the agent never sees them."""
    test_command: tuple[str, ...] = ()
    """Run in the root of the evaluated workspace; a log parser reads its output."""
    fail_to_pass: tuple[str, ...] = ()
    """Test ids that fail before the fix and must pass after it."""
    pass_to_pass: tuple[str, ...] = ()
    """Test ids that pass before the fix and must still pass."""
    timeout_seconds: float = 60.0
    """Limit of each evaluator's command, wall clock."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the instance for people and reports; JSON values only, and never shown to the agent."""
    environment: Environment = field(default_factory=Environment)
    evaluators: tuple[Evaluator, ...] = field(default_factory=lambda: (HiddenTestsEvaluator(),))
    """How the result is judged; of several the reward is the mean by weight."""
    agent_seconds: float | None = None
    """The task's own limit of the agent's time, wall clock; the run's own limit holds as well."""


@runtime_checkable
class TaskSource(Protocol):
    """A family of tasks, numbered by seed."""

    name: str

    def task(self, seed: int) -> Task:
        """Return the task of `seed` (0 or more). The same seed gives an equal task, always."""
        ...
