"""The supervisor's loop: reads the owner's requests, and sends the owner the reports of the shims."""

from __future__ import annotations

import errno
import json
import os
import select
import selectors
import signal
import socket
import stat
from typing import Any

from . import Channel, kernel
from .shim import Identity, send_signal, shim


class Supervisor:
    def __init__(self, control: Channel) -> None:
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.orders: dict[int, int] = {}  # command id -> pipe to its shim
        self.shims: dict[int, tuple[int, int, bytearray]] = {}  # status fd -> command id, shim pid, text
        self.reported: set[int] = set()  # commands whose exit status was sent, and whose shim still runs
        self.cgroups: list[int] = []
        self.identity = Identity()
        self.init = 0
        self.init_fds: tuple[int, int] | None = None
        self.first = -1  # pidfd of the sandbox's first process: readable when all processes inside have ended
        # Commands whose shim ended without a report, kept until it is known whether init is alive.
        self.killed: list[int] = []
        self.ended = False

    def start(self, config: dict[str, Any]) -> None:
        """Open the control groups, start bwrap if requested, and enter its namespaces."""
        self.cgroups = [os.open(path, os.O_WRONLY) for path in config["cgroup_procs"]]
        out: list[int] = []
        if config["disk"]:
            image, folder = config["disk"]
            try:
                kernel.mount_image(image, folder)
            except OSError as error:  # no loop devices in this container: the owner watches the folders instead
                os.write(2, f"no file system for the sandbox: {error}\n".encode())
            else:
                out.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        reply = {"id": config["id"], "disk": bool(out)}
        if config["bwrap"]:
            inner = self.start_bwrap(config["bwrap"])
            kernel.enter_namespaces(inner, lambda: out.extend(listen(port) for port in config["ports"]))
            self.identity = Identity(config["uid"], bytes.fromhex(config["filter"]))
            if self.identity.uid is not None:
                os.setgroups([])
            kernel.drop_privileges(self.identity.supervisor_capabilities)
        self.control.send({**reply, "init": self.init}, out)
        for fd in out:
            os.close(fd)

    def start_bwrap(self, argv: list[str]) -> int:
        """Start a sandbox in which bwrap runs `cat`, and return the pid of the sandbox's first process.

        `cat` echoes a line, which shows that all mounts are made. `cat` also keeps the sandbox open until this process
        ends, which closes the stdin of `cat`.
        """
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        info_read, info_write = os.pipe()
        self.init = os.fork()
        if self.init == 0:
            try:
                # Not in the sandbox's control groups, where the kernel could kill it when programs fill the memory.
                os.dup2(stdin_read, 0)
                os.dup2(stdout_write, 1)
                options = os.memfd_create("options", 0)  # not on the command line, which programs inside could read
                os.write(options, "\0".join(["--info-fd", str(info_write), *argv[1:]]).encode())
                os.lseek(options, 0, os.SEEK_SET)
                os.set_inheritable(info_write, True)
                os.execve(argv[0], ["bwrap", "--args", str(options), "--", "cat"], {"PATH": os.environ["PATH"]})
            finally:
                os._exit(127)
        for fd in (stdin_read, stdout_write, info_write):
            os.close(fd)
        os.write(stdin_write, b"\n")
        if os.read(stdout_read, 1) != b"\n":
            status, self.init = os.waitpid(self.init, 0)[1], 0
            raise OSError(f"bwrap did not start the sandbox (see above); wait status {status}")
        with os.fdopen(info_read, "rb") as info:
            pid = int(json.loads(info.read())["child-pid"])
        self.init_fds = (stdin_write, stdout_read)
        self.first = os.pidfd_open(pid)
        self.selector.register(stdout_read, selectors.EVENT_READ)
        return pid

    def serve(self) -> None:
        self.selector.register(self.control.sock, selectors.EVENT_READ)
        while True:
            for key, _events in self.selector.select():
                if key.fileobj is self.control.sock:
                    if not self.control.feed():
                        return
                    while (request := self.control.next()) is not None:
                        self.handle(*request)
                elif self.init_fds and key.fd == self.init_fds[1]:
                    if not os.read(key.fd, 4096):  # init ended, and all other processes inside with it
                        status, self.init = os.waitpid(self.init, 0)[1], 0
                        # bwrap ends by itself only after its child; killed from outside, it has no exit status.
                        if self.programs_can_resist and os.WIFEXITED(status):
                            self.end_by_programs()
                        return
                    while self.killed:  # init answers, so only the shims of these commands were killed
                        self.control.send({"id": self.killed.pop(0), "gone": True})
                else:
                    self.read_status(key.fd)
                    if self.killed and self.programs_can_resist:
                        self.end_by_programs()
                if self.ended:
                    return

    def handle(self, message: dict[str, Any], fds: list[int]) -> None:
        reply: dict[str, Any] = {"id": message["id"]}
        out: list[int] = []
        try:
            if message["op"] == "exec":
                self.exec(message, fds)
                return  # the reply is sent when the command ends
            if message["op"] == "kill":
                self.kill(message["target"])
            elif message["op"] == "running":
                reply["running"] = len(self.shims)
            elif message["op"] == "end":
                if self.programs_can_resist:
                    self.end_by_programs()
                reply["ended"] = self.ended
            elif message["op"] == "open":
                with self.identity.files():
                    out.append(open_file(message))
            elif message["op"] == "listen":
                out.append(listen(message["port"]))
        except OSError as error:
            reply["error"], reply["errno"] = str(error), error.errno
        finally:
            for fd in fds:
                os.close(fd)
        self.control.send(reply, out)
        for fd in out:
            os.close(fd)

    def exec(self, message: dict[str, Any], fds: list[int]) -> None:
        orders_read, orders_write = os.pipe()
        status_read, status_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                shim(message, fds, self.cgroups, self.identity, orders_read, status_write)
            except BaseException as error:  # noqa: BLE001 - a fork must never return into the supervisor
                os.write(2, f"shim: {error!r}\n".encode())
                code = 70
            finally:
                os._exit(code)
        os.close(orders_read)
        os.close(status_write)
        self.orders[message["id"]] = orders_write
        self.shims[status_read] = (message["id"], pid, bytearray())
        self.selector.register(status_read, selectors.EVENT_READ)

    def kill(self, target: int | None) -> None:
        for ident, fd in self.orders.items():
            if target in (None, ident):
                try:
                    os.write(fd, b"k")
                except BrokenPipeError:
                    continue  # its shim has ended: no process is left

    def read_status(self, fd: int) -> None:
        ident, pid, text = self.shims[fd]
        data = os.read(fd, 1 << 16)
        text += data
        if b"\n" in text:
            line, _, rest = bytes(text).partition(b"\n")
            text[:] = rest
            self.reported.add(ident)
            self.control.send({"id": ident, **json.loads(line)})
        if not data:
            self.selector.unregister(fd)
            os.close(fd)
            os.close(self.orders.pop(ident))
            del self.shims[fd]
            os.waitpid(pid, 0)
            if ident not in self.reported and self.init_fds:
                # The shim was killed, usually with init. Init's echo, or its end, shows if init is alive.
                self.killed.append(ident)
                try:
                    os.write(self.init_fds[0], b"\n")
                except BrokenPipeError:
                    return  # the end of its output follows
            else:  # the owner ignores this if it already has the exit status
                self.reported.discard(ident)
                self.control.send({"id": ident, "gone": True})

    @property
    def programs_can_resist(self) -> bool:
        """True if programs inside can signal the processes that would end them, because both run as the same user, as
        in bubblewrap without root."""
        return self.init_fds is not None and self.identity.uid is None

    def end_by_programs(self) -> None:
        """End everything inside, and report to the owner that programs inside made the sandbox end.

        The commands that are running count as killed."""
        running = [*self.killed, *(ident for ident, _, _ in self.shims.values())]
        self.end()
        self.ended = True
        self.control.send({"id": 0, "ended_by_programs": True})
        for ident in running:
            self.control.send({"id": ident, "gone": True})

    def end(self) -> None:
        """Kill bwrap, which ends its process namespace, and order every shim to kill its process tree; wait until all
        processes inside have ended."""
        if self.init:
            send_signal(self.init, signal.SIGKILL)
        self.kill(None)
        for _ident, pid, _text in self.shims.values():
            os.waitpid(pid, 0)
        self.shims.clear()
        if self.init:
            os.waitpid(self.init, 0)
            self.init = 0
        if self.first >= 0:
            select.select([self.first], [], [])


