"""`polar connect`: print the settings that point an agent at a Polar server, or start the agent with them.

The settings are the `Connection` of the agent's adapter, which rollouts use too.

* The user's own settings of the agent are never written. Settings files are in a folder below Polar's home.
* The session's key is in the environment only, not in files or argument lists.
* Without `--`, nothing is written: the command prints lines that a shell can evaluate.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.text import Text
from typer.core import TyperCommand

from harness_adapters.base import Connection, Endpoint, get_adapter, list_adapters
from harness_adapters.toolkit.adapter import ConnectableHarness, settings_files
from polar_proxy.cli import options
from polar_proxy.cli.common import is_local_url, load_client_settings, load_settings, with_client
from polar_proxy.cli.harness import find_adapter
from polar_proxy.cli.output import make_table, print_note, print_result
from polar_proxy.config import Settings, child_environment, local_url
from polar_proxy.errors import UsageError
from polar_proxy.temporary import left_folders, temporary_folder
from sandboxes.remove_tree import remove_tree

_START = "polar_connect_start"
_REQUEST_SECONDS = 1800.0
"""Time limit of the agent's model calls. A laptop may take minutes to read a long prompt."""
_END_OF_FILE = "END_OF_SETTINGS"


class ConnectCommand(TyperCommand):
    """A command that notes whether its arguments contain `--`, which click removes."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.meta[_START] = "--" in args
        return super().parse_args(ctx, args)


@dataclass(frozen=True)
class ModelCard:
    name: str
    context_length: int | None
    max_answer: int | None
    """Tokens of its longest answer, if it ends answers before the context is full."""


@dataclass(frozen=True)
class AgentSession:
    """The session that an agent is pointed at."""

    server: str
    """URL of the Polar server, without /v1."""
    key: str
    session_id: str | None
    """None if the user gave the key."""
    model: ModelCard

    def endpoint(self, home: Path) -> Endpoint:
        """Return the endpoint for an agent whose settings are in the folder `home`."""
        return Endpoint(
            base_url=f"{self.server}/v1",
            api_key=self.key,
            model=self.model.name,
            context_length=self.model.context_length,
            home=str(home),
            request_timeout_seconds=_REQUEST_SECONDS,
        )


def connect(
    context: typer.Context,
    agent: Annotated[str | None, typer.Argument(help="The agent. Default: list all agents.")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Start the agent with these arguments.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of the session. Default: make a new session.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name for the agent to send. Default: the name of the served model.")
    ] = None,
    url: options.ServerUrl = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the lines that point an agent at a server, or start the agent: `polar connect AGENT -- ARGUMENTS`.

    A shell can evaluate the lines: `eval "$(polar connect codex)"`. After `--` (with or without arguments) the agent
    that is installed on this machine is started in the current folder. Its settings are then in a private folder,
    which is removed when it ends. Your own settings of the agent stay as they are.
    """
    if agent is None:
        _list_agents(as_json)
        return
    start = context.meta[_START]
    if arguments and not start:
        raise UsageError(
            f"Write -- before the arguments of the agent: polar connect {agent} -- {shlex.join(arguments)}"
        )
    if start and as_json:
        raise UsageError("--json prints the settings and starts nothing: leave out either --json or --.")
    harness = _find_harness(agent)
    program = _require_program(harness) if start else None
    settings = load_client_settings(url, db)
    session = _open_session(harness, settings, url, db, key, model)
    folder = settings.home / "connect"
    if program is None:
        _print_connection(harness, session, folder, as_json)
        return
    raise typer.Exit(_start(harness, session, [program], arguments or [], folder))


# The agents


def _connectable() -> list[ConnectableHarness]:
    folder = load_settings().harness_cache
    adapters = [get_adapter(name, folder) for name in list_adapters(folder)]
    return [adapter for adapter in adapters if isinstance(adapter, ConnectableHarness)]


