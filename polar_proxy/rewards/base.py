"""The interface of an evaluator: its input and its result.

* An evaluator works in a workspace that no agent has touched. Nothing of the run gets into this workspace, except
  the agent's patch.
* Hidden tests, scripts and reward files are written after the patch is applied. Parts of the patch that could take the
  place of such a file, or be imported instead of it, are left out (`patches`).
* A reward of ``None`` means that the task could not be judged. Bad work has the reward 0 instead, and None is never
  counted as 0.

One attack remains possible: tests import the agent's code, which then runs in the test process (except with
`by_value`) and may forge verdicts in ways that `test_runner` does not detect (docs/security.md). The code cannot reach
anything outside the evaluation sandbox.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from polar_proxy.allowed_code import NO_CODE, AllowedCode
from polar_proxy.errors import BadTaskError, PolarError
from polar_proxy.types import CallRecord, Json

APPLY_SECONDS = 60.0
# The command line overrides any git configuration in the workspace that would change how a patch is read.
_APPLY = ("git", "-c", "core.autocrlf=false", "-c", "safe.directory=*", "apply", "--whitespace=nowarn")
_DIFF_HEADER = re.compile(r"^diff --git (?:\"?a/)(?P<old>.*?)\"? (?:\"?b/)(?P<new>.*?)\"?$", re.MULTILINE)


class EvaluatorError(PolarError):
    """An evaluator could not do its work; the rollout gets no reward."""


class PatchDoesNotApplyError(PolarError):
    """The agent's patch cannot be applied; the text says why. The reward is 0, because this is the agent's fault."""


class CommandResult(Protocol):
    """The part of a sandbox's command result that evaluators read."""

    @property
    def exit_code(self) -> int: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def timed_out(self) -> bool: ...


class WorkspaceTree(Protocol):
    """The files below a folder of a sandbox, read from outside: the part of `SandboxTree` that evaluators use."""

    @property
    def entries(self) -> Mapping[bytes, Any]: ...
    def read(self, path: bytes) -> bytes: ...
    def close(self) -> None: ...


class Workspace(Protocol):
    """The part of a sandbox that evaluators use."""

    home: str
    workdir: str

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None: ...
    async def write_tree(self, files: Mapping[str, bytes], root: str | None = None) -> None: ...
    async def read(self, path: str, limit: int = ...) -> bytes: ...
    async def kill_all(self) -> None: ...
    async def read_tree(self, path: str | None = None) -> WorkspaceTree: ...
    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> CommandResult: ...


SandboxFactory = Callable[[], AbstractAsyncContextManager[Workspace]]
"""Opens a new sandbox with the task's own files, in the state before the agent's run."""


class EvaluatedTask(Protocol):
    """The part of `polar_proxy.tasks.Task` that evaluators read."""

    @property
    def hidden_files(self) -> Mapping[str, str]: ...
    @property
    def test_command(self) -> tuple[str, ...]: ...
    @property
    def fail_to_pass(self) -> tuple[str, ...]: ...
    @property
    def pass_to_pass(self) -> tuple[str, ...]: ...
    @property
    def timeout_seconds(self) -> float: ...
    @property
    def base_commit(self) -> str | None: ...
    @property
    def evaluators(self) -> Sequence[Evaluator]: ...


