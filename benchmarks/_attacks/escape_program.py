"""The attacking program of `escapes`, run inside the sandbox: makes each attempt in a child process, and prints its
result as a line of JSON.

Reads one JSON document from stdin: `attempts` (names to make) and what the host prepared. It knows more than an agent
would: paths, process ids and ports of the host and of another sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import itertools
import json
import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GIVEN: dict[str, Any] = {}
SECONDS = 30
Result = tuple[bool, str]
libc = ctypes.CDLL(None, use_errno=True)


def call(numbers: list[int]) -> str:
    """Make a system call; return "" if it was refused, otherwise its result."""
    ctypes.set_errno(0)
    result = libc.syscall(*[ctypes.c_long(number) for number in numbers])
    error = ctypes.get_errno()
    if result < 0 and error in (1, 38):  # EPERM, ENOSYS
        return ""
    return str(result) if result >= 0 else os.strerror(error)


def try_calls(names: tuple[str, ...]) -> Result:
    calls = {name: numbers for name, numbers in GIVEN["calls"].items() if name.startswith(names)}
    answered = {name: answer for name, numbers in calls.items() if (answer := call(numbers))}
    return bool(answered), f"{len(calls) - len(answered)} of {len(calls)} refused {answered or ''}".strip()


def error_of(error: OSError) -> str:
    return error.strerror or type(error).__name__


def opened(paths: list[str], flags: int) -> Result:
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            os.close(os.open(path, flags | os.O_NONBLOCK))
            found.append(path)
    return bool(found), f"{len(found)} of {len(paths)} opened" + (f": {', '.join(found[:3])}" if found else "")


def connect(family: int, kind: int, address: Any, say: bytes = b"") -> Result:
    try:
        with socket.socket(family, kind) as link:
            link.settimeout(3)
            link.connect(address)
            if say:
                link.send(say)
                return bool(link.recv(64)), "answered"
            return True, "connected"
    except OSError as error:
        return False, error_of(error)


def open_socket(family: int, kind: int, protocol: int = 0) -> Result:
    try:
        socket.socket(family, kind, protocol).close()
    except OSError as error:
        return False, error_of(error)
    return True, "opened"


def run(*argv: str) -> Result:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        return False, error_of(error)
    return done.returncode == 0, (done.stdout + done.stderr).strip()[-120:] or f"exit {done.returncode}"


def holds_secret(path: str) -> bool:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return GIVEN["secret"].encode() in (file.read(1 << 20) or b"")
    except OSError:
        return False


# The kernel


def mount_calls() -> Result:
    return try_calls(("fs", "mount", "move_mount", "open_tree", "pivot_root", "umount2", "quotactl"))


def file_handle_calls() -> Result:
    return try_calls(("name_to_handle_at", "open_by_handle_at"))


def process_calls() -> Result:
    return try_calls(("ptrace", "process_vm", "pidfd_getfd", "kcmp", "migrate_pages", "move_pages"))


def namespace_calls() -> Result:
    return try_calls(("unshare", "clone3", "setns"))


def bpf_and_perf_calls() -> Result:
    return try_calls(("bpf", "perf_event_open", "fanotify_init", "lookup_dcookie"))


def io_uring_calls() -> Result:
    return try_calls(("io_uring",))


def userfaultfd_call() -> Result:
    return try_calls(("userfaultfd",))


def keyring_calls() -> Result:
    return try_calls(("add_key", "keyctl", "request_key"))


def module_and_kexec_calls() -> Result:
    return try_calls(("init_module", "finit_module", "delete_module", "kexec"))


def machine_calls() -> Result:
    return try_calls(("acct", "reboot", "swap", "syslog", "vhangup", "iopl", "ioperm", "personality", "uselib"))


def change_clock() -> Result:
    return try_calls(("clock_settime", "clock_adjtime", "settimeofday"))


def change_hostname() -> Result:
    return try_calls(("sethostname", "setdomainname"))


def inject_into_terminal() -> Result:
    """Push a command into the terminal that Polar was started from."""
    reached, got = try_calls(("ioctl(TIOCSTI)",))
    with contextlib.suppress(OSError), open("/dev/tty", "rb") as terminal:
        fcntl.ioctl(terminal, 0x5412, b"x")
        return True, "the terminal took a character"
    return reached, got


def user_namespace() -> Result:
    return run("unshare", "-Ur", "true")


def mount_overlay() -> Result:
    folder = tempfile.mkdtemp()
    options = f"lowerdir=/etc,upperdir={folder},workdir={folder}"
    tries = [run("mount", "-t", "overlay", "overlay", "-o", options, folder), run("mount", "--bind", "/usr", folder)]
    return any(reached for reached, _ in tries), tries[0][1]


def new_root() -> Result:
    try:
        os.chroot(os.getcwd())
    except OSError as error:
        return False, error_of(error)
    return True, "chroot is allowed"


def gain_capabilities() -> Result:
    header = struct.pack("Ii", 0x20080522, 0)
    done = libc.capset(header, struct.pack("6I", 0xFFFFFFFF, 0xFFFFFFFF, 0, 0, 0, 0))
    return done == 0, "refused" if done else "granted"


def become_root() -> Result:
    """Become the host's root by setuid(0). If this program is user 0 already, check whether it has capabilities."""
    if os.getuid() == 0:
        ranges = Path("/proc/self/uid_map").read_text().split()
        with open("/proc/self/status") as file:
            effective = next(line.split()[1] for line in file if line.startswith("CapEff"))
        return int(effective, 16) != 0, f"user 0 without capabilities, outside it is user {ranges[1]}"
    try:
        os.setuid(0)
    except OSError as error:
        return False, error_of(error)
    return True, "uid 0"


