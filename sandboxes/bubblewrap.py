"""`bubblewrap`: Linux namespaces without a daemon. Starts in about ten milliseconds, as root or as any user.

The root file system is read-only and made from an allow-list. It has the system's programs and libraries, and those
files of /etc that every user may read. The rest of the host (homes, /run and its sockets, /tmp, /var, /srv, checkouts,
databases) is not visible inside unless it is mounted.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sandboxes import cgroups, disk, orphans, seccomp
from sandboxes.base import SandboxError, SandboxSpec
from sandboxes.process import SupervisedSandbox, process_limits

HOME = "/home/agent"
WORKDIR = "/workspace"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store")
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
FIRST_UID, UIDS = 60_000, 1_000
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BubblewrapSandbox(SupervisedSandbox):
    kind = "bubblewrap"

    def __init__(self, spec: SandboxSpec, registry: orphans.SandboxRegistry) -> None:
        super().__init__(spec, registry)
        self.home, self.workdir = HOME, spec.workdir or WORKDIR
        self.uid = agent_uid(self.id) if os.geteuid() == 0 else None
        self.system_call_filter = seccomp.bpf_program() or b""
        self.base_env = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": "/tmp"}

    def _prepare(self) -> list[str]:
        binds = []
        for name, target in self._own_folders.items():
            if any(Path(target).is_relative_to(system) for system in SYSTEM):
                raise SandboxError(
                    f"bubblewrap shows the host's {target}, so the sandbox cannot have a folder of its own there; "
                    "use docker"
                )
            folder = self._files / name
            folder.mkdir(mode=0o755, parents=True)
            if self.uid is not None:
                os.chown(folder, self.uid, self.uid)
            binds += ["--bind", str(folder), target]
        if disk.make_image(self.host_folder / "disk.ext4", self._files, self.spec.limits):
            self._disk_image = (str(self.host_folder / "disk.ext4"), str(self._files))
        if self.uid is not None:
            binds += self._user_files(self.uid)
        if self.spec.hosts:
            binds += self._hosts_file()
        self._limit()
        for mount in self.spec.mounts:
            binds += ["--ro-bind", str(mount.source.absolute()), mount.target]
        # The root is a small tmpfs with nothing but mount points. It is made read-only last.
        targets = [*self._own_folders.values(), *(mount.target for mount in self.spec.mounts)]
        return [*bwrap_command(self.spec.limits.memory_mb), *_parents(targets), *binds, "--remount-ro", "/"]

    @property
    def _files(self) -> Path:
        return self.host_folder / "disk"

    @property
    def _watched_folders(self) -> list[Path]:
        return [self._files]

    def _user_files(self, uid: int) -> list[str]:
        """Return the mounts of /etc/passwd and /etc/group with the sandbox's user added, because programs look up their
        user's name there."""
        mounts = []
        for name, line in (("passwd", f"agent:x:{uid}:{uid}::{HOME}:/bin/sh"), ("group", f"agent:x:{uid}:")):
            system = Path("/etc") / name
            if system.exists():
                file = self.host_folder / name
                file.write_text(system.read_text() + line + "\n")
                file.chmod(0o644)
                mounts += ["--ro-bind", str(file), str(system)]
        return mounts

    def _hosts_file(self) -> list[str]:
        """Return the mount of an /etc/hosts in which the names of `SandboxSpec.hosts` resolve to loopback."""
        system = Path("/etc/hosts")
        if not system.exists():
            raise SandboxError(
                "this machine has no /etc/hosts: create an empty one, because the sandbox's own file is mounted over it"
            )
        file = self.host_folder / "hosts"
        file.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *self.spec.hosts)))
        file.chmod(0o644)
        return ["--ro-bind", str(file), str(system.resolve())]

    def _limit(self) -> None:
        """Limit the sandbox by control groups if this user may make them, else limit each process."""
        limits = self.spec.limits
        folders = cgroups.group_folders(self.id, limits)
        if folders:
            self._record.cgroups = [str(folder) for folder in folders]
            self._registry.write(self._record)
            self._cgroup = cgroups.create(folders, limits)
        if self._cgroup is None:
            self._record.cgroups = []
            if limits.cpus is not None:
                self.unenforced += ("cpus: the limit needs control groups, which this user may not make",)
            if limits.memory_mb is not None:
                self.unenforced += ("memory_mb: the limit holds for each process, not for the sum of all",)

    def _rlimits(self) -> dict[str, int]:
        limits = process_limits(self.spec.limits)
        if self._cgroup is not None:
            limits.pop("RLIMIT_DATA", None)
        elif self.spec.limits.pids is not None:
            limits["RLIMIT_NPROC"] = self.spec.limits.pids  # counted in the sandbox's own user namespace
        return limits

    async def listen(self, port: int = 0) -> socket.socket | None:
        link = self._require_open(self._link)
        fd = self._early_sockets.pop(port, None)
        if fd is None:
            _, [fd] = await link.call(op="listen", port=port)
        listening = socket.socket(fileno=fd)
        listening.setblocking(False)
        return listening


