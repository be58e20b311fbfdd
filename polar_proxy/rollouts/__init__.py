"""Rollouts: stages, scheduling, recovery."""

from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts.admission import ServiceLimits
from polar_proxy.rollouts.recovery import recover
from polar_proxy.rollouts.service import (
    RolloutService,
    cancel,
    local_gateway,
    run_job,
    submit,
)

__all__ = [
    "JobSpec",
    "RolloutService",
    "ServiceLimits",
    "cancel",
    "local_gateway",
    "recover",
    "run_job",
    "submit",
]
