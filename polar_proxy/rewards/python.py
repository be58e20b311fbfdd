"""The `python` evaluator: a function of the user, called in Polar's own process.

A plain function is called as ``function(work, **options)`` in a thread. A coroutine function is called as
``function(work, workspace, **options)`` in the event loop, with a fresh sandbox in which the patch has been applied.
Either returns a number, None, or a `Score`, which can also hold rewards of single calls.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from polar_proxy.errors import PolarError
from polar_proxy.rewards.base import (
    EvaluatedTask,
    EvaluationInput,
    Evaluator,
    EvaluatorError,
    SandboxFactory,
    Score,
    load_function,
    patched_workspace,
)


@dataclass(frozen=True)
class PythonEvaluator(Evaluator):
    """Calls a Python function, ``module:function``. The user must trust it, because it runs outside of any sandbox."""

    function: str
    kind: Literal["python"] = "python"
    weight: float = 1.0
    options: Mapping[str, object] = field(default_factory=dict)

    def check(self, task: EvaluatedTask) -> None:
        load_function(self.function)

    async def score(self, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
        """Call the function and check what it returns. Raises EvaluatorError if it fails or returns nothing usable."""
        function = load_function(self.function)
        if inspect.iscoroutinefunction(function):
            async with patched_workspace(sandboxes, work.patch) as workspace:
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
        for name, value in (("its reward", score.reward), *score.calls.items()):
            if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
                raise EvaluatorError(f"{self.function}: {name} is {value!r}; a finite number or None was expected")
        if unknown := sorted(set(score.calls) - {call.call_id for call in work.calls}):
            raise EvaluatorError(f"{self.function} rewards {unknown[0]}, which is not a call of this rollout")
        reward = None if score.reward is None else float(score.reward)
        detail = score.detail if reward is not None else {"no_reward": f"{self.function} returned None", **score.detail}
        return Score(reward, detail, score.log, score.calls)
