"""Harness adapters: how agent programs are installed and launched. Knows nothing of `polar_proxy`."""

from harness_adapters.base import (
    Facts,
    HarnessAdapter,
    HarnessError,
    Installed,
    InstallError,
    LaunchContext,
    LaunchPlan,
    McpServer,
    Outcome,
    Skill,
    UnknownHarnessError,
    get_adapter,
    list_adapters,
)

__all__ = [
    "Facts",
    "HarnessAdapter",
    "HarnessError",
    "InstallError",
    "Installed",
    "LaunchContext",
    "LaunchPlan",
    "McpServer",
    "Outcome",
    "Skill",
    "UnknownHarnessError",
    "get_adapter",
    "list_adapters",
]
