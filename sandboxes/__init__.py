"""Sandboxes: where an agent's programs run. `base` has the contract, `choice` the way in."""

from .base import (
    ExecResult,
    FileTooLarge,
    Kind,
    Limits,
    Mount,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
)
from .choice import Availability, Choice, available, choose, open_sandbox
from .orphans import Removed, default_state_dir, sweep

__all__ = [
    "Availability",
    "Choice",
    "ExecResult",
    "FileTooLarge",
    "Kind",
    "Limits",
    "Mount",
    "Removed",
    "Sandbox",
    "SandboxEnded",
    "SandboxError",
    "SandboxSpec",
    "SandboxUnavailable",
    "available",
    "choose",
    "default_state_dir",
    "open_sandbox",
    "sweep",
]
