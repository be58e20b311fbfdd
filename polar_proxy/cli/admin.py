"""`polar key`: keys of the HTTP API."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.errors import UsageError
from polar_proxy.store.api_keys import ApiKeyRow

app = typer.Typer(help="Keys of the HTTP API.", no_args_is_help=True)


@app.command("new")
def new(
    role: Annotated[str, typer.Option(help="admin (everything) or trainer (reads, the feed, rewards, pauses).")],
    label: Annotated[str | None, typer.Option(help="A name to find it by.")] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it. It is shown once and stored only as a hash."""
    settings = common.load_settings(db)
    if role not in ("admin", "trainer"):
        raise UsageError(f"--role is admin or trainer, not {role!r}.")

    async def make() -> tuple[ApiKeyRow, str]:
        from polar_proxy.api import new_api_key
        from polar_proxy.sessions import hash_key

        key = new_api_key("admin" if role == "admin" else "trainer")
        async with common.writer(settings) as store:
            return await store.api_keys.add(hash_key(key), "admin" if role == "admin" else "trainer", label), key

    row, key = common.run_async(make())
    if as_json:
        common.print_json({**asdict(row), "key": key})
    else:
        common.err.print(f"[dim]{row.role} key {row.name}:[/]", highlight=False)
        typer.echo(key)


@app.command("list")
def list_keys(db: DbOption = None, as_json: JsonOption = False) -> None:
    """All keys, revoked ones included. The keys themselves are not kept."""
    settings = common.load_settings(db)

    async def look() -> list[ApiKeyRow]:
        async with common.reader(settings) as store:
            return await store.api_keys.all()

    rows = common.run_async(look())
    if as_json:
        common.print_json({"keys": [asdict(row) for row in rows]})
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("key", "role", "made", "revoked", "label"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(row.name, row.role, _when(row.created_at), _when(row.revoked_at), row.label or "")
    common.out.print(table)


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="As `polar key list` names it.")],
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let this key in no more, from now on."""
    settings = common.load_settings(db)

    async def end() -> ApiKeyRow:
        async with common.writer(settings) as store:
            return await store.api_keys.revoke(name)

    row = common.run_async(end())
    if as_json:
        common.print_json(asdict(row))
    else:
        common.err.print(f"[dim]{row.role} key {row.name} is revoked[/]", highlight=False)


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
