"""Harness adapters: how agent programs are installed and launched. Knows nothing of `polar_proxy`."""

from harness_adapters.base import (
    HarnessAdapter,
    HarnessError,
    Installed,
    InstallError,
    LaunchContext,
    LaunchPlan,
    Outcome,
    UnknownHarnessError,
    get_adapter,
    list_adapters,
)

__all__ = [
    "HarnessAdapter",
    "HarnessError",
    "InstallError",
    "Installed",
    "LaunchContext",
    "LaunchPlan",
    "Outcome",
    "UnknownHarnessError",
    "get_adapter",
    "list_adapters",
]
