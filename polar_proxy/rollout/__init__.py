"""Rollouts: stages, scheduling, recovery."""

from polar_proxy.rollout.own import run_job
from polar_proxy.rollout.recipe import Recipe
from polar_proxy.rollout.recovery import recover
from polar_proxy.rollout.runner import Listener, RolloutRunner
from polar_proxy.rollout.service import (
    RolloutService,
    ServiceLimits,
    Submission,
    cancel,
    rollouts_of,
    serving,
    submit,
)
from polar_proxy.rollout.traces import build_traces

__all__ = [
    "Listener",
    "Recipe",
    "RolloutRunner",
    "RolloutService",
    "ServiceLimits",
    "Submission",
    "build_traces",
    "cancel",
    "recover",
    "rollouts_of",
    "run_job",
    "serving",
    "submit",
]
