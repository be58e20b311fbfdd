"""Evaluators: how a rollout is scored."""

from polar_proxy.rewards.tests import Score, evaluate

__all__ = ["Score", "evaluate"]
