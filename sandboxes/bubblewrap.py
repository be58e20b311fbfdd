"""`bubblewrap`: Linux namespaces without a daemon. About ten milliseconds to start, as root or as any user.

The root is made from an allow-list, not from the host's root: only the system's programs and libraries appear, read
only. Everything else of the host (homes, /run and its sockets, /tmp, /var, /srv, checkouts, databases) does not exist
inside, unless it is mounted on purpose.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from . import cgroups, orphans
from .base import SandboxError, SandboxSpec
from .process import process_limits
from .supervised import SupervisedSandbox

HOME = "/home/agent"
WORKDIR = "/workspace"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store")
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BubblewrapSandbox(SupervisedSandbox):
    kind = "bubblewrap"
    isolation = (
        "Own processes, users, network (loopback only) and files: the host's programs and libraries are readable, "
        "nothing else of it; the kernel is shared, system calls are not filtered."
    )

    def __init__(self, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> None:
        super().__init__(spec, registry)
        self.home, self.workdir = HOME, spec.workdir or WORKDIR
        self.base_env = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": "/tmp"}

    def _prepare(self) -> list[str]:
        places = {"home": HOME, "workspace": self.workdir}
        places |= {f"folder-{number}": folder for number, folder in enumerate(self.spec.folders)}
        binds = []
        for name, place in places.items():
            if any(Path(place).is_relative_to(system) for system in SYSTEM):
                raise SandboxError(f"bubblewrap shows the host's own {place}, read-only; use docker for a folder there")
            (self.base / name).mkdir(mode=0o755)
            binds += ["--bind", str(self.base / name), place]
        self._limit()
        for mount in self.spec.mounts:
            binds += ["--ro-bind" if mount.read_only else "--bind", str(mount.source.absolute()), mount.target]
        # The root itself is a small tmpfs that only carries mount points; last, it is made read-only.
        return [*command(), *binds, "--remount-ro", "/"]

    def _limit(self) -> None:
        """Control groups if this user may make them, else what limits of single processes can do."""
        limits = self.spec.limits
        folders = cgroups.places(self.id, limits)
        if folders:
            self._record.cgroups = [str(folder) for folder in folders]
            self._registry.write(self._record)
            self._cgroup = cgroups.create(folders, limits)
        if self._cgroup is None:
            self._record.cgroups = []
            if limits.cpus is not None:
                self.unenforced += ("cpus: needs control groups, which this user may not make",)
            if limits.memory_mb is not None:
                self.unenforced += ("memory_mb: held for each process by itself, not for their sum",)
            if limits.pids is not None and os.getuid() == 0:
                self.unenforced += ("pids: the system does not count root's processes",)

    def _rlimits(self) -> dict[str, int]:
        limits = process_limits(self.spec)
        if self._cgroup is not None:
            limits.pop("RLIMIT_DATA", None)
        elif self.spec.limits.pids is not None:
            limits["RLIMIT_NPROC"] = self.spec.limits.pids  # counted in the sandbox's own user namespace
        return limits

    async def listen(self, port: int = 0) -> socket.socket | None:
        _, fds = await self._live().call(op="listen", port=port)
        listening = socket.socket(fileno=fds[0])
        listening.setblocking(False)
        return listening


def command() -> list[str]:
    """bwrap with everything but the mounts of one sandbox."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bwrap is not installed")
    args = [program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    args += ["--cap-drop", "ALL", "--hostname", "sandbox", *_features(program)]
    for name in SYSTEM:
        if os.path.islink(name):
            args += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            args += ["--ro-bind", name, name]
    args += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp", "--dir", "/run"]
    for path in hidden():
        args += ["--tmpfs", path] if os.path.isdir(path) else ["--ro-bind", "/dev/null", path]
    return [*args, "--setenv", "PATH", SEARCH_PATH]


@cache
def _features(program: str) -> tuple[str, ...]:
    """Options that older versions lack."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    # Without it, programs inside could make user namespaces of their own and reach more of the kernel.
    return ("--disable-userns",) if "--disable-userns" in text.stdout + text.stderr else ()


@cache
def hidden() -> tuple[str, ...]:
    """What in /etc not everybody may read (shadow, private keys): root's sandboxes do not get to read it either."""
    found: list[str] = []
    for folder, folders, files in os.walk("/etc"):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
            if not stat.S_ISLNK(mode) and mode & needed != needed:
                found.append(path)
                if name in folders:
                    folders.remove(name)
    return tuple(found)


def why_not() -> str | None:
    """The reason why bubblewrap cannot be used here, or None. Blocking, some 100 ms."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        done = subprocess.run([*command(), "--", "true"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return "bwrap does not answer"
    if done.returncode != 0:
        return f"bwrap fails: {done.stderr.strip() or done.returncode}"
    # A system may let bwrap make namespaces and yet not let this process enter them: only a trial tells.
    with tempfile.TemporaryDirectory(prefix="polar-trial-") as folder, ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(asyncio.run, _trial(Path(folder))).result()
        except SandboxError as error:
            return str(error)
    return None


async def _trial(folder: Path) -> None:
    async with await BubblewrapSandbox.open(SandboxSpec(), orphans.SandboxRegistry(folder)) as sandbox:
        await sandbox.exec(["true"], timeout=30)


def installed() -> bool:
    return shutil.which("bwrap") is not None
