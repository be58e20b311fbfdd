"""`polar db`: the database itself."""

from __future__ import annotations

import typer
from rich.markup import escape

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.store import display_url, normalise_url, upgrade
from polar_proxy.types import Json

app = typer.Typer(help="The database: where it is, its size, its schema.", no_args_is_help=True)


@app.command("path")
def path(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Say which database is used."""
    url = display_url(normalise_url(common.database_url(common.load_settings(db))))
    if as_json:
        common.print_json({"db": url})
    else:
        typer.echo(url)


@app.command("upgrade")
def upgrade_command(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Make the database, or bring it to this version's schema."""
    url = common.database_url(common.load_settings(db))
    revision = common.run_async(upgrade(url))
    if as_json:
        common.print_json({"db": display_url(normalise_url(url)), "revision": revision})
    else:
        typer.echo(f"schema revision {revision}")


@app.command("stats")
def stats(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Rows, bytes and tokens."""
    settings = common.load_settings(db)

    async def work() -> Json:
        async with common.reader(settings) as store:
            return await store.stats()

    found = common.run_async(work())
    if as_json:
        common.print_json(found)
        return
    for name, value in found.items():
        if isinstance(value, dict):
            common.out.print(f"[bold]{escape(name)}[/]")
            for key, number in value.items():
                common.out.print(f"  {key}: {number}", highlight=False)
        else:
            common.out.print(f"{name}: {value}", highlight=False)
