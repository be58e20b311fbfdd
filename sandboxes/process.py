"""`process`: an ordinary process with a home of its own. Works everywhere, isolates nothing."""

from __future__ import annotations

import os
import posixpath
import socket

from . import orphans
from .base import SandboxError, SandboxSpec
from .supervised import SupervisedSandbox

# What a program needs to run at all. Keys, tokens, proxies and configuration of the owner stay out.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


class ProcessSandbox(SupervisedSandbox):
    kind = "process"
    isolation = (
        "Isolates nothing: programs run as this user with this user's files and network; "
        "only home, working directory, environment and process group are their own."
    )

    def __init__(self, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> None:
        super().__init__(spec, registry)
        self.home = str(self.base / "home")
        self.workdir = str(self.base / "workspace")
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self.base_env = {"PATH": os.defpath, "TERM": "dumb", "TMPDIR": str(self.base / "tmp"), **passed}
        limits = spec.limits
        if limits.cpus is not None:
            self.unenforced += ("cpus: needs control groups; use bubblewrap or docker",)
        if limits.pids is not None:
            self.unenforced += ("pids: the system counts a user's processes, not a sandbox's",)
        if limits.memory_mb is not None:
            self.unenforced += ("memory_mb: held for each process by itself, not for their sum",)

    def _prepare(self) -> None:
        if own := (*self.spec.folders, *([self.spec.workdir] if self.spec.workdir else [])):
            raise SandboxError(
                f"a process sandbox has no file system of its own, so there can be no {own[-1]} of its own; "
                "use bubblewrap or docker"
            )
        for mount in self.spec.mounts:
            if posixpath.normpath(mount.target) != str(mount.source.absolute()):
                raise SandboxError(
                    f"a process sandbox has no file system of its own: {mount.source} cannot appear at {mount.target}; "
                    "mount it at its own path, or use bubblewrap or docker"
                )
        if any(mount.read_only for mount in self.spec.mounts):
            self.unenforced += ("read-only mounts: files are as writable as they are for this user",)
        for name in ("home", "workspace", "tmp"):
            (self.base / name).mkdir(mode=0o700)

    def _rlimits(self) -> dict[str, int]:
        return process_limits(self.spec)

    async def listen(self, port: int = 0) -> socket.socket | None:
        self._live()
        return None


def process_limits(spec: SandboxSpec) -> dict[str, int]:
    """Memory and file size as limits of each process.

    RLIMIT_DATA and not RLIMIT_AS: Node and Go reserve far more addresses than they ever touch.
    """
    limits = {"RLIMIT_CORE": 0}
    if spec.limits.memory_mb is not None:
        limits["RLIMIT_DATA"] = spec.limits.memory_mb << 20
    if spec.limits.file_mb is not None:
        limits["RLIMIT_FSIZE"] = spec.limits.file_mb << 20
    return limits