def set_user_id_programs() -> Result:
    """Gain privileges by every set-user-id program there is."""
    found = [path for path in glob.glob("/usr/*bin/*") if os.path.isfile(path) and os.stat(path).st_mode & stat.S_ISUID]
    with open("/proc/self/status") as file:
        gains = any(line.startswith("NoNewPrivs:\t0") for line in file)
    done = [run(path, "-c", "id -u")[1] for path in found if path.endswith("/su")] if os.getuid() else []
    return (gains and bool(found)) or "0" in done, f"{len(found)} programs, none of them gains anything"


def realtime_priority() -> Result:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except OSError as error:
        return False, error_of(error)
    return True, "real-time"


def raise_own_limits() -> Result:
    raised = []
    for name in ("RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK"):
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        if hard == resource.RLIM_INFINITY:
            continue
        try:
            resource.setrlimit(which, (hard + 1, hard + 1))
            raised.append(name)
        except (OSError, ValueError):
            continue
    return bool(raised), f"raised: {', '.join(raised) or 'none'}"


def run_from_memory() -> Result:
    """Run a program from memory, and check whether the sandbox's restrictions hold for it too."""
    program = os.memfd_create("program")
    os.write(program, Path("/bin/cat").read_bytes())
    done = subprocess.run(
        [f"/proc/self/fd/{program}", "/proc/self/status"], pass_fds=[program], capture_output=True, check=False
    )
    status = dict(line.split(":\t") for line in done.stdout.decode().splitlines() if ":\t" in line)
    free = int(status.get("CapEff", "0"), 16) or status.get("NoNewPrivs") == "0" or status.get("Seccomp") == "0"
    return bool(free), f"capabilities {status.get('CapEff')}, seccomp {status.get('Seccomp')}"


# Files of the host


def write_kernel_settings() -> Result:
    return opened(list(below("/proc/sys")), os.O_WRONLY)


def core_pattern() -> Result:
    """Make the kernel run a program as root on the host when something crashes."""
    return opened(
        ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/sys/kernel/uevent_helper"], os.O_WRONLY
    )


