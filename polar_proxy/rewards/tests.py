"""The `tests` evaluator: hidden tests, run in a fresh sandbox that the agent never touched.

Only the agent's patch is carried over. The hidden test files are written after it, so that a patch cannot replace
them; a task counts as solved when every test that had to turn green did, and none that was green turned red.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from polar_proxy.tasks.base import Task
from polar_proxy.tasks.unittest_output import parse_unittest
from polar_proxy.types import Json


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

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None: ...
    async def write_tree(self, files: Mapping[str, bytes], root: str | None = None) -> None: ...
    async def exec(
        self, argv: tuple[str, ...], *, timeout: float | None = None, stdin: bytes = b""
    ) -> CommandResult: ...


@dataclass(frozen=True, slots=True)
class Score:
    """A reward in [0, 1] with what it was judged by; `log` is the test output for people."""

    reward: float
    detail: Json
    log: bytes


async def evaluate(task: Task, patch: bytes, workspace: Workspace) -> Score:
    """Score a patch (unified diff against the task's files, may be empty) in an empty workspace."""
    await workspace.write_tree({name: text.encode() for name, text in task.files.items()})
    applied = True
    if patch.strip():
        # Outside a repository `git apply` only reads the patch and writes below the working directory.
        result = await workspace.exec(("git", "apply", "--whitespace=nowarn", "-"), stdin=patch, timeout=60)
        applied = result.exit_code == 0
        if not applied:
            return Score(0.0, {"patch_applied": False, "solved": False}, result.stderr)
    await workspace.write_tree({name: text.encode() for name, text in task.hidden_files.items()})
    result = await workspace.exec(task.test_command, timeout=task.timeout_seconds)
    log = result.stdout + result.stderr
    verdicts = parse_unittest(log.decode(errors="replace"))
    missed = [name for name in task.fail_to_pass if verdicts.get(name) != "passed"]
    broken = [name for name in task.pass_to_pass if verdicts.get(name) != "passed"]
    solved = not missed and not broken and not result.timed_out
    detail: Json = {
        "solved": solved,
        "patch_applied": applied,
        "fail_to_pass": {"passed": len(task.fail_to_pass) - len(missed), "total": len(task.fail_to_pass)},
        "pass_to_pass": {"passed": len(task.pass_to_pass) - len(broken), "total": len(task.pass_to_pass)},
        "missed": missed,
        "broken": broken,
        "timed_out": result.timed_out,
    }
    return Score(1.0 if solved else 0.0, detail, log)
