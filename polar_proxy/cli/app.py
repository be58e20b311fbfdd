"""The `polar` command. Each verb parses its options, calls the library and prints the result."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from harness_adapters.base import HarnessError
from polar_proxy import __version__
from polar_proxy.cli import admin, conformance, connect, harness, rollouts, serve, show, traces, train
from polar_proxy.cli.output import err, styled
from polar_proxy.errors import PolarError
from polar_proxy.terminal import configure_logging, message_lines
from sandboxes.base import SandboxError

app = typer.Typer(
    name="polar",
    help="A flight recorder for coding agents: point an agent at Polar, get token-faithful trajectories.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for verb in (
    *(rollouts.run, serve.serve, serve.node),
    *(rollouts.submit, rollouts.status, rollouts.results, rollouts.watch, rollouts.events, rollouts.cancel),
    *(rollouts.pause, rollouts.resume, rollouts.reward, show.sessions, show.show),
    *(traces.export, traces.build, traces.audit, traces.rescore, conformance.conformance),
):
    app.command(verb.__name__)(verb)
app.command("connect", cls=connect.ConnectCommand)(connect.connect)
for name, group in {
    "session": admin.session_app,
    "key": admin.key_app,
    "service": admin.service_app,
    "harness": harness.app,
    "db": admin.db_app,
    "doctor": harness.doctor_app,
    "train": train.app,
}.items():
    app.add_typer(group, name=name)


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
    configure_logging()
    try:
        app()
    except (PolarError, HarnessError, SandboxError) as error:
        err.print(styled("[bold red]error:[/] "), message_lines(str(error)), sep="", soft_wrap=True)
        sys.exit(getattr(error, "exit_code", 1))
