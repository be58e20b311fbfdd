"""The `python` evaluator: a function of the user's, in Polar's own process.

``def judge(attempt, **options)`` is called in a thread; ``async def judge(attempt, workspace, **options)`` in the event
loop, with a fresh sandbox to which the patch has been applied. Either returns a number, None, or a `Score`, which can
also hold rewards of single calls.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any

from polar_proxy.errors import PolarError
from polar_proxy.rewards.base import (
    EvaluationInput,
    EvaluatorError,
    SandboxFactory,
    Score,
    apply_patch,
    patch_does_not_apply,
)
from polar_proxy.tasks.evaluation import PythonEvaluator
from polar_proxy.tasks.functions import load_function


async def python(evaluation: PythonEvaluator, attempt: EvaluationInput, fresh: SandboxFactory) -> Score:
    """Call the function and check what it says. Raises `EvaluatorError` where it fails or says nothing usable."""
    function = load_function(evaluation.function)
    if inspect.iscoroutinefunction(function):
        async with fresh() as workspace:
            if (why := await apply_patch(attempt.patch, workspace)) is not None:
                return patch_does_not_apply(why)
            said = await _called(evaluation, function, attempt, workspace)
    else:
        said = await _called(evaluation, function, attempt)
    score = said if isinstance(said, Score) else Score(said)
    known = {call.call_id for call in attempt.calls}
    for name, value in (("its reward", score.reward), *score.calls.items()):
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise EvaluatorError(f"{evaluation.function}: {name} is {value!r}; a finite number or None was expected")
    if strange := sorted(set(score.calls) - known):
        raise EvaluatorError(f"{evaluation.function} rewards {strange[0]}, which is no call of this rollout")
    reward = None if score.reward is None else float(score.reward)
    detail = score.detail if reward is not None else {"no_reward": f"{evaluation.function} said None", **score.detail}
    return Score(reward, detail, score.log, score.calls)


async def _called(evaluation: PythonEvaluator, function: Callable[..., Any], *arguments: object) -> Any:
    try:
        if inspect.iscoroutinefunction(function):
            async with asyncio.timeout(_seconds(arguments[0])):
                return await function(*arguments, **evaluation.options)
        return await asyncio.to_thread(function, *arguments, **evaluation.options)
    except (PolarError, OSError):  # TimeoutError is one
        raise
    except Exception as error:
        raise EvaluatorError(f"{evaluation.function} raised {type(error).__name__}: {error}") from error


def _seconds(attempt: object) -> float:
    assert isinstance(attempt, EvaluationInput)
    return attempt.task.timeout_seconds
