"""Harness adapters: how to install and launch agent programs. This package does not import `polar_proxy`."""

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