def system_request() -> Result:
    return opened(["/proc/sysrq-trigger", "/proc/sys/kernel/sysrq"], os.O_WRONLY)


def write_sys() -> Result:
    return opened(list(below("/sys")), os.O_WRONLY)


def write_control_groups() -> Result:
    """Leave the sandbox's limits through the control group files."""
    tries = [*below("/sys/fs/cgroup"), *glob.glob("/proc/*/cgroup")]
    reached, got = opened([path for path in tries if not path.startswith("/proc")], os.O_WRONLY)
    return reached, got


def kernel_memory() -> Result:
    return opened(["/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore"], os.O_RDONLY)


def kernel_log() -> Result:
    return opened(["/dev/kmsg", "/proc/kmsg"], os.O_RDONLY)


def kernel_addresses() -> Result:
    try:
        with open("/proc/kallsyms") as file:
            addresses = {line.split()[0] for line in itertools.islice(file, 1000)}
    except OSError as error:
        return False, error_of(error)
    shown = [one for one in addresses if int(one, 16)]
    return bool(shown), f"{len(shown)} addresses of the kernel"


def devices() -> Result:
    usual = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"}
    names = [path for path in below("/dev") if os.path.basename(path) not in usual and not path.startswith("/dev/pts")]
    return opened(
        [path for path in names if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK)], os.O_RDONLY
    )


def make_device() -> Result:
    """Make a node of the host's disk and open it."""
    try:
        os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(*GIVEN["disk"]))
        os.close(os.open("disk", os.O_RDONLY))
    except OSError as error:
        return False, error_of(error)
    return True, "the host's disk can be read"


def host_files() -> Result:
    """Read a file of the host by its path, through links and through /proc/1/root."""
    path = GIVEN["host_file"]
    with contextlib.suppress(FileExistsError):
        os.symlink(path, "to-the-host")
    tries = [path, "to-the-host", f"/proc/1/root{path}", f"/proc/self/root{path}", f"/proc/1/cwd/..{path}"]
    found = [one for one in tries if holds_secret(one)]
    return bool(found), f"{len(found)} of {len(tries)} paths lead to it"


def through_other_processes() -> Result:
    """Read files of the host and of Polar through every visible process."""
    found = []
    for process in glob.glob("/proc/[0-9]*"):
        tries = [f"{process}/root{GIVEN['host_file']}", f"{process}/environ", *glob.glob(f"{process}/fd/*")]
        found += [one for one in tries if not is_own(one) and holds_secret(one)]
    return bool(found), f"{len(found)} found" + (f": {found[0]}" if found else "")


def is_own(path: str) -> bool:
    return path.split("/")[2] in (str(os.getpid()), str(os.getppid())) and "/fd/" in path


def write_host_file() -> Result:
    path = GIVEN["host_folder"] + "/written"
    with contextlib.suppress(FileExistsError):
        os.symlink(GIVEN["host_folder"], "link-to-the-host")
    for one in (path, "link-to-the-host/written", f"/proc/1/root{path}"):
        with contextlib.suppress(OSError):
            Path(one).write_text("by the agent")
            return os.path.exists(path), f"wrote {one}"
    return False, "not written"


def change_system() -> Result:
    """Change programs of the host. (A docker sandbox has its own.)"""
    found = []
    for folder in ("/usr/bin", "/etc", "/usr/lib", "/lib", "/opt"):
        with contextlib.suppress(OSError):
            Path(folder, "polar-was-here").write_text("x")
            found.append(folder)
    return bool(found) and not GIVEN["own_system"], f"files made in {', '.join(found) or 'none'}"


def hard_links() -> Result:
    """Make a second name of a system file in the workspace and write to it."""
    found = []
    for path in ("/etc/passwd", "/bin/sh", "/etc/hosts"):
        with contextlib.suppress(OSError):
            os.link(path, "linked")
            with open("linked", "ab"):
                found.append(path)
            os.unlink("linked")
    return bool(found) and not GIVEN["own_system"], f"{len(found)} linked and opened"


