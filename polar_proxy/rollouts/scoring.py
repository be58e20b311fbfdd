"""Scoring an agent's work, and telling the agent's faults from those of the task and the machine.

An evaluation may end without a verdict: its sandbox died, a file could not be written, the test script left no reward.
Then it is repeated without the agent's patch, as a control. If the control has a verdict, task and machine work, and
the patch is at fault. The reward is then 0, because a rollout without a reward would not count in the baseline. If the
control has no verdict either, the agent is not at fault, and there is no reward or an InfrastructureError.

After an InfrastructureError, the evaluation with the patch must fail a second time before the patch is at fault. A task
with a `python` evaluator may have no reward on purpose, so a missing reward stays missing.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from polar_proxy.rewards import EvaluationInput, SandboxFactory, Score, evaluate, scoring_seconds
from polar_proxy.rollouts.infrastructure import InfrastructureError, infrastructure_errors

log = logging.getLogger(__name__)

_SETUP_SECONDS = 300.0
"""Time limit of opening sandboxes and applying patches; each evaluator's command adds the task's own limit."""


async def score_work(work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    """Return the score of the task's evaluators. Raises InfrastructureError if they fail without the patch as well."""
    try:
        score = await _evaluate(work, sandboxes)
    except InfrastructureError as error:
        if not work.patch.strip() or not await _has_verdict(replace(work, patch=b""), sandboxes):
            raise
        # Once more, because the machine's fault may have passed meanwhile.
        log.warning("an evaluation failed with the agent's patch and not without it: %s; evaluating once more", error)
        try:
            return await _evaluate(work, sandboxes)
        except InfrastructureError as again:
            return Score(0.0, {"solved": False, "broke_evaluation": str(again)})
    if score.reward is not None or not work.patch.strip() or _decides_itself(work):
        return score
    if not await _has_verdict(replace(work, patch=b""), sandboxes):
        return score
    return replace(score, reward=0.0, detail=_without_reward(score))


async def _evaluate(work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    with infrastructure_errors("evaluator"):
        async with asyncio.timeout(_SETUP_SECONDS + scoring_seconds(work.task)):
            return await evaluate(work, sandboxes)


async def _has_verdict(work: EvaluationInput, sandboxes: SandboxFactory) -> bool:
    try:
        return (await _evaluate(work, sandboxes)).reward is not None
    except InfrastructureError as error:
        log.warning("the evaluation fails without the agent's patch as well: %s", error)
        return False


def _decides_itself(work: EvaluationInput) -> bool:
    """Return whether the task has a `python` evaluator, which may return no reward on purpose."""
    return any(evaluator.kind == "python" for evaluator in work.task.evaluators)


def _without_reward(score: Score) -> dict[str, object]:
    """Return the detail of a score that has no reward because of the agent's patch."""
    reason = score.detail.get("no_reward", "a part of the evaluation gave no reward")
    kept = {name: value for name, value in score.detail.items() if name != "no_reward"}
    return {**kept, "solved": False, "broke_evaluation": reason}
