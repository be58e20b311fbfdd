# mypy: ignore-errors
"""A client of the Agent Client Protocol (https://agentclientprotocol.com, version 1) for unattended runs.

`AcpHarness` starts this program inside the sandbox, with the sandbox's own Python 3.9 or newer. No module imports the
program, and it uses the standard library only.

    python3 client.py [--resume] --prompt=TEXT -- AGENT ARGUMENTS

The first start forks a process, the keeper, which keeps the agent and its session and listens on a socket in HOME. Each
start sends one text of the user to the keeper, prints what the agent says and does, and exits at the end of the agent's
turn. The exit code is 130 if the turn was cancelled, 1 if the agent refused, failed, or broke the protocol, and 0
otherwise. The last line of output says how the turn ended.

If the keeper has ended, `--resume` starts a new keeper and the agent again, and the agent loads its session. An agent
without ACP's `loadSession` cannot do this.

The keeper grants every permission that the agent asks for, and lets the agent use the files and terminals of the
sandbox. If the agent prints a line that is not JSON-RPC, the keeper reports the line and skips it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ.get("HOME", ".")) / ".polar-acp"
SOCKET = "keeper.sock"
SESSION = "session.json"
PROTOCOL_VERSION = 1
IDLE_SECONDS = 3600.0
START_SECONDS = 120.0
CANCEL_SECONDS = 10.0
LINE_LIMIT = 64 << 20
OUTPUT_LIMIT = 1 << 20
METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32601, -32602, -32603


class AgentError(Exception):
    """The agent ended, answered with an error, or lacks a requested feature. The text is one line."""


class Terminal:
    """A command that the agent started through the client."""

    def __init__(self, process: asyncio.subprocess.Process, limit: int) -> None:
        self.process = process
        self.limit = limit
        self.output = b""
        self.truncated = False
        self.reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while data := await self.process.stdout.read(1 << 16):
            self.output += data
            if len(self.output) > self.limit:
                self.truncated = True
                self.output = self.output[len(self.output) - self.limit :]

    @property
    def status(self) -> dict:
        code = self.process.returncode
        if code is None or code >= 0:
            return {"exitCode": code, "signal": None}
        return {"exitCode": None, "signal": signal.Signals(-code).name}

    async def wait(self) -> dict:
        await self.process.wait()
        # A process that the command left running may hold the pipe open.
        await asyncio.wait({self.reader}, timeout=1)
        return self.status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class AgentConnection:
    """JSON-RPC with the agent's process: sends requests to the agent, and answers the agent's requests."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.report = print
        """Function that prints one line for the user."""
        self.cancelled = False
        self._pending: dict = {}
        self._number = 0
        self._terminals: dict = {}
        self._tasks: set = set()
        self._text_open = False
        self.methods = {
            "session/request_permission": self.request_permission,
            "fs/read_text_file": self.read_text_file,
            "fs/write_text_file": self.write_text_file,
            "terminal/create": self.create_terminal,
            "terminal/output": self.terminal_output,
            "terminal/wait_for_exit": self.wait_for_exit,
            "terminal/kill": self.kill_terminal,
            "terminal/release": self.release_terminal,
        }

    async def run(self) -> None:
        """Read the agent's messages until the agent ends. Then fail all requests that still wait for an answer."""
        end = "the agent closed its output"
        try:
            while line := await self.process.stdout.readline():
                self._receive(line)
        except ValueError:  # readline: no line end within LINE_LIMIT
            end = f"the agent sent a line of more than {LINE_LIMIT >> 20} MiB"
            self.process.kill()
        code = await self.process.wait()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(AgentError(f"{end} (exit code {code})"))

    def _receive(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            if line.strip():
                self.say(f"acp: skipped a line that is not JSON-RPC: {line[:200].decode(errors='replace').strip()}")
            return
        method, params = message.get("method"), message.get("params")
        params = params if isinstance(params, dict) else {}
        if method is None:
            self._receive_answer(message)
        elif "id" in message:
            task = asyncio.ensure_future(self._serve(message["id"], method, params))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif method == "session/update":
            self.show_update(params.get("update"))

    def _receive_answer(self, message: dict) -> None:
        number = message.get("id")
        future = self._pending.get(number) if isinstance(number, int) else None
        if future is None or future.done():
            self.say(f"acp: skipped an answer to no request: id {str(number)[:50]}")
        elif isinstance(error := message.get("error"), dict):
            data = f" {json.dumps(error['data'])[:300]}" if error.get("data") else ""
            future.set_exception(AgentError(f"{error.get('message', 'error')} ({error.get('code')}){data}"))
        else:
            result = message.get("result")
            future.set_result(result if isinstance(result, dict) else {})

    async def request(self, method: str, **params) -> dict:
        """Send a request and return its result. Raises AgentError if the agent answers with an error or has ended."""
        self._number += 1
        number = self._number
        future = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            return await future
        finally:
            del self._pending[number]

    async def notify(self, method: str, **params) -> None:
        await self._send({"jsonrpc": "2.0", "method": method, "params": params})

    async def _send(self, message: dict) -> None:
        if self.process.returncode is not None:
            raise AgentError(f"the agent has ended (exit code {self.process.returncode})")
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            await self.process.stdin.drain()
        except ConnectionError as error:
            raise AgentError("the agent closed its input") from error

    async def _serve(self, number, method: str, params: dict) -> None:
        answer: dict = {"jsonrpc": "2.0", "id": number}
        try:
            handler = self.methods.get(method)
            if handler is None:
                answer["error"] = {"code": METHOD_NOT_FOUND, "message": f"the client has no method {method}"}
            else:
                answer["result"] = await handler(params)
        except (KeyError, TypeError, ValueError) as error:
            answer["error"] = {"code": INVALID_PARAMS, "message": f"{type(error).__name__}: {error}"}
        except OSError as error:
            answer["error"] = {"code": INTERNAL_ERROR, "message": str(error)}
        with contextlib.suppress(AgentError):
            await self._send(answer)

    # What the user sees

    def say(self, line: str) -> None:
        """Show the user a line. Begin a new line first if the agent's text did not end with a line break."""
        self.report(("\n" if self._text_open else "") + line + "\n")
        self._text_open = False

    def show_update(self, update) -> None:
        if not isinstance(update, dict):
            return
        kind = update.get("sessionUpdate")
        content = update.get("content")
        if kind == "agent_message_chunk" and isinstance(content, dict):
            if text := str(content.get("text", "")):
                self.report(text)
                self._text_open = not text.endswith("\n")
        elif kind == "tool_call":
            self.say(f"[{update.get('kind', 'tool')}] {str(update.get('title', ''))[:200]}")
        elif kind == "tool_call_update" and update.get("status") == "failed":
            self.say(f"[failed] {str(update.get('title') or update.get('toolCallId', ''))[:200]}")

    # The methods that the agent calls

    async def request_permission(self, params: dict) -> dict:
        options = {option["kind"]: option["optionId"] for option in params["options"]}
        chosen = options.get("allow_always") or options.get("allow_once")
        if self.cancelled or chosen is None:
            return {"outcome": {"outcome": "cancelled"}}
        return {"outcome": {"outcome": "selected", "optionId": chosen}}

    async def read_text_file(self, params: dict) -> dict:
        lines = Path(params["path"]).read_text(errors="replace").splitlines(keepends=True)
        first = max((params.get("line") or 1) - 1, 0)
        limit = params.get("limit")
        return {"content": "".join(lines[first : None if limit is None else first + limit])}

    async def write_text_file(self, params: dict) -> dict:
        path = Path(params["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(params["content"])
        return {}

    async def create_terminal(self, params: dict) -> dict:
        command, arguments = params["command"], params.get("args") or []
        # Some agents send a whole command line as the command.
        argv = [command, *arguments] if arguments else ["/bin/sh", "-c", command]
        env = {**os.environ, **{item["name"]: item["value"] for item in params.get("env") or []}}
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=params.get("cwd") or os.getcwd(), env=env, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        name = f"terminal-{len(self._terminals) + 1}"
        self._terminals[name] = Terminal(process, params.get("outputByteLimit") or OUTPUT_LIMIT)
        return {"terminalId": name}

    async def terminal_output(self, params: dict) -> dict:
        terminal = self._terminals[params["terminalId"]]
        found = {"output": terminal.output.decode(errors="replace"), "truncated": terminal.truncated}
        return found if terminal.process.returncode is None else {**found, "exitStatus": terminal.status}

    async def wait_for_exit(self, params: dict) -> dict:
        return await self._terminals[params["terminalId"]].wait()

    async def kill_terminal(self, params: dict) -> dict:
        self._terminals[params["terminalId"]].kill()
        return {}

    async def release_terminal(self, params: dict) -> dict:
        # The entry stays, because its number must not be given again.
        self._terminals[params["terminalId"]].kill()
        return {}


class Keeper:
    """Keeps the agent and its session between the user's turns."""

    def __init__(self, agent: list, mcp: list, resume: bool) -> None:
        self.agent = agent
        self.mcp = mcp
        self.resume = resume
        self.connection: AgentConnection | None = None
        self.session_id = ""
        self.last_used = time.monotonic()

    async def run(self, listener: socket.socket) -> None:
        """Serve clients until the agent ends, or no client comes for IDLE_SECONDS."""
        self._turn = asyncio.Lock()
        self._ended = asyncio.get_running_loop().create_future()
        server = await asyncio.start_unix_server(self._serve_client, sock=listener, limit=LINE_LIMIT)
        async with server:
            while not self._ended.done() and time.monotonic() - self.last_used < IDLE_SECONDS:
                await asyncio.wait({self._ended}, timeout=5)
        if self.connection is not None and self.connection.process.returncode is None:
            self.connection.process.kill()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run one turn for a client. The client cancels the turn by closing its side of the connection."""
        async with self._turn:
            prompt = json.loads(await reader.readline())["prompt"]

            def report(text: str) -> None:
                if not writer.is_closing():
                    writer.write(json.dumps({"text": text}).encode() + b"\n")

            gone = asyncio.ensure_future(reader.read())
            try:
                reason = await self._play_turn(prompt, report, gone)
                end = {"end": reason, "code": 130 if reason == "cancelled" else 1 if reason == "refusal" else 0}
            except AgentError as error:
                end = {"error": str(error), "code": 1}
                self._end()
            gone.cancel()
            self.last_used = time.monotonic()
            with contextlib.suppress(ConnectionError):
                writer.write(json.dumps(end).encode() + b"\n")
                await writer.drain()
            writer.close()

    async def _play_turn(self, prompt: str, report, gone: asyncio.Future) -> str:
        """Send the user's text and return why the turn ended."""
        connection = self.connection or await self._start_agent(report)
        connection.report, connection.cancelled = report, False
        content = [{"type": "text", "text": prompt}]
        turn = asyncio.ensure_future(connection.request("session/prompt", sessionId=self.session_id, prompt=content))
        await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not turn.done():
            connection.cancelled = True
            await connection.notify("session/cancel", sessionId=self.session_id)
            await asyncio.wait({turn}, timeout=CANCEL_SECONDS)
        if not turn.done():
            turn.cancel()
            raise AgentError(f"the agent did not end its turn within {CANCEL_SECONDS:g} s after it was cancelled")
        result = await turn
        # Updates that belong to the turn may still be on their way.
        await asyncio.sleep(0.05)
        connection.say("")
        return str(result.get("stopReason", "end_turn"))

    async def _start_agent(self, report) -> AgentConnection:
        log = (FOLDER / "agent.log").open("ab")
        try:
            process = await asyncio.create_subprocess_exec(
                *self.agent, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=LINE_LIMIT
            )
        except OSError as error:
            raise AgentError(f"{self.agent[0]} cannot be started: {error}") from error
        connection = AgentConnection(process)
        connection.report = report
        reading = asyncio.ensure_future(connection.run())
        reading.add_done_callback(lambda task: self._end())
        opening = asyncio.ensure_future(self._open_session(connection))
        await asyncio.wait({opening}, timeout=START_SECONDS)
        if not opening.done():
            opening.cancel()
            raise AgentError(f"the agent did not open a session within {START_SECONDS:g} s")
        try:
            await opening
        except AgentError as error:
            raise AgentError(f"{error}{_last_line(FOLDER / 'agent.log')}") from error
        self.connection = connection
        return connection

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _open_session(self, connection: AgentConnection) -> None:
        capabilities = {"fs": {"readTextFile": True, "writeTextFile": True}, "terminal": True}
        found = await connection.request(
            "initialize",
            protocolVersion=PROTOCOL_VERSION,
            clientCapabilities=capabilities,
            clientInfo={"name": "polar", "version": "1"},
        )
        if found.get("protocolVersion") != PROTOCOL_VERSION:
            raise AgentError(
                f"the agent speaks version {found.get('protocolVersion')} of ACP, but this client speaks only version 1"
            )
        where = {"cwd": os.getcwd(), "mcpServers": self.mcp}
        if not self.resume:
            opened = await connection.request("session/new", **where)
            if not isinstance(opened.get("sessionId"), str):
                raise AgentError("the agent's new session has no sessionId")
            self.session_id = opened["sessionId"]
            (FOLDER / SESSION).write_text(json.dumps(self.session_id))
            return
        if not (found.get("agentCapabilities") or {}).get("loadSession"):
            raise AgentError("the agent has ended, and cannot load its session again (it lacks ACP's loadSession)")
        try:
            self.session_id = json.loads((FOLDER / SESSION).read_text())
        except (OSError, ValueError) as error:
            raise AgentError("HOME has no earlier session of the agent to continue: start without --resume") from error
        # The agent repeats the whole conversation while it loads it.
        report, connection.report = connection.report, lambda text: None
        await connection.request("session/load", sessionId=self.session_id, **where)
        connection.report = report


def _last_line(log: Path) -> str:
    """Return the last line that the agent printed on stderr, in a form that can be appended to an error text."""
    lines = [line for line in log.read_text(errors="replace")[-4000:].splitlines() if line.strip()]
    return f"; it printed: {lines[-1].strip()[:300]}" if lines else ""


def connect() -> socket.socket | None:
    """Return a connection to the keeper; None if no keeper runs."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(SOCKET)
    except OSError:
        link.close()
        return None
    return link


def fork_keeper(agent: list, mcp: list, resume: bool, workdir: str) -> None:
    """Start the keeper in the background. The keeper listens when this function returns."""
    Path(SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    listener.listen()
    if os.fork() > 0:
        listener.close()
        return
    # The sandbox waits for the end of this program's output, not of its processes.
    log = os.open("keeper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, number)
    os.chdir(workdir)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(Keeper(agent, mcp, resume).run(listener))
    os._exit(0)


def play_turn(link: socket.socket, prompt: str) -> int:
    """Send the user's text, print what the agent says, and return the exit code."""
    link.sendall(json.dumps({"prompt": prompt}).encode() + b"\n")

    def cancel(number, frame) -> None:
        link.shutdown(socket.SHUT_WR)

    signal.signal(signal.SIGTERM, cancel)
    signal.signal(signal.SIGINT, cancel)
    for line in link.makefile("rb"):
        message = json.loads(line)
        if "text" in message:
            sys.stdout.write(message["text"])
            sys.stdout.flush()
        elif "error" in message:
            print(f"\nacp: {message['error']}", flush=True)
            return message["code"]
        else:
            print(f"acp: the turn ended: {message['end']}", flush=True)
            return message["code"]
    print("\nacp: the process that keeps the agent has ended", flush=True)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--mcp", type=json.loads, default=[])
    parser.add_argument("agent", nargs="+")
    options = parser.parse_args()
    workdir = os.getcwd()
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A path of a socket has at most 107 bytes, and that of HOME may be longer.
    os.chdir(FOLDER)
    link = connect() if options.resume else None
    if link is None:
        fork_keeper(options.agent, options.mcp, options.resume, workdir)
        link = connect()
    if link is None:
        print("acp: the process that keeps the agent does not listen", flush=True)
        return 1
    return play_turn(link, options.prompt)


if __name__ == "__main__":
    sys.exit(main())
