"""Failures of the infrastructure, as opposed to failures of the agent."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from harness_adapters.base import InstallError
from polar_proxy.errors import PolarError
from polar_proxy.rollouts.workspace import WorkspaceError
from sandboxes import SandboxError

_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class InfrastructureError(PolarError):
    """An attempt failed through no fault of the agent: a sandbox, the engine, the disk. The worker tries again."""

    def __init__(self, cause: str, text: str) -> None:
        """`cause` is machine-readable: sandbox, harness, evaluator, engine, store or disk."""
        super().__init__(text)
        self.cause = cause


@contextlib.contextmanager
def infrastructure_errors(cause: str) -> Iterator[None]:
    """Raise errors of sandboxes, installers and the disk in this block as InfrastructureError."""
    try:
        yield
    except (SandboxError, WorkspaceError, InstallError, TimeoutError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
            cause = "disk"
        text = str(error) or f"{type(error).__name__} with the {cause}"
        raise InfrastructureError(cause, text) from error
