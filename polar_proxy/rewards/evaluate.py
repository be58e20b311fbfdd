"""Runs a task's evaluators one after the other and combines their scores into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polar_proxy.rewards.base import (
    EvaluatedTask,
    EvaluationInput,
    Evaluator,
    PatchDoesNotApplyError,
    SandboxFactory,
    Score,
)
from polar_proxy.rewards.reward_hacking import reward_hacking_signs


async def evaluate(work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    """Judge the work by all evaluators of its task, each in its own sandbox.

    `detail["signs"]` names the signs of reward hacking in the patch, if there are any."""
    evaluators = work.task.evaluators
    scores = [await _score(evaluator, work, sandboxes) for evaluator in evaluators]
    score = scores[0] if len(scores) == 1 else combine_scores(evaluators, scores)
    signs = reward_hacking_signs(work.patch, work.task)
    return replace(score, detail={**score.detail, "signs": signs}) if signs else score


async def _score(evaluator: Evaluator, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    try:
        return await evaluator.score(work, sandboxes)
    except PatchDoesNotApplyError as error:
        return Score(0.0, {"patch_applied": False, "solved": False}, str(error).encode())


def combine_scores(evaluators: Sequence[Evaluator], scores: Sequence[Score]) -> Score:
    """Return the weighted mean, sum(weight_i * reward_i) / sum(weight_i); no reward if any part has none.

    Rewards of a single call are combined in the same way, over the evaluators that gave one.
    """
    pairs = list(zip(evaluators, scores, strict=True))
    calls = {call_id for score in scores for call_id in score.calls}
    by_call = {
        call_id: _weighted_mean([(e.weight, score.calls[call_id]) for e, score in pairs if call_id in score.calls])
        for call_id in sorted(calls)
    }
    parts = [
        {"kind": evaluator.kind, "weight": evaluator.weight, "reward": score.reward, **score.detail}
        for evaluator, score in pairs
    ]
    log = b"".join(f"=== {e.kind}\n".encode() + score.log.rstrip(b"\n") + b"\n" for e, score in pairs)
    return Score(_weighted_mean([(e.weight, score.reward) for e, score in pairs]), {"parts": parts}, log, by_call)


def reward_source(task: EvaluatedTask) -> str:
    """Return the name under which the store records the reward: the evaluators' kinds."""
    return "+".join(evaluator.kind for evaluator in task.evaluators)


def scoring_seconds(task: EvaluatedTask) -> float:
    """Return the time limit of all evaluators' commands together."""
    return sum(evaluator.runs for evaluator in task.evaluators) * task.timeout_seconds


def _weighted_mean(weighted: Sequence[tuple[float, float | None]]) -> float | None:
    total = 0.0
    for weight, value in weighted:
        if value is None:
            return None
        total += weight * value
    return total / sum(weight for weight, _ in weighted)
