"""Scoring on whatever node has room: a Ray task, which Ray places and queues.

The agent's patch and its task go there, a score comes back; the sandbox is opened, used and closed there. The rollout
stays with the node that ran it, which alone writes about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from polar_proxy.rewards import EvaluationInput, Score
from polar_proxy.rollouts.attempt import score_attempt
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.rollouts.worker import InfrastructureError
from polar_proxy.tasks import Task
from sandboxes.base import SandboxKind, uncancellable


@dataclass(frozen=True, slots=True)
class ScoringFailure:
    """An InfrastructureError on its way home."""

    cause: str
    text: str


def _score(attempt: EvaluationInput, kind: SandboxKind, labels: Mapping[str, str]) -> Score | ScoringFailure:
    """The task's body. Cancelled by Ray (an interrupt, which ends `asyncio.run` in order) it closes its sandbox."""

    task = attempt.task
    assert isinstance(task, Task)

    async def score() -> Score:
        return await score_attempt(attempt, lambda: TaskSandboxes(kind).fresh(task, labels))

    try:
        return asyncio.run(score())
    except InfrastructureError as error:
        return ScoringFailure(error.cause, str(error))


@dataclass(slots=True)
class RayScorer:
    """See `runner.Elsewhere`. `needs`: what a node must have free (`places.to_score`)."""

    needs: Mapping[str, float]
    done: int = field(default=0, init=False)

    async def __call__(self, attempt: EvaluationInput, kind: SandboxKind, labels: Mapping[str, str]) -> Score:
        custom = {name: amount for name, amount in self.needs.items() if name != "CPU"}
        # Tried again by whoever asked, not by Ray, so that attempts are counted in one place.
        task: Any = ray.remote(max_retries=0)(_score).options(num_cpus=self.needs.get("CPU", 0), resources=custom)
        ref = task.remote(attempt, kind, dict(labels))
        try:
            found = await asyncio.wrap_future(ref.future())
        except RayError as error:
            raise InfrastructureError("evaluator", f"its judge was lost: {_first_line(error)}") from error
        except asyncio.CancelledError:
            ray.cancel(ref)
            await uncancellable(_ended(ref))
            raise
        self.done += 1
        if isinstance(found, ScoringFailure):
            raise InfrastructureError(found.cause, found.text)
        assert isinstance(found, Score)
        return found


async def _ended(ref: Any) -> None:
    """Nothing of it is left when this returns; where its node is gone, whoever sweeps there sees to it."""
    await asyncio.wait([asyncio.wrap_future(ref.future())], timeout=10.0)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
