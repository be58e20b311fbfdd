"""The `polar` command. Thin: each verb parses, calls, prints."""

from __future__ import annotations

import sys

import typer
from rich.markup import escape

from polar_proxy import __version__
from polar_proxy.cli import (
    admin,
    audit,
    conformance,
    db,
    doctor,
    export,
    harness,
    jobs,
    node,
    rescore,
    run,
    serve,
    service,
    show,
    traces,
    train,
    watch,
)
from polar_proxy.errors import PolarError
from sandboxes import SandboxError

app = typer.Typer(
    name="polar",
    help="A flight recorder for coding agents: point an agent at Polar, get token-faithful trajectories.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("node")(node.node)
app.command("submit")(jobs.submit)
app.command("status")(jobs.status)
app.command("results")(jobs.results)
app.command("watch")(watch.watch)
app.command("events")(watch.events)
app.command("cancel")(jobs.cancel)
app.command("pause")(jobs.pause)
app.command("resume")(jobs.resume)
app.command("reward")(jobs.reward)
app.command("sessions")(show.sessions)
app.command("show")(show.show)
app.command("export")(export.export)
app.command("build")(traces.build)
app.command("audit")(audit.audit)
app.command("rescore")(rescore.rescore)
app.command("conformance")(conformance.conformance)
app.add_typer(serve.session_app, name="session")
app.add_typer(admin.app, name="key")
app.add_typer(service.app, name="service")
app.add_typer(harness.app, name="harness")
app.add_typer(db.app, name="db")
app.add_typer(doctor.app, name="doctor")
app.add_typer(train.app, name="train")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"polar {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """Entry point: a PolarError becomes one clear line on standard error and its exit code."""
    try:
        app()
    except (PolarError, SandboxError) as error:
        from polar_proxy.cli.common import err

        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, markup=True, soft_wrap=True)
        sys.exit(getattr(error, "exit_code", 1))
