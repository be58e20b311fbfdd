"""Evaluators: how a rollout is scored."""

from polar_proxy.rewards.base import EvaluationInput, EvaluatorError, SandboxFactory, Score, Workspace
from polar_proxy.rewards.evaluate import combine_scores, evaluate, reward_source, scoring_seconds

__all__ = [
    "EvaluationInput",
    "EvaluatorError",
    "SandboxFactory",
    "Score",
    "Workspace",
    "combine_scores",
    "evaluate",
    "reward_source",
    "scoring_seconds",
]