def secrets_in_environment() -> Result:
    own = ("POLAR_SANDBOX_ID", "POLAR_EXEC_ID")
    names = [name for name in os.environ if name.startswith(("POLAR_", "AWS_", "HF_")) and name not in own]
    values = [name for name, value in os.environ.items() if GIVEN["secret"] in value]
    return bool(names or values), f"{len(names) + len(values)} variables of the host"


# Other processes


def other_sandbox_files() -> Result:
    tries = [*GIVEN["neighbour_files"], *(f"/proc/1/root{path}" for path in GIVEN["neighbour_files"])]
    found = [path for path in tries if holds_secret(path)]
    return bool(found), f"{len(found)} of {len(tries)} read"


def other_sandbox_processes() -> Result:
    found = []
    for process in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            if GIVEN["neighbour_command"].encode() in Path(process, "cmdline").read_bytes():
                found.append(process)
    return bool(found), f"{len(found)} visible"


def other_sandbox_gateway() -> Result:
    """Reach the socket on which the gateway serves another sandbox."""
    return connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", GIVEN["neighbour_port"]))


def signal_outside() -> Result:
    """Signal a process of the host by its id. Whether it lived on is judged from outside."""
    for pid in GIVEN["host_pids"]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
    return False, "sent"


def kill_own_supervisor() -> Result:
    """Signal the process that reports this program's exit status."""
    if GIVEN["own_system"]:
        return False, "it is the engine, outside"
    try:
        os.kill(GIVEN["shim"], signal.SIGCONT)
    except (OSError, OverflowError) as error:
        return False, error_of(error) if isinstance(error, OSError) else "no such process"
    return GIVEN["shim"] > 0, "it can be signalled"


def inherited_descriptors() -> Result:
    """Find open descriptors besides stdin, stdout and stderr, such as the supervisor's pipe or control socket."""
    found = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in GIVEN["descriptors"]}
    return bool(found), f"{len(found)} besides stdin, stdout, stderr {found or ''}".strip()


def supervisor_memory() -> Result:
    if GIVEN["own_system"]:
        return False, "it is the engine, outside"
    return opened(
        [f"/proc/{pid}/{name}" for pid in (1, GIVEN["shim"]) for name in ("mem", "environ", "maps")], os.O_RDONLY
    )


