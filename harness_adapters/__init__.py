"""Harness adapters: how agent programs are installed and launched. Knows nothing of `polar_proxy`."""

from harness_adapters.base import (
    ExitOutcome,
    HarnessAdapter,
    HarnessError,
    HarnessInfo,
    Installation,
    InstallError,
    LaunchContext,
    LaunchPlan,
    McpServer,
    Skill,
    UnknownHarnessError,
    get_adapter,
    list_adapters,
)

__all__ = [
    "ExitOutcome",
    "HarnessAdapter",
    "HarnessError",
    "HarnessInfo",
    "InstallError",
    "Installation",
    "LaunchContext",
    "LaunchPlan",
    "McpServer",
    "Skill",
    "UnknownHarnessError",
    "get_adapter",
    "list_adapters",
]
