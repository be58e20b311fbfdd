"""Runs a task's evaluators one after the other and combines their scores into one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from polar_proxy.rewards.base import (
    EvaluatedTask,
    EvaluationInput,
    Evaluator,
    PatchDoesNotApplyError,
    SandboxFactory,
    Score,
)
from polar_proxy.rewards.patches import changed_paths, patterns_to_leave_out
from polar_proxy.rewards.signs import patch_signs
from polar_proxy.types import Json

_LISTED_PATHS = 100
# git's words for a path that it refuses because it leads out of the workspace or into .git
_LEAVES_WORKSPACE = re.compile(r"invalid path|beyond a symbolic link")


async def evaluate(work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    """Judge the work by all evaluators of its task, each in its own sandbox.

    `detail["signs"]` lists the signs of reward hacking that were found (`signs.py`). `detail["left_out"]` lists up to
    100 paths of the patch that did not reach the evaluators. A key is missing if its list would be empty."""
    evaluators = work.task.evaluators
    try:
        paths = await changed_paths(work.patch)
        work = replace(work, leave_out=await patterns_to_leave_out(work, sandboxes))
        work = replace(work, changed_paths=await changed_paths(work.patch, work.leave_out))
    except PatchDoesNotApplyError as error:
        score = _not_applied(error)
        return _add_findings(score, score.signs, ())
    scores = [await _score(evaluator, work, sandboxes) for evaluator in evaluators]
    score = scores[0] if len(scores) == 1 else combine_scores(evaluators, scores)
    left_out = sorted(set(paths) - set(work.changed_paths))
    signs = {*patch_signs(work.patch, paths, left_out, work.task), *(sign for one in scores for sign in one.signs)}
    return _add_findings(score, signs, left_out)


def _add_findings(score: Score, signs: Iterable[str], left_out: Sequence[str]) -> Score:
    found: Json = {"signs": sorted(signs), "left_out": left_out[:_LISTED_PATHS]}
    return replace(score, detail={**score.detail, **{name: value for name, value in found.items() if value}})


async def _score(evaluator: Evaluator, work: EvaluationInput, sandboxes: SandboxFactory) -> Score:
    try:
        return await evaluator.score(work, sandboxes)
    except PatchDoesNotApplyError as error:
        return _not_applied(error)


def _not_applied(error: PatchDoesNotApplyError) -> Score:
    message = str(error)
    signs = ("escapes_paths",) if _LEAVES_WORKSPACE.search(message) else ()
    detail: Json = {"patch_applied": False, "solved": False}
    return Score(0.0, detail, message.encode(errors="replace"), signs=signs)


def combine_scores(evaluators: Sequence[Evaluator], scores: Sequence[Score]) -> Score:
    """Return one score. Its reward is the weighted mean sum(weight_i * reward_i) / sum(weight_i), or None if an
    evaluator gave no reward.

    The rewards of each single call are combined in the same way, over the evaluators that rewarded this call.
    """
    pairs = list(zip(evaluators, scores, strict=True))
    by_call: defaultdict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for evaluator, score in pairs:
        for call_id, reward in score.call_rewards.items():
            by_call[call_id].append((evaluator.weight, reward))
    call_rewards = {call_id: _weighted_mean(rewards) for call_id, rewards in sorted(by_call.items())}
    parts = [
        {"kind": evaluator.kind, "weight": evaluator.weight, "reward": score.reward, **score.detail}
        for evaluator, score in pairs
    ]
    log = b"".join(f"=== {e.kind}\n".encode() + score.log.rstrip(b"\n") + b"\n" for e, score in pairs)
    return Score(_weighted_mean([(e.weight, score.reward) for e, score in pairs]), {"parts": parts}, log, call_rewards)


def reward_source(task: EvaluatedTask) -> str:
    """Return what the store records as the source of a reward: the kinds of the task's evaluators, joined by +."""
    return "+".join(evaluator.kind for evaluator in task.evaluators)


def scoring_seconds(task: EvaluatedTask) -> float:
    """Return the sum of the time limits of all evaluators' commands."""
    return sum(evaluator.runs for evaluator in task.evaluators) * task.timeout_seconds


def _weighted_mean(weighted: Sequence[tuple[float, float | None]]) -> float | None:
    total = 0.0
    for weight, value in weighted:
        if value is None:
            return None
        total += weight * value
    return total / sum(weight for weight, _ in weighted)
