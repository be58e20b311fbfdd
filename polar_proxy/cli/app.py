"""The `polar` command. Each verb parses its options, calls the library and prints the result."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape

from polar_proxy import __version__
from polar_proxy.cli import (
    admin,
    conformance,
    db,
    doctor,
    export,
    harness,
    jobs,
    run,
    serve,
    show,
    traces,
    train,
)
from polar_proxy.cli.output import err
from polar_proxy.errors import PolarError
from sandboxes import SandboxError

app = typer.Typer(
    name="polar",
    help="A flight recorder for coding agents: point an agent at Polar, get token-faithful trajectories.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("node")(serve.node)
app.command("submit")(jobs.submit)
app.command("status")(jobs.status)
app.command("results")(jobs.results)
app.command("watch")(jobs.watch)
app.command("events")(jobs.events)
app.command("cancel")(jobs.cancel)
app.command("pause")(jobs.pause)
app.command("resume")(jobs.resume)
app.command("reward")(jobs.reward)
app.command("sessions")(show.sessions)
app.command("show")(show.show)
app.command("export")(export.export)
app.command("build")(traces.build)
app.command("audit")(traces.audit)
app.command("rescore")(traces.rescore)
app.command("conformance")(conformance.conformance)
app.add_typer(admin.session_app, name="session")
app.add_typer(admin.key_app, name="key")
app.add_typer(admin.service_app, name="service")
app.add_typer(harness.app, name="harness")
app.add_typer(db.app, name="db")
app.add_typer(doctor.app, name="doctor")
app.add_typer(train.app, name="train")


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
    """Run the command. An expected error is printed as one line on standard error and sets its exit code."""
    try:
        app()
    except (PolarError, SandboxError) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(getattr(error, "exit_code", 1))
