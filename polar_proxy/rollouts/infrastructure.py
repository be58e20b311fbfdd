"""The errors of an attempt that failed through no fault of the agent."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from harness_adapters.base import InstallError
from polar_proxy.errors import PolarError
from polar_proxy.rollouts.workspace import WorkspaceError
from sandboxes.base import SandboxError
from sandboxes.self_test import SandboxLeaks

_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class InfrastructureError(PolarError):
    """An attempt failed through no fault of the agent, for example because of a sandbox, the engine or the disk. The
    worker tries again."""

    def __init__(self, cause: str, text: str) -> None:
        """`cause` is machine-readable: sandbox, harness, evaluator, engine, store, disk or internal."""
        super().__init__(cause, text)  # both, so that the error can be pickled
        self.cause = cause
        self.text = text

    def __str__(self) -> str:
        return self.text


class UnsafeSandboxError(PolarError):
    """The sandboxes of this machine fail their self-test, so only other machines may attempt the rollout."""


@contextlib.contextmanager
def infrastructure_errors(cause: str) -> Iterator[None]:
    """Convert errors in the block to InfrastructureError: timeouts, OSErrors, and errors of sandboxes, workspaces and
    installers.

    The new error has this `cause`, or `disk` if the disk failed. If a sandbox fails its self-test, UnsafeSandboxError
    is raised instead."""
    try:
        yield
    except SandboxLeaks as error:
        raise UnsafeSandboxError(str(error)) from error
    except (SandboxError, WorkspaceError, InstallError, TimeoutError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
            cause = "disk"
        text = str(error) or f"{type(error).__name__} with the {cause}"
        raise InfrastructureError(cause, text) from error
