"""Rollouts: stages, scheduling, recovery."""

from polar_proxy.rollout_spec import JobSpec, RolloutSpec
from polar_proxy.rollouts.attempt import AttemptRunner, ProgressReporter
from polar_proxy.rollouts.local_job import local_gateway, run_job
from polar_proxy.rollouts.recovery import recover
from polar_proxy.rollouts.service import (
    RolloutService,
    ServiceLimits,
    cancel,
    check_job,
    rollout_ids,
    submit,
)
from polar_proxy.traces.operations import build_traces

__all__ = [
    "AttemptRunner",
    "JobSpec",
    "ProgressReporter",
    "RolloutService",
    "RolloutSpec",
    "ServiceLimits",
    "build_traces",
    "cancel",
    "check_job",
    "local_gateway",
    "recover",
    "rollout_ids",
    "run_job",
    "submit",
]
