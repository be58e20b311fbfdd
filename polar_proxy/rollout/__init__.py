"""Rollouts: stages, scheduling, recovery."""

from polar_proxy.rollout.many import Job, run_job, serving
from polar_proxy.rollout.recovery import recover
from polar_proxy.rollout.runner import Listener, Rollout, RolloutRunner
from polar_proxy.rollout.traces import build_traces

__all__ = ["Job", "Listener", "Rollout", "RolloutRunner", "build_traces", "recover", "run_job", "serving"]
