"""The evaluators `command` and `python`: a program or a function that the task's author wrote judges the work.

The evaluator `python` calls a synchronous function as ``function(work, **options)`` in a thread. It calls a coroutine
function as ``function(work, workspace, **options)`` in the event loop, where `workspace` is a fresh sandbox in which
the patch has been applied. A function of either kind returns a number, None, or a `Score`, which can also hold rewards
of single calls.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from polar_proxy.allowed_code import is_code
from polar_proxy.errors import BadTaskError, PolarError
from polar_proxy.rewards.base import (
    CommandResult,
    EvaluatedTask,
    EvaluationInput,
    Evaluator,
    EvaluatorError,
    SandboxFactory,
    Score,
    check_relative_path,
    patched_workspace,
)
from polar_proxy.types import Json


@dataclass(frozen=True)
class CommandEvaluator(Evaluator):
    """Writes `files` into the patched workspace, over existing files of these names, and runs `argv` there."""

    argv: tuple[str, ...]
    kind: Literal["command"] = "command"
    weight: float = 1.0
    files: Mapping[str, str] = field(default_factory=dict)
    reward: Literal["exit_code", "last_line"] = "exit_code"
    """`exit_code`: the reward is 1 for exit status 0, else 0. `last_line`: the reward is the number on the last line of
    stdout. If this line is ``null``, or the command fails, there is no reward."""

    def check(self, task: EvaluatedTask) -> None:
        if not self.argv:
            raise BadTaskError("command: argv is empty")
        for name in self.files:
            check_relative_path("command: files", name)

    @property
    def protected_files(self) -> Iterable[str]:
        return self.files

    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        async with patched_workspace(sandboxes, work) as workspace:
            await workspace.write_tree({name: text.encode() for name, text in self.files.items()})
            result = await workspace.exec(self.argv, timeout=work.task.timeout_seconds)
        log = result.stdout + result.stderr
        detail: Json = {"patch_applied": True, "exit_code": result.exit_code, "timed_out": result.timed_out}
        if self.reward == "exit_code":
            solved = result.exit_code == 0 and not result.timed_out
            return Score(float(solved), {**detail, "solved": solved}, log)
        try:
            return Score(_last_number(result), detail, log)
        except ValueError as error:
            return Score(None, {**detail, "no_reward": f"{self.argv[0]}: {error}"}, log)


def _last_number(result: CommandResult) -> float:
    """Return the number on the last non-empty line. Raises ValueError if there is none."""
    if result.timed_out:
        raise ValueError("it ran out of time")
    if result.exit_code != 0:
        raise ValueError(f"it exited with {result.exit_code}")
    lines = result.stdout.decode(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    if last is None:
        raise ValueError("it printed nothing")
    if last == "null":
        raise ValueError("it printed null, which means that it gives no reward")
    try:
        value = float(last)
    except ValueError:
        raise ValueError(f"the last line of its output is not a number: {last[:80]!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"the last line of its output is not a finite number: {last}")
    return value


@dataclass(frozen=True)
class PythonEvaluator(Evaluator):
    """Calls a Python function, ``module:function``, outside of any sandbox. The setting `allowed_code` must list the
    function."""

    function: str
    kind: Literal["python"] = "python"
    weight: float = 1.0
    options: Mapping[str, object] = field(default_factory=dict)

    def check(self, task: EvaluatedTask) -> None:
        if not is_code(self.function):
            raise BadTaskError(f"{self.function!r} must be module:function")

    @property
    def code_names(self) -> Iterable[str]:
        return (self.function,)

    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        """Call the function and check what it returns. Raises EvaluatorError if it fails or returns nothing usable."""
        function = work.code.load(self.function)
        if not callable(function):
            raise BadTaskError(f"{self.function} is not a function")
        if inspect.iscoroutinefunction(function):
            async with patched_workspace(sandboxes, work) as workspace:
                async with asyncio.timeout(work.task.timeout_seconds):
                    returned = await self._call(function, work, workspace)
        else:
            returned = await self._call(partial(asyncio.to_thread, function), work)
        return self._checked(returned if isinstance(returned, Score) else Score(returned), work)

    async def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return await function(*arguments, **self.options)
        except (PolarError, OSError):  # includes TimeoutError
            raise
        except Exception as error:
            raise EvaluatorError(f"{self.function} raised {type(error).__name__}: {error}") from error

    def _checked(self, score: Score, work: EvaluationInput) -> Score:
        for name, value in (("its reward", score.reward), *score.call_rewards.items()):
            if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
                raise EvaluatorError(f"{self.function}: {name} is {value!r}; a finite number or None was expected")
        if unknown := sorted(set(score.call_rewards) - {call.call_id for call in work.calls}):
            raise EvaluatorError(f"{self.function} rewards {unknown[0]}, which is not a call of this rollout")
        reward = None if score.reward is None else float(score.reward)
        detail = score.detail if reward is not None else {"no_reward": f"{self.function} returned None", **score.detail}
        return replace(score, reward=reward, detail=detail)