def open_file(message: dict[str, Any]) -> int:
    """Open the regular file that the owner's message names, and return its descriptor.

    The path is resolved here, inside the sandbox.
    """
    path = message["path"]
    writing = message["write"]
    if writing:
        os.umask(0o022)
        os.makedirs(os.path.dirname(path), exist_ok=True)
    # O_NONBLOCK: a FIFO without another end must not block the supervisor.
    fd = os.open(path, (os.O_WRONLY | os.O_CREAT if writing else os.O_RDONLY) | os.O_NONBLOCK, 0o600)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):  # a link of the agent's may lead to a device, and devices are the host's own
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "not a regular file", path)
    if writing:
        os.ftruncate(fd, 0)
        os.fchmod(fd, message["mode"])
    return fd


def listen(port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(1024)
        return sock.detach()


def main(control_fd: str) -> int:
    # Ctrl-C in the owner's terminal is for the owner to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Channel(socket.socket(fileno=int(control_fd)))
    control.sock.set_inheritable(False)
    while (first := control.next()) is None:
        if not control.feed():
            return 0
    supervisor = Supervisor(control)
    try:
        supervisor.start(first[0])
        supervisor.serve()
    except BrokenPipeError:
        return 0  # the owner ended in the middle of a reply
    finally:
        supervisor.end()
    return 0