def agent_uid(sandbox_id: str) -> int:
    """Return the user id for the commands of this sandbox when Polar runs as root. No program of the host has this id.

    The id is below 65536, because a container may not have larger ids.
    """
    return FIRST_UID + zlib.crc32(sandbox_id.encode()) % UIDS


def bwrap_command(memory_mb: int | None = None) -> list[str]:
    """Return the part of the bwrap command line that is the same for every sandbox; each adds its own mounts. The
    temporary folders hold at most `memory_mb` together.

    If Polar runs as root, no user namespace is made. In a user namespace made by root, the agent would be the kernel's
    user 0, the owner of the settings in /proc/sys, for example. Users other than root need a user namespace to make
    the other namespaces.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bwrap is not installed")
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() != 0:
        spaces += ["--unshare-user", *_features(program)]
    args = [program, *spaces, "--die-with-parent", "--new-session", "--clearenv"]
    args += ["--cap-drop", "ALL", "--hostname", "sandbox"]
    for name in SYSTEM:
        if os.path.islink(name):
            args += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            args += ["--ro-bind", name, name]
    args += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev", "--dir", "/run"]
    for folder in TEMPORARY_FOLDERS:
        size = [] if memory_mb is None else ["--size", str((memory_mb << 20) // len(TEMPORARY_FOLDERS))]
        args += ["--perms", "1777", *size, "--tmpfs", folder]
    for path in unreadable_files():
        args += ["--tmpfs", path] if os.path.isdir(path) else ["--ro-bind", "/dev/null", path]
    return [*args, "--setenv", "PATH", SEARCH_PATH]


def _parents(targets: Sequence[str]) -> list[str]:
    """Return `--dir` options for the folders above these mounts. Without the options, bwrap would make these folders
    itself, and only root could read them."""
    parents = {str(parent) for target in targets for parent in Path(target).parents} - {"/"}
    return [option for parent in sorted(parents) for option in ("--dir", parent)]


@cache
def _features(program: str) -> tuple[str, ...]:
    """Return the options of this bwrap that older versions lack."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    # Without this option, programs inside could make their own user namespaces and reach more of the kernel.
    return ("--disable-userns",) if "--disable-userns" in text.stdout + text.stderr else ()


@cache
def unreadable_files() -> tuple[str, ...]:
    """Return the paths in /etc that not every user may read (shadow, private keys).

    They are hidden, because programs in a sandbox could read them if root opened the sandbox.
    """
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


def require_bwrap() -> None:
    """Raise `SandboxError` if bwrap is missing or cannot make namespaces. Blocking."""
    try:
        done = subprocess.run([*bwrap_command(), "--", "true"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired as error:
        raise SandboxError("bwrap does not answer") from error
    if done.returncode != 0:
        raise SandboxError(f"bwrap fails: {done.stderr.strip() or done.returncode}")


def installed() -> bool:
    return shutil.which("bwrap") is not None
