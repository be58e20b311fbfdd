"""Limits of a rollout service in tests: short waits, a small pool, no check of the machine's load."""

from __future__ import annotations

from polar_proxy.config import AdmissionSettings
from polar_proxy.rollouts import ServiceLimits

QUICK_LIMITS = ServiceLimits(
    in_flight=8,
    running=4,
    retry_seconds=0.01,
    poll_seconds=0.2,
    pool_size=2,
    refill=False,
    admission=AdmissionSettings(memory_mb=0),
)
