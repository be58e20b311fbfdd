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


class RunningCommand:
    """A command whose shim runs. The shim may outlive the command, because it also waits for detached processes."""

    def __init__(self, command_id: int, shim_pid: int, orders: int) -> None:
        self.id = command_id
        self.shim_pid = shim_pid
        self.orders = orders  # the pipe to the shim
        self.report = b""  # what the shim has written about the command's exit
        self.reported = False  # whether the owner got this report


class Supervisor:
    def __init__(self, control: Channel) -> None:
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.commands: dict[int, RunningCommand] = {}  # by the pipe from the shim
        self.cgroups: list[int] = []
        self.identity = Identity()
        self.bwrap_pid = 0
        self.cat_stdin = self.cat_stdout = -1
        self.init_pidfd = -1  # of the sandbox's first process: readable when all processes inside have ended
        # Commands whose shim ended without a report, kept until it is known whether the sandbox lives.
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
        self.control.send({**reply, "bwrap_pid": self.bwrap_pid}, out)
        for fd in out:
            os.close(fd)

    def start_bwrap(self, argv: list[str]) -> int:
        """Start a sandbox in which bwrap runs `cat`, and return the pid of the sandbox's first process.

        `cat` echoes a line, which shows that all mounts are made. `cat` also keeps the sandbox open. If the supervisor
        ends, the stdin of `cat` is closed, and the sandbox ends.
        """
        stdin_read, self.cat_stdin = os.pipe()
        self.cat_stdout, stdout_write = os.pipe()
        info_read, info_write = os.pipe()
        self.bwrap_pid = os.fork()
        if self.bwrap_pid == 0:
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
        os.write(self.cat_stdin, b"\n")
        if os.read(self.cat_stdout, 1) != b"\n":
            status = self.wait_for_bwrap()
            raise OSError(f"bwrap did not start the sandbox (see above); wait status {status}")
        with os.fdopen(info_read, "rb") as info:
            pid = int(json.loads(info.read())["child-pid"])
        self.init_pidfd = os.pidfd_open(pid)
        self.selector.register(self.cat_stdout, selectors.EVENT_READ)
        return pid

    def wait_for_bwrap(self) -> int:
        """Wait until bwrap has ended, and return its wait status."""
        status, self.bwrap_pid = os.waitpid(self.bwrap_pid, 0)[1], 0
        return status

    def serve(self) -> None:
        """Handle requests and reports until the owner closes the control socket, or the sandbox ends."""
        self.selector.register(self.control.sock, selectors.EVENT_READ)
        while True:
            for key, _events in self.selector.select():
                if key.fileobj is self.control.sock:
                    self.read_requests()
                elif key.fd == self.cat_stdout:
                    self.read_echo()
                else:
                    self.read_report(key.fd)
                if self.ended:
                    return

    def read_requests(self) -> None:
        if not self.control.feed():
            self.ended = True
            return
        while (request := self.control.next()) is not None:
            self.handle(*request)

    def read_echo(self) -> None:
        """Read the output of `cat`. An echo means that the sandbox lives. The end of the output means that it ended."""
        if os.read(self.cat_stdout, 4096):
            while self.killed:  # only the shims of these commands were killed
                self.control.send({"id": self.killed.pop(0), "gone": True})
            return
        # bwrap ends by itself only after its child; killed from outside, it has no exit status.
        if os.WIFEXITED(self.wait_for_bwrap()) and self.programs_can_resist:
            self.end_by_programs()
        self.ended = True

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
                reply["running"] = len(self.commands)
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
        self.commands[status_read] = RunningCommand(message["id"], pid, orders_write)
        self.selector.register(status_read, selectors.EVENT_READ)

    def kill(self, target: int | None) -> None:
        for command in self.commands.values():
            if target in (None, command.id):
                try:
                    os.write(command.orders, b"k")
                except BrokenPipeError:
                    continue  # its shim has ended: no process is left

    def read_report(self, fd: int) -> None:
        """Read the command's exit status from its shim. The end of the pipe means that the shim has ended."""
        command = self.commands[fd]
        data = os.read(fd, 1 << 16)
        command.report += data
        if data.endswith(b"\n"):
            command.reported = True
            self.control.send({"id": command.id, **json.loads(command.report)})
        if data:
            return
        self.selector.unregister(fd)
        os.close(fd)
        os.close(command.orders)
        del self.commands[fd]
        os.waitpid(command.shim_pid, 0)
        if not command.reported:
            self.shim_was_killed(command)

    def shim_was_killed(self, command: RunningCommand) -> None:
        """Report the command as killed, unless its shim was killed together with the whole sandbox."""
        if self.init_pidfd < 0:
            self.control.send({"id": command.id, "gone": True})
            return
        self.killed.append(command.id)
        if self.programs_can_resist:
            self.end_by_programs()
            return
        try:
            os.write(self.cat_stdin, b"\n")  # the echo, or the end of the output, shows whether the sandbox lives
        except BrokenPipeError:
            return  # the end of the output follows

    @property
    def programs_can_resist(self) -> bool:
        """True in a bubblewrap sandbox without root. Programs inside then run as the same user as the helper
        processes that should end them, so they can stop or kill these helpers."""
        return self.init_pidfd >= 0 and self.identity.uid is None

    def end_by_programs(self) -> None:
        """End everything inside, and report to the owner that programs inside made the sandbox end.

        The commands that are running count as killed."""
        running = [*self.killed, *(command.id for command in self.commands.values())]
        self.end()
        self.ended = True
        self.control.send({"id": 0, "ended_by_programs": True})
        for command_id in running:
            self.control.send({"id": command_id, "gone": True})

    def end(self) -> None:
        """Kill bwrap, which ends its process namespace, and order every shim to kill its process tree; wait until all
        processes inside have ended."""
        if self.bwrap_pid:
            send_signal(self.bwrap_pid, signal.SIGKILL)
        self.kill(None)
        for command in self.commands.values():
            os.waitpid(command.shim_pid, 0)
        self.commands.clear()
        if self.bwrap_pid:
            self.wait_for_bwrap()
        if self.init_pidfd >= 0:
            select.select([self.init_pidfd], [], [])


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
