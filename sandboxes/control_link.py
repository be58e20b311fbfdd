"""The owner's connections to a supervised sandbox: the control socket and the output pipes. The event loop reads
both."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any

from sandboxes import supervisor
from sandboxes.base import OutputCallback, OutputTail, SandboxEnded, uncancellable

Reply = tuple[dict[str, Any], list[int]]


class OutputPipe:
    """Reads one pipe, and keeps only the end of the output. After `discard`, the pipe is still read, so that background
    writers do not block."""

    def __init__(self, limit: int, failed: asyncio.Future[Any], callback: OutputCallback | None) -> None:
        self.fd, self.writer = os.pipe()
        os.set_blocking(self.fd, False)
        self.tail = OutputTail(limit)
        self.ended = asyncio.Event()
        self._failed = failed
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        if self._callback is None and self._failed.done():
            return
        self.tail.add(data)
        if self._callback is not None:
            try:
                self._callback(data)
            except Exception as error:  # noqa: BLE001 - `exec` raises it
                self._callback = None
                if not self._failed.done():
                    self._failed.set_exception(error)

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def discard(self) -> None:
        self._callback = None
        self.tail = OutputTail(0)

    def close(self) -> None:
        self.close_writer()
        if not self.ended.is_set():
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.ended.set()


class ControlLink:
    """The control socket of one sandbox: sends requests, and matches replies by id. Belongs to one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._channel = supervisor.Channel(sock)
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next = 0
        self.ended = asyncio.Event()
        self.ended_by_programs = False
        """True if the supervisor has reported that programs inside ended the sandbox. Then no program is left."""
        self._loop.add_reader(sock.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            alive = self._channel.feed()
        except BlockingIOError:
            return
        except ConnectionError:
            alive = False
        while (message := self._channel.next()) is not None:
            reply, fds = message
            self.ended_by_programs |= "ended_by_programs" in reply
            waiting = self._waiting.pop(reply.get("id", 0), None)
            if waiting is not None and not waiting.done():
                waiting.set_result((reply, fds))
            else:
                for fd in fds:
                    os.close(fd)
        if not alive:
            self.close()

    def expect(self) -> tuple[int, asyncio.Future[Reply]]:
        self._next += 1
        future = self._waiting[self._next] = self._loop.create_future()
        return self._next, future

    async def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        data, ancillary = supervisor.frame(message, fds)
        async with self._sending:
            while not self.ended.is_set():
                try:
                    sent = self._sock.sendmsg([data], ancillary)
                except BlockingIOError:
                    await self._writable()
                    continue
                except ConnectionError:
                    break
                # Half a message would corrupt the stream: the rest is sent even if the caller is cancelled.
                if sent < len(data):
                    await uncancellable(self._loop.sock_sendall(self._sock, data[sent:]))
                return
        raise SandboxEnded("the sandbox has ended")

    async def _writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._sock.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self._sock.fileno())

    async def call(self, **message: Any) -> Reply:
        request_id, future = self.expect()
        await self.send({"id": request_id, **message})
        try:
            reply, fds = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                for fd in future.result()[1]:
                    os.close(fd)
            raise
        if "error" in reply:
            raise OSError(reply["errno"], reply["error"])
        return reply, fds

    def close(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxEnded("the sandbox ended: it was closed, or its init process was killed"))
                future.exception()  # retrieved, so that an abandoned request is not logged
        self._waiting.clear()
