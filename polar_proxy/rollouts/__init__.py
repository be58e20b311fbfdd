"""Rollouts: stages, scheduling, recovery."""

from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts.admission import ServiceLimits
from polar_proxy.rollouts.recovery import recover
from polar_proxy.rollouts.repetition import Original, find_original
from polar_proxy.rollouts.service import (
    RolloutService,
    cancel,
    local_gateway,
    run_job,
    submit,
)

__all__ = [
    "JobSpec",
    "Original",
    "RolloutService",
    "ServiceLimits",
    "cancel",
    "find_original",
    "local_gateway",
    "recover",
    "run_job",
    "submit",
]
