"""Evaluators, which score a rollout. The fields of an evaluator are the options that a task sets."""

from collections.abc import Mapping

from polar_proxy.rewards.base import (
    EvaluationInput,
    EvaluatorError,
    SandboxFactory,
    Score,
    Workspace,
    check_relative_path,
)
from polar_proxy.rewards.custom import CommandEvaluator, PythonEvaluator
from polar_proxy.rewards.evaluate import evaluate, reward_source, scoring_seconds
from polar_proxy.rewards.harbor import HarborEvaluator
from polar_proxy.rewards.hidden_tests import HiddenTestsEvaluator, SwebenchEvaluator
from polar_proxy.rewards.signs import apply_sign_policy

AnyEvaluator = HiddenTestsEvaluator | SwebenchEvaluator | HarborEvaluator | CommandEvaluator | PythonEvaluator
"""The evaluators that a task may name by their `kind`."""
EVALUATORS: Mapping[str, type[AnyEvaluator]] = {
    "tests": HiddenTestsEvaluator,
    "swebench": SwebenchEvaluator,
    "harbor": HarborEvaluator,
    "command": CommandEvaluator,
    "python": PythonEvaluator,
}

__all__ = [
    "EVALUATORS",
    "AnyEvaluator",
    "CommandEvaluator",
    "EvaluationInput",
    "EvaluatorError",
    "HarborEvaluator",
    "HiddenTestsEvaluator",
    "PythonEvaluator",
    "SandboxFactory",
    "Score",
    "SwebenchEvaluator",
    "Workspace",
    "apply_sign_policy",
    "check_relative_path",
    "evaluate",
    "reward_source",
    "scoring_seconds",
]
