"""`polar service`: how a server stands; pause, resume and drain, of one server or of all on its database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from polar_proxy.cli import common, connect
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.cli.connect import UrlOption

if TYPE_CHECKING:
    from polar_proxy.api_models import Scope, ServiceState

app = typer.Typer(help="Pause, resume and drain servers.", no_args_is_help=True)
AllOption = Annotated[
    bool, typer.Option("--all", help="All servers on the database. Without --url nothing else can be meant.")
]


@app.command("status")
def status(url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """How the server stands, and all on its database."""
    _told(connect.call(connect.load_settings(url, db), lambda client: client.service()), as_json)


@app.command("pause")
def pause(
    everywhere: AllOption = False,
    seconds: Annotated[float | None, typer.Option("--for", help="Resume by itself after so many seconds.")] = None,
    wait_idle: Annotated[
        float | None, typer.Option(help="Wait so many seconds until nothing is in hand; else nothing stays paused.")
    ] = None,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Begin nothing new of any job; what is in hand goes on."""
    scope = _scope(everywhere)
    state = connect.call(
        connect.load_settings(url, db),
        lambda client: client.pause_service(seconds=seconds, wait_idle=wait_idle, scope=scope),
    )
    _told(state, as_json)


@app.command("resume")
def resume(
    everywhere: AllOption = False, url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False
) -> None:
    """Take work again, after a pause or a drain of the same servers."""
    scope = _scope(everywhere)
    settings = connect.load_settings(url, db)
    _told(connect.call(settings, lambda client: client.resume_service(scope=scope)), as_json)


@app.command("drain")
def drain(
    everywhere: AllOption = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds after which work is taken again.")] = 600.0,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take nothing new, and wait until nothing is in hand."""
    scope = _scope(everywhere)
    settings = connect.load_settings(url, db)
    _told(connect.call(settings, lambda client: client.drain(timeout=timeout, scope=scope)), as_json)


def _scope(everywhere: bool) -> Scope:
    return "all" if everywhere else "server"


def _told(state: ServiceState, as_json: bool) -> None:
    if as_json:
        common.print_json(state.model_dump())
        return
    own = "works on no rollouts" if state.state is None else f"{state.state}, {state.in_flight} rollouts in hand"
    common.out.print(f"this server: {own}", highlight=False)
    common.out.print(f"all servers: {state.fleet.state}, {state.fleet.in_flight} rollouts in hand", highlight=False)
