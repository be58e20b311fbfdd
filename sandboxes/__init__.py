"""Sandboxes, in which an agent's programs run.

`base` has the contract, `choice` opens a sandbox of a kind that this machine has, `orphans` removes the sandboxes of
dead owners. The kinds are `docker`, `bubblewrap` and `process`.
"""

from sandboxes.base import (
    ExecResult,
    FileTooLarge,
    Mount,
    ResourceLimits,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxKind,
    SandboxSpec,
    SandboxUnavailable,
)
from sandboxes.choice import Availability, SandboxChoice, available, choose, open_sandbox
from sandboxes.orphans import RemovedItem, default_state_dir, sweep

__all__ = [
    "Availability",
    "ExecResult",
    "FileTooLarge",
    "Mount",
    "RemovedItem",
    "ResourceLimits",
    "Sandbox",
    "SandboxChoice",
    "SandboxEnded",
    "SandboxError",
    "SandboxKind",
    "SandboxSpec",
    "SandboxUnavailable",
    "available",
    "choose",
    "default_state_dir",
    "open_sandbox",
    "sweep",
]