def _list_agents(as_json: bool) -> None:
    rows = [_describe(harness) for harness in _connectable()]
    table = make_table(
        ("agent", "program", "on PATH", "what it is"),
        ((row["agent"], row["program"], Text("yes", "green") if row["path"] else "no", row["summary"]) for row in rows),
        wrap=("what it is",),
    )
    print_result({"agents": rows}, table, as_json)


def _describe(harness: ConnectableHarness) -> dict[str, Any]:
    return {
        "agent": harness.name,
        "summary": harness.info.summary,
        "program": harness.info.command,
        "path": shutil.which(harness.info.command),
        "install": shlex.join(harness.install_command),
    }


def _find_harness(name: str) -> ConnectableHarness:
    adapter, version = find_adapter(name)
    if version is not None:
        raise UsageError(f"{name!r} names a version, but only the installed one can be used: write {adapter.name}.")
    if not isinstance(adapter, ConnectableHarness):
        known = ", ".join(harness.name for harness in _connectable())
        raise UsageError(f"{adapter.name} cannot be connected: choose {known}.")
    return adapter


def _require_program(harness: ConnectableHarness) -> str:
    program = shutil.which(harness.info.command)
    if program is None:
        raise UsageError(
            f"{harness.name} is not installed: there is no program {harness.info.command!r} on PATH. "
            f"Install it: {shlex.join(harness.install_command)}"
        )
    return program


# The session


def _open_session(
    harness: ConnectableHarness, settings: Settings, url: str | None, db: str | None, key: str | None, model: str | None
) -> AgentSession:
    """Ask the server for its model, and make a session unless a key is given.

    Without a URL the session is made in the database, as by `polar session new`.
    """
    server = _server_url(settings)
    served = _ask_model(server)
    if model is not None:
        served = replace(served, name=_printable("--model", model))
    if key is not None:
        if not key.isascii() or not key.isprintable() or not key or " " in key:
            raise UsageError("--key must consist of visible ASCII characters, so that an HTTP header can carry it.")
        return AgentSession(server, key, None, served)
    from polar_proxy.api_models import SessionRequest
    from polar_proxy.client import UnauthorisedError

    request = SessionRequest(label=harness.name)
    try:
        created = with_client(url, db, lambda client: client.new_session(request), create=True)
    except UnauthorisedError as error:
        raise UsageError(f"{error} Or give the key of a session: --key KEY.") from error
    return AgentSession(server, created.key, created.session_id, served)


def _server_url(settings: Settings) -> str:
    """Return the URL of the server without /v1. Raises UsageError."""
    if settings.url is not None:
        is_local_url(settings.url)  # validates it
        return settings.url.rstrip("/").removesuffix("/v1")
    if settings.gateway.port == 0:
        raise UsageError("The setting gateway.port is 0, so the server's port is not known: give --url.")
    return local_url(settings.gateway.host, settings.gateway.port)


