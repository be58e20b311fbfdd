"""A task's evaluators, one after the other, and their scores made into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from polar_proxy.rewards.base import EvaluationInput, SandboxFactory, Score
from polar_proxy.rewards.command import command
from polar_proxy.rewards.harbor import harbor
from polar_proxy.rewards.hidden_tests import hidden_tests
from polar_proxy.rewards.python import python
from polar_proxy.rewards.reward_hacking import reward_hacking_signs
from polar_proxy.rewards.swebench import swebench
from polar_proxy.tasks import Task
from polar_proxy.tasks.evaluation import (
    CommandEvaluator,
    Evaluator,
    HarborEvaluator,
    HiddenTestsEvaluator,
    PythonEvaluator,
    SwebenchEvaluator,
)


async def evaluate(attempt: EvaluationInput, fresh: SandboxFactory) -> Score:
    """Judge an attempt by all evaluators of its task, each in a sandbox of its own; `detail` names the signs of a patch
    that aims at the reward (`integrity`)."""
    evaluators = attempt.task.evaluators
    scores = [await _one(evaluation, attempt, fresh) for evaluation in evaluators]
    score = scores[0] if len(scores) == 1 else combine_scores(evaluators, scores)
    seen = reward_hacking_signs(attempt.patch, attempt.task)
    return replace(score, detail={**score.detail, "signs": seen}) if seen else score


def combine_scores(evaluators: Sequence[Evaluator], scores: Sequence[Score]) -> Score:
    """reward = sum(weight_i * reward_i) / sum(weight_i); no reward where any part has none.

    Rewards of a call that several evaluators gave are put together in the same way, over those that did.
    """
    pairs = list(zip(evaluators, scores, strict=True))
    calls = {call_id for score in scores for call_id in score.calls}
    by_call = {
        call_id: _mean([(e.weight, score.calls[call_id]) for e, score in pairs if call_id in score.calls])
        for call_id in sorted(calls)
    }
    parts = [
        {"kind": evaluation.kind, "weight": evaluation.weight, "reward": score.reward, **score.detail}
        for evaluation, score in pairs
    ]
    log = b"".join(f"=== {e.kind}\n".encode() + score.log.rstrip(b"\n") + b"\n" for e, score in pairs)
    return Score(_mean([(e.weight, score.reward) for e, score in pairs]), {"parts": parts}, log, by_call)


def reward_source(task: Task) -> str:
    """How the reward's origin is written in the store: the evaluators' kinds."""
    return "+".join(evaluation.kind for evaluation in task.evaluators)


def scoring_seconds(task: Task) -> float:
    """Seconds that all evaluators together may need for their own commands."""
    runs = sum(2 if isinstance(e, HiddenTestsEvaluator) and e.before else 1 for e in task.evaluators)
    return runs * task.timeout_seconds


def _mean(weighted: Sequence[tuple[float, float | None]]) -> float | None:
    total = 0.0
    for weight, value in weighted:
        if value is None:
            return None
        total += weight * value
    return total / sum(weight for weight, _ in weighted)


async def _one(evaluation: Evaluator, attempt: EvaluationInput, fresh: SandboxFactory) -> Score:
    match evaluation:
        case HiddenTestsEvaluator():
            return await hidden_tests(evaluation, attempt, fresh)
        case SwebenchEvaluator():
            return await swebench(evaluation, attempt, fresh)
        case HarborEvaluator():
            return await harbor(evaluation, attempt, fresh)
        case CommandEvaluator():
            return await command(evaluation, attempt, fresh)
        case PythonEvaluator():
            return await python(evaluation, attempt, fresh)
        case _:
            assert_never(evaluation)