def leave_a_daemon() -> Result:
    """Leave a program that detached itself. Whether it lives on is judged from outside."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(3):
                os.close(fd)
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", GIVEN["daemon"]], {})
        os._exit(0)
    os.wait()
    return False, "left"


# Networks


def host_loopback() -> Result:
    return connect(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", GIVEN["port"]))


def host_address() -> Result:
    return connect(socket.AF_INET, socket.SOCK_STREAM, (GIVEN["host"], GIVEN["port"]))


def host_ipv6() -> Result:
    return connect(socket.AF_INET6, socket.SOCK_STREAM, ("::1", GIVEN["port6"]))


def internet() -> Result:
    return connect(socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 9))


def internet_ipv6() -> Result:
    return connect(socket.AF_INET6, socket.SOCK_DGRAM, ("2001:db8::1", 9))


def link_local_metadata() -> Result:
    """Reach the metadata service of a cloud, which hands out credentials."""
    return connect(socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80))


def names() -> Result:
    query = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01"
    with contextlib.suppress(OSError):
        servers = [
            line.split()[1] for line in Path("/etc/resolv.conf").read_text().splitlines() if "nameserver" in line
        ]
        for server in servers:
            reached, got = connect(socket.AF_INET, socket.SOCK_DGRAM, (server, 53), query)
            if reached:
                return True, f"{server} {got}"
    return False, "no server answers"


def host_abstract_socket() -> Result:
    return connect(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + GIVEN["abstract"])


def service_sockets() -> Result:
    names = [
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/run/containerd/containerd.sock",
        "/run/dbus/system_bus_socket",
    ]
    names.append(GIVEN["unix_socket"])
    found = [name for name in names if connect(socket.AF_UNIX, socket.SOCK_STREAM, name)[0]]
    return bool(found), f"{len(found)} of {len(names)} answer"


def raw_socket() -> Result:
    return open_socket(socket.AF_INET, socket.SOCK_RAW, 1)


def packet_socket() -> Result:
    return open_socket(17, socket.SOCK_RAW, 768)


def vsock() -> Result:
    """Reach the hypervisor, which needs no network."""
    return open_socket(40, socket.SOCK_STREAM)


def netlink() -> Result:
    found = [protocol for protocol in range(1, 23) if open_socket(16, socket.SOCK_RAW, protocol)[0]]
    return bool(found), f"{len(found)} of 22 protocols opened"


def new_network_interface() -> Result:
    return run("ip", "link", "add", "polar0", "type", "dummy")


def unusual_sockets() -> Result:
    families = [family for family in range(3, 46) if family not in (10, 16)]
    found = [family for family in families if any(open_socket(family, kind)[0] for kind in (1, 2, 3, 5))]
    return bool(found), f"{len(found)} of {len(families)} families opened {found or ''}".strip()


# Machine-wide resources


def open_descriptors() -> Result:
    count = 0
    with contextlib.suppress(OSError):
        while count <= GIVEN["limits"]["open_files"] * 2:
            os.dup(0)
            count += 1
    return count > GIVEN["limits"]["open_files"], f"{count} opened"


def below(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not os.path.islink(os.path.join(folder, name))][:2000]
        for name in files:
            yield os.path.join(folder, name)


ATTEMPTS: dict[str, Callable[[], Result]] = {
    function.__name__: function
    for function in (
        *(mount_calls, file_handle_calls, process_calls, namespace_calls, bpf_and_perf_calls, io_uring_calls),
        *(userfaultfd_call, keyring_calls, module_and_kexec_calls, machine_calls, change_clock, change_hostname),
        *(inject_into_terminal, user_namespace, mount_overlay, new_root, gain_capabilities, become_root),
        *(set_user_id_programs, realtime_priority, raise_own_limits, run_from_memory),
        *(write_kernel_settings, core_pattern, system_request, write_sys, write_control_groups, kernel_memory),
        *(kernel_log, kernel_addresses, devices, make_device, host_files, through_other_processes, write_host_file),
        *(change_system, hard_links, secrets_in_environment, other_sandbox_files, other_sandbox_processes),
        *(other_sandbox_gateway, signal_outside, kill_own_supervisor, inherited_descriptors, supervisor_memory),
        *(leave_a_daemon, host_loopback, host_address, host_ipv6, internet, internet_ipv6, link_local_metadata),
        *(names, host_abstract_socket, service_sockets, raw_socket, packet_socket, vsock, netlink),
        *(new_network_interface, unusual_sockets, open_descriptors),
    )
}


def attempt(name: str) -> None:
    """Make one attempt in a child process, which may be killed for it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        try:
            reached, got = ATTEMPTS[name]()
        except Exception as error:  # noqa: BLE001 (reported)
            reached, got = False, f"gave up: {type(error).__name__}: {error}"
        os.write(write, json.dumps([reached, got[:300]]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    reached, got = json.loads(text) if text else (False, "the attempt was killed")
    print(json.dumps({"attempt": name, "reached": reached, "got": got}), flush=True)


def main() -> None:
    GIVEN.update(json.load(sys.stdin), shim=os.getppid())
    GIVEN["descriptors"] = [
        int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
    ]
    for name in GIVEN["attempts"]:
        attempt(name)


if __name__ == "__main__":
    main()