def _ask_model(server: str) -> ModelCard:
    """Return the model that the server serves. Raises UsageError if there is no Polar server at this URL."""
    import httpx

    try:
        reply = httpx.get(f"{server}/v1/models", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(
            f"No server answers at {server} ({type(error).__name__}: {error}). Start one with `polar serve`, or name a "
            "running one with --url."
        ) from error
    try:
        (card,) = reply.json()["data"]
        if card["owned_by"] != "polar":
            raise ValueError(card["owned_by"])
        length, answer = card["max_model_len"], card["max_tokens"]
        name = str(card["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{server} is not a Polar server: its list of models is not Polar's.") from error
    context_length = length if isinstance(length, int) else None
    max_answer = answer if isinstance(answer, int) and answer != context_length else None
    return ModelCard(_printable("The model of the server", name), context_length, max_answer)


def _printable(what: str, name: str) -> str:
    if not name or not name.isprintable():
        raise UsageError(f"{what} is {name!r}: a model name must be printable text.")
    return name


# Printing


def _print_connection(harness: ConnectableHarness, session: AgentSession, folder: Path, as_json: bool) -> None:
    """Print the connection. Its settings files are for a folder of this server and this agent, below `folder`."""
    home = folder / re.sub(r"[^\w.-]+", "-", urlsplit(session.server).netloc) / harness.name
    connection = harness.connect(session.endpoint(home))
    files = {str(home / name): text for name, text in settings_files(connection.settings).items()}
    found = {
        **_describe(harness),
        "url": session.server,
        "model": session.model.name,
        "session_id": session.session_id,
        "env": connection.env,
        "unset": connection.unset,
        "files": files,
        "start": _command_line(harness, connection),
        "notes": _notes(session, connection),
    }
    print_result(found, lambda: typer.echo(_shell_lines(harness, session, connection, files)), as_json)


def _command_line(harness: ConnectableHarness, connection: Connection) -> list[str]:
    return [harness.info.command, *connection.arguments]


def _shell_lines(
    harness: ConnectableHarness, session: AgentSession, connection: Connection, files: dict[str, str]
) -> str:
    """Return lines for a POSIX shell that write the settings files and set the variables."""
    recorded = f"session {session.session_id}" if session.session_id else "the session of the given key"
    lines = [f"# {harness.name} at {session.server}, model {session.model.name}, recorded as {recorded}"]
    if connection.unset:
        lines.append(f"unset {' '.join(connection.unset)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in connection.env.items()]
    for path, text in files.items():
        # The files are JSON, or TOML without multi-line strings, so no line of theirs equals the end mark.
        lines.append(f"mkdir -p {shlex.quote(str(Path(path).parent))}")
        lines.append(f"cat > {shlex.quote(path)} <<'{_END_OF_FILE}'\n{text.rstrip()}\n{_END_OF_FILE}")
    lines.append(f"# Start it: {shlex.join(_command_line(harness, connection))}")
    lines += [f"# {note}" for note in _notes(session, connection)]
    return "\n".join(lines)


def _notes(session: AgentSession, connection: Connection) -> list[str]:
    """Return what the user should know before the agent is started."""
    notes = [connection.note] if connection.note else []
    if session.model.max_answer is not None:
        notes.append(
            f"The server's model ends each answer after {session.model.max_answer} tokens. Most agents need longer "
            "ones: Claude Code stops with an error about max_tokens, others get cut answers. Serve another model: "
            "polar serve --engine llamacpp --engine-url URL, or --engine vllm."
        )
    return notes


# Starting


def _start(
    harness: ConnectableHarness, session: AgentSession, argv: list[str], arguments: Sequence[str], parent: Path
) -> int:
    """Run the agent in the current folder, with its settings in a private folder, and return its exit code."""
    parent.mkdir(parents=True, exist_ok=True)
    for folder in left_folders(parent):
        remove_tree(folder)
    with temporary_folder(parent) as home:
        connection = harness.connect(session.endpoint(home))
        for name, text in settings_files(connection.settings).items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for note in _notes(session, connection):
            print_note(note)
        environment = child_environment(connection.env, without=connection.unset)
        code = _run_in_foreground([*argv, *connection.arguments, *arguments], environment)
    if session.session_id is not None:
        print_note(f"recorded as {session.session_id}; to see it: polar show {session.session_id}")
    return code


def _run_in_foreground(argv: Sequence[str], environment: dict[str, str]) -> int:
    """Run a program on this terminal and return its exit code, as a shell reports it.

    Ctrl-C reaches the program from the terminal, and does not end this process. SIGTERM and SIGHUP are passed on.
    """
    process: subprocess.Popen[bytes] | None = None
    came_early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            return
        if process is None:
            came_early.append(number)
        else:
            process.send_signal(number)

    # Handlers instead of SIG_IGN, which the program would inherit.
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        process = subprocess.Popen(argv, env=environment)
        for number in came_early:
            process.send_signal(number)
        code = process.wait()
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started: {error.strerror}.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
