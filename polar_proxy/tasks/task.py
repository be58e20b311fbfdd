"""The definition of a task, and the checks that every task must pass.

A task is data. It names no harness and no engine, and only states its requirements for a sandbox. A task source
promises that the same seed gives the same task, byte for byte, on every machine and Python version.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from pydantic import TypeAdapter, ValidationError

from polar_proxy.allowed_code import NO_CODE, AllowedCode
from polar_proxy.errors import BadTaskError, first_problem
from polar_proxy.rewards import AnyEvaluator, HiddenTestsEvaluator, check_relative_path
from polar_proxy.types import Json

_GIT_URL = re.compile(r"(https?|ssh|git|file)://(?!-)[^\s\0]+")
_COMMIT = re.compile(r"[A-Za-z0-9_][\w./@{}^~+-]{0,255}", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*([/:@][A-Za-z0-9][A-Za-z0-9_.-]*)*")
"""Image name (https://pkg.go.dev/github.com/distribution/reference). No part may look like an option or be `..`."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f]")
_NAME_LENGTH = 512

Row = dict[str, Any]
"""A row of a task file."""


@dataclass(frozen=True)
class GitRepository:
    """A git repository on this machine, or one that git can fetch from elsewhere."""

    source: str
    """Path of a repository or of a bundle, or a URL for git."""
    commit: str
    """The commit at which the agent starts. The agent sees this commit and its ancestors, and no other."""


@dataclass(frozen=True)
class Environment:
    """The requirements of a task for its sandbox. The default is an empty sandbox of any kind."""

    image: str | None = None
    """Docker image that holds the workspace at `workdir`."""
    build: str | None = None
    """Folder on this machine with the image's Dockerfile. The image is built anew when the folder's content changes."""
    without_image: bool = False
    """The task also runs without `image` and `build`, in any sandbox that has its own file system. The workspace is
    then the `repository`, or consists of `files`."""
    repository: GitRepository | None = None
    """The workspace is this repository, with its history up to the commit and nothing later."""
    base_commit: str | None = None
    """Commit from which the agent starts, if the image contains the repository: later commits are removed. None: the
    repository's HEAD."""
    workdir: str | None = None
    """Absolute path of the workspace; None: the sandbox's default."""
    folders: tuple[str, ...] = ()
    """Absolute paths of further empty, writable folders."""
    hide: tuple[str, ...] = ()
    """Absolute paths in the image that are removed before the agent starts, because it must not see them."""
    snapshot: bool = False
    """True: the agent gets the workspace as it is, and Polar makes no git repository of it. The agent's changes are
    found by comparison with a snapshot outside the workspace, also in files that git would ignore. A repository that
    the workspace already contains stays as it is, and changes in its .git folder do not count."""
    executable: tuple[str, ...] = ()
    """The names of the executable files (mode 755) among the task's `files`."""
    env: Mapping[str, str] = field(default_factory=dict)
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    """MiB that the files in home, workspace and folders may take; None: the setting `sandboxes.disk_mb`."""
    build_network: bool = False
    """True if the commands of the Dockerfile in `build` have a network."""

    @property
    def needs_image(self) -> bool:
        return (self.image is not None or self.build is not None) and not self.without_image


@dataclass(frozen=True)
class DialogueUser:
    """The user of a task that is a dialogue: given texts, or a model that plays a persona."""

    texts: tuple[str, ...] = ()
    """Messages of the user after the instruction, one after each turn of the agent."""
    persona: str | None = None
    """Description of the user for the model that plays the user: who they are, what they want and what they know. Given
    instead of `texts`."""


@dataclass(frozen=True)
class Task:
    """An instruction for an agent, with its workspace and the evaluation of the result."""

    task_id: str
    """Unique and stable, for example ``swe-task-42``."""
    family: str
    """Name of the source that the task comes from."""
    seed: int
    """The seed that reproduces the task within its family. If the family is a file or folder of tasks: the position of
    the task, counted from 0."""
    instruction: str
    """The prompt for the agent."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The workspace at the start: text by relative POSIX path. The rollout commits it to git."""
    hidden_files: Mapping[str, str] = field(default_factory=dict)
    """Files that are written over the patched workspace in a fresh evaluation sandbox. The agent never sees them."""
    test_command: tuple[str, ...] = ()
    """The command that runs the tests in the root of the evaluated workspace; a log parser reads its output."""
    fail_to_pass: tuple[str, ...] = ()
    """Test ids that fail before the fix and must pass after it."""
    pass_to_pass: tuple[str, ...] = ()
    """Test ids that pass before the fix and must still pass."""
    timeout_seconds: float = 60.0
    """Wall-clock limit of each evaluator's command."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for people and reports, never shown to the agent. Polar reads `stop_when` and `train_timed_out`."""
    environment: Environment = field(default_factory=Environment)
    evaluators: tuple[AnyEvaluator, ...] = field(default_factory=lambda: (HiddenTestsEvaluator(),))
    """How the result is judged. The reward of several evaluators is their weighted mean."""
    user: DialogueUser | None = None
    """Makes the task a dialogue: the instruction is the first text of this user, who answers each turn of the agent."""
    agent_seconds: float | None = None
    """The task's wall-clock limit for the agent; the run's own limit applies as well."""

    @property
    def base_commit(self) -> str | None:
        """The commit at which the agent starts. None: the HEAD of the image's repository, or no commit if there is no
        such repository."""
        repository = self.environment.repository
        return repository.commit if repository else self.environment.base_commit

    @property
    def code_names(self) -> tuple[str, ...]:
        """The Python functions on this machine, as ``module:function``, that the task's evaluators call."""
        return tuple(name for evaluator in self.evaluators for name in evaluator.code_names)

    @property
    def host_paths(self) -> tuple[str, ...]:
        """The files and folders of this machine that the task uses."""
        repository = self.environment.repository
        found = [path for evaluator in self.evaluators for path in evaluator.host_paths]
        found += [self.environment.build] if self.environment.build else []
        if repository is not None and (path := local_path(repository.source)) is not None:
            found.append(path)
        return tuple(found)


@runtime_checkable
class TaskSource(Protocol):
    """A family of tasks, numbered by seed."""

    name: str

    def task(self, seed: int) -> Task:
        """Return the task of `seed` (0 or more). The same seed always gives an equal task."""
        ...


def task_to_json(task: Task) -> Json:
    """Return the whole task as JSON values."""
    return asdict(task)


def task_from_json(value: Json) -> Task:
    """Read what `task_to_json` wrote. Raises `BadTaskError` for a task that this version cannot read."""
    try:
        return _task_reader().validate_python(value)
    except ValidationError as error:
        raise BadTaskError(first_problem(error)) from None


@cache
def _task_reader() -> TypeAdapter[Task]:
    return TypeAdapter(Task)  # making it takes longer than the start of an attempt


def check_task(task: Task, code: AllowedCode = NO_CODE) -> None:
    """Raise `BadTaskError` if the task would fail later or be judged wrongly. The error names the faulty field.

    Also refuses a task whose evaluators call functions that `code` does not allow. Imports no function.
    """
    if not task.task_id or any(letter.isspace() for letter in task.task_id):
        raise BadTaskError("task_id: must be text without spaces")
    if len(task.task_id) > _NAME_LENGTH or _CONTROL.search(task.task_id):
        raise BadTaskError(f"task_id: must have at most {_NAME_LENGTH} characters, and no control characters")
    if not task.instruction.strip():
        raise BadTaskError("instruction: is empty")
    if "\0" in task.instruction:
        raise BadTaskError("instruction: contains a NUL character, which no command line can hold")
    _check_positive("timeout_seconds", task.timeout_seconds)
    if task.agent_seconds is not None:
        _check_positive("agent_seconds", task.agent_seconds)
    if task.user is not None:
        _check_user(task.user)
    for name in task.files:
        check_relative_path("files", name)
    for name in task.hidden_files:
        check_relative_path("hidden_files", name)
    if not task.evaluators:
        raise BadTaskError("evaluators: is empty")
    for evaluator in task.evaluators:
        _check_positive(f"{evaluator.kind}: weight", evaluator.weight)
        evaluator.check(task)
        for name in evaluator.code_names:
            code.check(name)
    _check_environment(task.environment, task)


def _check_user(user: DialogueUser) -> None:
    if bool(user.texts) == (user.persona is not None):
        raise BadTaskError("user: give either texts or a persona")
    texts = (*user.texts, *([] if user.persona is None else [user.persona]))
    if not all(text.strip() for text in texts):
        raise BadTaskError("user: a text is empty")
    if any("\0" in text for text in texts):
        raise BadTaskError("user: a text contains a NUL character, which no command line can hold")


def _check_positive(field_name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise BadTaskError(f"{field_name}: must be above 0, not {value}")


def _check_environment(environment: Environment, task: Task) -> None:
    paths = (*environment.folders, *environment.hide, *([environment.workdir] if environment.workdir else []))
    for path in paths:
        if not posixpath.isabs(path) or posixpath.normpath(path) == "/" or ".." in path.split("/") or "\0" in path:
            raise BadTaskError(f"environment: {path!r} must be an absolute path below /, without ..")
    if environment.image is not None and not _IMAGE.fullmatch(environment.image):
        raise BadTaskError(f"environment.image: {environment.image!r} is not the name of an image")
    if environment.base_commit is not None:
        _check_commit("environment.base_commit", environment.base_commit)
    for name, value in environment.env.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise BadTaskError(f"environment.env: {name!r} is not the name of a variable, or its value has a NUL byte")
    if unknown := set(environment.executable) - set(task.files):
        raise BadTaskError(f"environment.executable: {min(unknown)!r} is not among the files")
    for field_name, number in (("memory_mb", environment.memory_mb), ("cpus", environment.cpus)):
        if number is not None:
            _check_positive(f"environment.{field_name}", number)
    if environment.repository is not None:
        _check_repository(environment.repository)
        if task.files:
            raise BadTaskError("files: the repository is the workspace already; give files or repository, not both")
    if environment.build is not None and not os.path.isfile(os.path.join(environment.build, "Dockerfile")):
        raise BadTaskError(f"environment.build: {environment.build} has no Dockerfile")


def _check_repository(repository: GitRepository) -> None:
    """Refuse a source or commit that git on this machine would take for an option or for a command.

    Rows of task files are not trusted.
    """
    source = repository.source
    if "://" in source and not _GIT_URL.fullmatch(source):
        raise BadTaskError(f"environment.repository: {source!r} is not a URL with https, http, ssh, git or file")
    path = local_path(source)
    if path is not None and (path.startswith("-") or "\0" in path or not os.path.exists(path)):
        raise BadTaskError(f"environment.repository: {path} does not exist")
    _check_commit("environment.repository", repository.commit)


def _check_commit(field_name: str, commit: str) -> None:
    """Refuse what git would take for an option, a range or a refspec."""
    if not _COMMIT.fullmatch(commit) or ".." in commit:
        raise BadTaskError(f"{field_name}: {commit!r} is not the name of a commit")


def local_path(source: str) -> str | None:
    """Return the path of a repository on this machine. None if git fetches the repository from another machine."""
    if source.startswith("file://"):
        parts = urlsplit(source)
        return unquote(parts.path) if parts.netloc in ("", "localhost") else source
    return None if "://" in source else source


def resolve_path(source: str, folder: Path) -> str:
    """Make a path relative to `folder` absolute; return a URL unchanged."""
    return source if "://" in source else str((folder / source).absolute())
