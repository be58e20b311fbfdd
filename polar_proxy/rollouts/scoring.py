"""Scoring of an agent's work, which distinguishes faults of the agent from faults of the task and the machine.

An evaluation may end without a verdict: its sandbox died, a file could not be written, the test script left no reward,
the task's function raised an exception. The evaluation is then repeated without the agent's patch, as a control. If the
control has a verdict, task and machine work, and the patch is at fault. The reward is then 0, because a rollout without
a reward would not count in the baseline. If the control has no verdict either, the agent is not at fault: the rollout
gets no reward, or the error is raised.

After an error, the patch is at fault only if a second evaluation with it ends without a verdict as well. The function
of a `python` evaluator may return no reward on purpose. If only evaluators of this kind gave no reward, there is no
control, and the rollout gets no reward.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from polar_proxy.rewards import EvaluationInput, EvaluatorError, SandboxFactory, Score, evaluate, scoring_seconds
from polar_proxy.rollouts.infrastructure import InfrastructureError, infrastructure_errors

log = logging.getLogger(__name__)

_SETUP_SECONDS = 300.0
"""Time limit for opening sandboxes and applying patches. The task's limits for the evaluators' commands are added."""


async def score_work(work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    """Return the score of the task's evaluators.

    If the evaluation fails, it is repeated without the agent's patch. If all verdicts are then given, the work is
    scored once more. Otherwise, or without a patch, raises the InfrastructureError or EvaluatorError."""
    try:
        score = await _evaluate(work, sandboxes)
    except (InfrastructureError, EvaluatorError) as error:
        if not work.patch.strip() or await _missing_verdicts_of_control(work, sandboxes):
            raise
        log.warning("an evaluation failed with the agent's patch and not without it: %s; evaluating once more", error)
        return await _score_again(work, sandboxes)
    missing = _missing_verdicts(work, score)
    if not missing or not work.patch.strip() or missing <= await _missing_verdicts_of_control(work, sandboxes):
        return score
    return _with_patch_at_fault(score)


async def _score_again(work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    """Score the work again. The evaluation with the patch failed, and the evaluation without it gave all verdicts.

    The machine may have caused the failure. If the evaluation fails again or misses a verdict, the patch is at fault.
    """
    try:
        score = await _evaluate(work, sandboxes)
    except (InfrastructureError, EvaluatorError) as error:
        return Score(0.0, {"solved": False, "broke_evaluation": str(error)})
    return _with_patch_at_fault(score) if _missing_verdicts(work, score) else score


async def _evaluate(work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    with infrastructure_errors("evaluator"):
        async with asyncio.timeout(_SETUP_SECONDS + scoring_seconds(work.task)):
            return await evaluate(work, sandboxes)


async def _missing_verdicts_of_control(work: EvaluationInput, sandboxes: SandboxFactory) -> set[int]:
    """Evaluate without the agent's patch. Return the evaluators without a verdict; after an error, all evaluators."""
    control = replace(work, patch=b"")
    try:
        return _missing_verdicts(control, await _evaluate(control, sandboxes))
    except (InfrastructureError, EvaluatorError) as error:
        log.warning("the evaluation fails without the agent's patch as well: %s", error)
        return set(range(len(work.task.evaluators)))


def _missing_verdicts(work: EvaluationInput, score: Score) -> set[int]:
    """Return the positions of the evaluators that gave no reward, except those of the kind `python`."""
    kinds = [evaluator.kind for evaluator in work.task.evaluators]
    rewards = [score.reward] if len(kinds) == 1 else [part["reward"] for part in score.detail.get("parts", ())]
    return {number for number, reward in enumerate(rewards) if reward is None and kinds[number] != "python"}


def _with_patch_at_fault(score: Score) -> Score:
    """Return the score with reward 0, because the agent's patch broke the evaluation."""
    reason = score.detail.get("no_reward", "a part of the evaluation gave no reward")
    kept = {name: value for name, value in score.detail.items() if name != "no_reward"}
    return replace(score, reward=0.0, detail={**kept, "solved": False, "broke_evaluation": reason})