@dataclass(frozen=True, slots=True)
class EvaluationInput:
    """The input of an evaluator: a task and the agent's work on it."""

    task: EvaluatedTask
    patch: bytes
    """The agent's work as a git diff against the task's own files; may be empty."""
    exit_code: int | None = None
    """Exit status of the agent program; None if it ran out of time or was stopped."""
    calls: Sequence[CallRecord] = ()
    """The recorded calls of the run; filled only for tasks with a `python` evaluator."""
    leave_out: tuple[str, ...] = ()
    """Patterns for `git apply --exclude`: parts of the patch that are never applied in an evaluator's workspace. Set by
    `evaluate`."""
    changed_paths: tuple[str, ...] = ()
    """The paths that the patch changes, except paths that match `leave_out`. Set by `evaluate`."""
    code: AllowedCode = NO_CODE
    """The functions that the task may refer to."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with the reasons for it. `log` is output for people."""

    reward: float | None
    """Usually 0 to 1. ``None``: the task could not be judged; `detail` says why."""
    detail: Json = field(default_factory=dict)
    log: bytes = b""
    call_rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Rewards of single calls, by call id."""
    signs: tuple[str, ...] = ()
    """Signs of reward hacking that were seen while the work was judged. `evaluate` adds them to `detail`."""


class Evaluator(ABC):
    """One way to judge a rollout. A subclass is a frozen dataclass: its fields are the options a task file may set."""

    kind: str
    weight: float

    @abstractmethod
    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        """Judge the work. Raises EvaluatorError and PatchDoesNotApplyError."""

    @abstractmethod
    def check(self, task: EvaluatedTask) -> None:
        """Raise `BadTaskError` for a task that this evaluator could not judge, or would judge wrongly."""

    @property
    def code_names(self) -> Iterable[str]:
        """The functions, as ``module:function``, that this evaluator calls. The setting `allowed_code` must name
        them; otherwise `check_task` refuses the task."""
        return ()

    @property
    def host_paths(self) -> Iterable[str]:
        """The files and folders of this machine that this evaluator reads."""
        return ()

    @property
    def runs(self) -> int:
        """Number of commands that the evaluator runs, each with the task's time limit."""
        return 1

    @property
    def protected_files(self) -> Iterable[str]:
        """Paths in the workspace that decide the reward, besides the task's hidden files."""
        return ()


def hidden_paths(task: EvaluatedTask) -> set[str]:
    """Return the paths in the workspace that decide the reward."""
    return {*task.hidden_files, *(path for evaluator in task.evaluators for path in evaluator.protected_files)}


async def apply_patch(patch: bytes, workspace: Workspace, leave_out: Iterable[str] = ()) -> str | None:
    """Apply a git diff in the root of the workspace, wholly or not at all. Return git's error, or None.

    `leave_out`: patterns of paths whose changes are not applied. `git apply` refuses paths that leave the workspace,
    follow a link, or lie in .git.
    """
    if not patch.strip():
        return None
    excludes = [f"--exclude={pattern}" for pattern in leave_out]
    result = await workspace.exec((*_APPLY, *excludes, "-"), stdin=patch, timeout=APPLY_SECONDS)
    if result.exit_code == 0 and not result.timed_out:
        return None
    return result.stderr.decode(errors="replace").strip()[-2000:] or "git apply was too slow"


@contextlib.asynccontextmanager
async def patched_workspace(sandboxes: SandboxFactory, work: EvaluationInput) -> AsyncIterator[Workspace]:
    """Open a sandbox with the task's own files and apply the agent's patch, except the paths in `work.leave_out`.

    Raises PatchDoesNotApplyError."""
    async with sandboxes() as workspace:
        if (error := await apply_patch(work.patch, workspace, work.leave_out)) is not None:
            raise PatchDoesNotApplyError(error)
        yield workspace


def patched_files(patch: str) -> tuple[str, ...]:
    """Return the paths in a benchmark's own git diff, in order. A renamed file counts with both names.

    Do not use it for an agent's patch, whose text may be made to mislead: see `patches.changed_paths`.
    """
    paths = (path for found in _DIFF_HEADER.finditer(patch) for path in (found["old"], found["new"]))
    return tuple(dict.fromkeys(paths))


def check_relative_path(field_name: str, path: str) -> None:
    """Raise `BadTaskError` for a path that leaves the workspace or lies in its .git folder."""
    parts = path.split("/")
    if posixpath.isabs(path) or ".." in parts or posixpath.normpath(path) == "." or "\0" in path:
        raise BadTaskError(f"{field_name}: {path!r} is not a path below the workspace")
    if ".git" in parts:
        raise BadTaskError(f"{field_name}: {path!r} is inside the folder .git")
