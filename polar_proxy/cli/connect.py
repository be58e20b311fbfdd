"""`polar connect`: print the settings that point an agent at a Polar server, or start the agent with them.

The agent's adapter makes the settings (a `Connection`), in the same way as for rollouts.

* The user's own settings of the agent are never written. Settings files are in a folder below Polar's home.
* The session's key is in the environment only, not in files or argument lists.
* Without `--`, nothing is written: the command prints lines that a shell can evaluate.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.text import Text
from typer.core import TyperCommand

from harness_adapters.base import Connection, get_adapter, list_adapters
from harness_adapters.toolkit.adapter import ConnectableHarness, settings_files
from polar_proxy.cli import options
from polar_proxy.cli.agent_session import AgentSession, open_session, run_in_foreground
from polar_proxy.cli.common import load_client_settings, load_settings
from polar_proxy.cli.harness import find_adapter
from polar_proxy.cli.output import make_table, print_note, print_result
from polar_proxy.config import child_environment
from polar_proxy.errors import UsageError
from polar_proxy.temporary import abandoned_folders, temporary_folder
from sandboxes.remove_tree import remove_tree

_START = "polar_connect_start"
_END_OF_FILE = "END_OF_SETTINGS"


class ConnectCommand(TyperCommand):
    """A command that notes whether its arguments contain `--`, which click removes."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.meta[_START] = "--" in args
        return super().parse_args(ctx, args)


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

    A shell can evaluate the lines: `eval "$(polar connect codex)"`. With `--`, the agent that is installed on this
    machine is started in the current folder, with the arguments after `--`, if there are any. The settings for the
    server are then in a private folder, which is removed when the agent ends. Your own settings of the agent stay as
    they are.
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
        raise UsageError("--json prints the settings and starts nothing: leave out --json, or leave out `--`.")
    harness = _find_harness(agent)
    program = _require_program(harness) if start else None
    settings = load_client_settings(url, db)
    session = open_session(harness.name, settings, url, db, key, model)
    folder = settings.home / "connect"
    if program is None:
        _print_connection(harness, session, folder, as_json)
        return
    raise typer.Exit(_start(harness, session, [program], arguments or [], folder))


# The agents


def _connectable() -> list[ConnectableHarness]:
    folder = load_settings().harness_cache
    adapters = [get_adapter(name, folder) for name in list_adapters(folder)]
    return [one for one in adapters if isinstance(one, ConnectableHarness) and not one.info.intercepted]


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
    if adapter.info.intercepted:
        start = f"polar intercept -- {adapter.info.command}"
        raise UsageError(f"The endpoint of {adapter.name} cannot be set. Start it with: {start}")
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


# Printing


def _print_connection(harness: ConnectableHarness, session: AgentSession, folder: Path, as_json: bool) -> None:
    """Print how the agent connects. Its settings files go into a subfolder of `folder` for this server and agent."""
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
            "ones: Claude Code stops with an error about max_tokens, Codex with one about an incomplete response; "
            "others get cut answers. Serve another model: polar serve --engine llamacpp --engine-url URL, or --engine "
            "vllm."
        )
    return notes


# Starting


def _start(
    harness: ConnectableHarness, session: AgentSession, argv: list[str], arguments: Sequence[str], parent: Path
) -> int:
    """Run the agent in the current folder, with its settings in a private folder, and return its exit code."""
    parent.mkdir(parents=True, exist_ok=True)
    for folder in abandoned_folders(parent):
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
        code = run_in_foreground([*argv, *connection.arguments, *arguments], environment)
    if session.session_id is not None:
        print_note(f"recorded as {session.session_id}; to see it: polar show {session.session_id}")
    return code
