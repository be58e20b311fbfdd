"""What evaluators get and give.

* An evaluator works in a workspace that no agent has touched; of the agent's it gets the patch, and nothing else.
* What decides (hidden tests, scripts, reward files) is put in, or made, after the patch, so that no patch replaces it.
* ``None`` is no reward and means that the task could not be judged. It is never used for work that is merely bad, and
  never counted as 0.

What no evaluator here can rule out: tests import the agent's code, so that code runs in the tests' own process, with
their rights, inside the evaluation sandbox. It can print what a test runner prints. It reaches nothing outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from polar_proxy.errors import PolarError
from polar_proxy.tasks import Task
from polar_proxy.types import CallRecord, Json

APPLY_SECONDS = 60.0
# Nothing of a configuration that came with the workspace decides how a patch is read.
_APPLY = ("git", "-c", "core.autocrlf=false", "-c", "safe.directory=*", "apply", "--whitespace=nowarn", "-")


class EvaluatorError(PolarError):
    """An evaluator could not do its work; the rollout gets no reward."""


class CommandResult(Protocol):
    @property
    def exit_code(self) -> int: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def timed_out(self) -> bool: ...


class Workspace(Protocol):
    """What an evaluator needs of a sandbox."""

    home: str
    workdir: str

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None: ...
    async def write_tree(self, files: Mapping[str, bytes], root: str | None = None) -> None: ...
    async def read(self, path: str, limit: int = ...) -> bytes: ...
    async def kill_all(self) -> None: ...
    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> CommandResult: ...


SandboxFactory = Callable[[], AbstractAsyncContextManager[Workspace]]
"""Opens a new sandbox in which the task's own state has been laid out, as the agent found it."""


@dataclass(frozen=True, slots=True)
class EvaluationInput:
    """What is judged."""

    task: Task
    patch: bytes
    """The agent's work: a git diff against the task's own state, which may be empty."""
    exit_code: int | None = None
    """The agent program's own; None if the clock ended it."""
    calls: Sequence[CallRecord] = ()
    """What was recorded of the run; only filled for tasks with a `python` evaluator."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with what it was judged by; `log` is the output for people."""

    reward: float | None
    """Most evaluators give 0 to 1; ``None``: could not be judged, with the reason in `detail`."""
    detail: Json = field(default_factory=dict)
    log: bytes = b""
    calls: Mapping[str, float | None] = field(default_factory=dict)
    """Rewards of single calls, by call id."""


async def apply_patch(patch: bytes, workspace: Workspace) -> str | None:
    """Apply a git diff in the root of the workspace, as a whole or not at all; the reason why not, or None.

    `git apply` refuses paths that leave the workspace, lead through a link, or lie in .git.
    """
    if not patch.strip():
        return None
    result = await workspace.exec(_APPLY, stdin=patch, timeout=APPLY_SECONDS)
    if result.exit_code == 0 and not result.timed_out:
        return None
    return result.stderr.decode(errors="replace").strip()[-2000:] or "git apply was too slow"


def patch_does_not_apply(why: str) -> Score:
    """The score of a patch that does not apply: bad work, so 0."""
    return Score(0.0, {"patch_applied": False, "solved": False}, why.encode())
