"""The `polar` command. Each verb parses its options, calls the library and prints the result.

A verb's module is imported when the verb is used: `polar --version` and `polar --help` do not import any, and a verb
does not import what only other verbs need. `tests/cli/test_imports.py` checks which modules a verb must not import.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from polar_proxy import __version__
from polar_proxy.errors import PolarError, UsageError
from polar_proxy.terminal import configure_logging, message_lines


@dataclass(frozen=True, slots=True)
class Verb:
    """A command of `polar`, or a group of commands, which is imported when it is used."""

    target: str
    """The function or the `typer.Typer`, as module:name in `polar_proxy.cli`."""
    help: str
    """The first paragraph of the command's help text, for `polar --help`."""
    command_class: str | None = None
    """The class of the command, as module:name in `polar_proxy.cli`; None for typer's own class."""

    def load(self) -> Callable[..., None] | typer.Typer:
        """Import and return the command's function, or the group of commands."""
        loaded: Callable[..., None] | typer.Typer = _imported(self.target)
        return loaded


def _imported(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"polar_proxy.cli.{module}"), name)


VERBS = {
    "run": Verb(
        "rollouts:run", "Run an agent on tasks; record its model calls, score its work and build training sequences."
    ),
    "serve": Verb(
        "serve:serve",
        "Serve the gateway and the HTTP API until stopped. --json prints one JSON document when the server is ready.",
    ),
    "connect": Verb(
        "connect:connect",
        "Print the lines that point an agent at a server, or start the agent: `polar connect AGENT -- ARGUMENTS`.",
        command_class="connect:ConnectCommand",
    ),
    "intercept": Verb(
        "intercept:intercept",
        "Start a program whose model endpoint cannot be set, and answer its model calls: `polar intercept -- PROGRAM`.",
    ),
    "node": Verb("serve:node", "Add this machine to a Ray cluster until stopped."),
    "submit": Verb("rollouts:submit", "Queue rollouts and print the job's id."),
    "status": Verb("rollouts:status", "Show the progress of jobs."),
    "results": Verb("rollouts:results", "Show the rollouts of a job with their rewards."),
    "watch": Verb(
        "rollouts:watch",
        "Show the progress of a job until it has ended. The exit code is 0 if it is done, 1 if it was cancelled.",
    ),
    "top": Verb(
        "top:top",
        "Show what a server or a database does now: engine, stages, rates, active sessions and newest failures.",
    ),
    "events": Verb("rollouts:events", "Print events as they happen, one JSON object per line."),
    "cancel": Verb("rollouts:cancel", "Cancel a job, a group or a rollout."),
    "pause": Verb("rollouts:pause", "Pause a job: start no more of its rollouts. Running rollouts continue."),
    "resume": Verb("rollouts:resume", "Resume a paused job."),
    "reward": Verb("feedback:reward", "Add a reward to a rollout or a session. Earlier rewards are kept."),
    "remark": Verb(
        "feedback:remark", "Give a label, a note or a rating to a rollout or a session. Earlier remarks are kept."
    ),
    "sessions": Verb("show:sessions", "List sessions, newest first."),
    "view": Verb(
        "view:view",
        "Show the recorded runs of a database in the browser, read-only, until stopped.",
    ),
    "show": Verb("show:show", "Show a rollout or a session as a story, or a call in full."),
    "sql": Verb(
        "sql:sql",
        "Run one read-only SQL statement on the database, with functions that unpack texts and tokens.",
    ),
    "export": Verb(
        "traces:export",
        "Write recorded runs as JSON lines, and print counts of what was left out to standard error.",
    ),
    "build": Verb(
        "traces:build",
        "Build the traces of rollouts and sessions from their recorded calls, replacing the builder's earlier traces.",
    ),
    "audit": Verb(
        "traces:audit", "Score traces again with the engine, and compare the log-probabilities with the recorded ones."
    ),
    "rescore": Verb(
        "traces:rescore",
        "Give recorded text the tokens and log-probabilities of another engine, and build off-policy traces from it.",
    ),
    "conformance": Verb(
        "conformance:conformance",
        "Run the real agents through Polar, and count calls, edges between calls, retries and losses.",
    ),
    "session": Verb("admin:session_app", "Create sessions for agents that you start yourself."),
    "key": Verb("admin:key_app", "Manage keys of the HTTP API."),
    "service": Verb("admin:service_app", "Pause, resume and drain servers."),
    "harness": Verb("harness:app", "List, install and check agents."),
    "db": Verb("admin:db_app", "Inspect, check, prune and archive the database."),
    "doctor": Verb(  # `cli.conformance` adds a command to the group, which is made in `cli.harness`
        "conformance:doctor_app",
        "Show what is installed, what is missing and how to get it. The exit code is 1 if a required part is missing.",
    ),
    "train": Verb("train:app", "Train a policy on rollouts."),
}
"""The verbs in the order of `polar --help`."""


class VerbGroup(TyperGroup):
    """The group of all verbs. Imports a verb when it is used, not when verbs are listed or completed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=verb.help) for name, verb in VERBS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, listed if name is None else make_command(name), rest


def make_command(name: str) -> Any:
    """Import a verb, and return its command."""
    loaded = VERBS[name].load()
    group = typer.Typer(rich_markup_mode="markdown")
    if isinstance(loaded, typer.Typer):
        group.add_typer(loaded, name=name)
    else:
        own_class = VERBS[name].command_class
        group.command(name, cls=_imported(own_class) if own_class else None)(loaded)
    return get_group(group).commands[name]


_EXTRAS = {
    **dict.fromkeys(("llguidance", "torch", "transformers", "tokenizers", "safetensors"), "local"),
    "aiodocker": "docker",
    "asyncpg": "postgres",
    "ray": "ray",
    "peft": "lora",
    "matplotlib": "curves",
    "tensorboard": "tensorboard",
    "opentelemetry": "otel",
}
"""Optional packages, each with the extra of pyproject.toml that installs it."""

app = typer.Typer(
    name="polar",
    cls=VerbGroup,
    help="A flight recorder for coding agents: point an agent at Polar, get token-faithful trajectories.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"polar {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command. An expected error is printed on standard error and determines the exit code."""
    gc.disable()  # importing makes no garbage; `run_async` enables the collector again for commands that take longer
    atexit.register(gc.freeze)  # the interpreter's last collection would take a tenth of the time of a short command
    configure_logging()
    try:
        app()
    except SystemExit:  # the usual end of a command; without this clause, `_expected_errors` would import modules
        raise
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get((error.name or "").partition(".")[0])) is None:
            raise
        _exit_with(UsageError(f"This command needs {error.name}: pip install 'polar-proxy[{extra}]'."))
    except _expected_errors() as error:
        _exit_with(error)


def _exit_with(error: Exception) -> NoReturn:
    from polar_proxy.cli.output import err, styled

    err.print(styled("[bold red]error:[/] "), message_lines(str(error)), sep="", soft_wrap=True)
    sys.exit(getattr(error, "exit_code", 1))


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are printed without a traceback. This function imports modules, so call it only after an
    error."""
    from harness_adapters.base import HarnessError
    from sandboxes.base import SandboxError

    return PolarError, HarnessError, SandboxError
