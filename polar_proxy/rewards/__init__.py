"""Evaluators: how a rollout is scored."""

from polar_proxy.rewards.base import Attempt, EvaluatorError, Fresh, Score, Workspace
from polar_proxy.rewards.evaluate import budget, combined, evaluate, source_of

__all__ = [
    "Attempt",
    "EvaluatorError",
    "Fresh",
    "Score",
    "Workspace",
    "budget",
    "combined",
    "evaluate",
    "source_of",
]
