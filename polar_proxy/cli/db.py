"""`polar db`: the database itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.errors import UsageError
from polar_proxy.store import display_url, normalise_url, upgrade
from polar_proxy.store.archive import ArchiveCounts
from polar_proxy.store.maintenance import PruneResult, VacuumResult
from polar_proxy.store.verify import IntegrityFault
from polar_proxy.store.verify import ProgressCallback as Told
from polar_proxy.types import Json

app = typer.Typer(help="The database: its size and schema, what is old in it, copies of it.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
WhereOption = Annotated[
    str | None, typer.Option(metavar="CONDITIONS", help="Of rollouts, such as 'reward<1, harness=codex'.")
]


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
            return await store.maintenance.stats()

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


@app.command("vacuum")
def vacuum(
    full: Annotated[bool, typer.Option("--full", help="Rewrite the whole file; writers wait for it.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what nothing refers to any more and give the room back. Gateways may go on writing."""
    settings = common.load_settings(db)

    async def work() -> VacuumResult:
        with _progress() as told:
            async with common.writer(settings) as store:
                return await store.maintenance.vacuum(full=full, progress=told)

    done = common.run_async(work())
    if as_json:
        common.print_json(asdict(done))
        return
    say = common.out.print
    say(f"removed {done.nodes} nodes, {done.settings} settings, {done.engines} engines", highlight=False)
    say(f"{done.bytes_before} bytes before, {done.bytes_after} now", highlight=False)
    if done.free_bytes and not full:
        say(
            f"{done.free_bytes} bytes are free within the file; `polar db vacuum --full` gives them back",
            highlight=False,
        )


@app.command("prune")
def prune(
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Such as 30d, 12h or 2w; 0s: all that ended.")],
    where: WhereOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove rollouts and sessions that ended long ago, with all that belongs to them; never one that still runs."""
    settings = common.load_settings(db)
    before = time.time() - parse_age(older_than)

    async def work() -> PruneResult:
        with _progress() as told:
            async with common.writer(settings) as store:
                return await store.maintenance.prune(before, where=where, dry_run=dry_run, progress=told)

    done = common.run_async(work())
    if as_json:
        common.print_json({**asdict(done), "dry_run": dry_run})
        return
    what = f"{len(done.rollouts)} rollouts and {len(done.sessions)} sessions with {done.calls} calls"
    common.out.print(f"would remove {what}" if dry_run else f"removed {what}, {done.files} files", highlight=False)
    if done.calls and not dry_run:
        common.out.print("their room is given back by `polar db vacuum`", highlight=False)


@app.command("verify")
def verify(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Hash every chain again, unpack every cell, count every counter. Exit code 1 when something is wrong."""
    settings = common.load_settings(db)

    async def work() -> list[IntegrityFault]:
        with _progress() as told:
            async with common.reader(settings) as store:
                return await store.maintenance.verify(told)

    faults = common.run_async(work())
    if as_json:
        common.print_json({"faults": [asdict(fault) for fault in faults]})
    else:
        for fault in faults:
            common.out.print(f"{escape(fault.what)}: {escape(fault.problem)}", highlight=False, soft_wrap=True)
        common.out.print(f"{len(faults)} faults" if faults else "everything is as it was stored", highlight=False)
    if faults:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write.")],
    where: WhereOption = None,
    session: Annotated[list[str] | None, typer.Option(help="A session; may be given several times.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a selection (without one: everything) as one archive for `polar db import`. Keys are not in it."""
    settings = common.load_settings(db)

    async def work() -> ArchiveCounts:
        async with common.reader(settings) as store:
            return await store.maintenance.export_archive(
                file, where=where, sessions=session or (), overwrite=overwrite
            )

    _tell(common.run_async(work()), "written", as_json)


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive of `polar db export`.")],
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take in an archive. What is there already stays; where it differs, nothing is imported."""
    settings = common.load_settings(db)

    async def work() -> ArchiveCounts:
        async with common.writer(settings) as store:
            return await store.maintenance.import_archive(file)

    _tell(common.run_async(work()), "new", as_json)


def parse_age(text: str) -> float:
    """`30d` as seconds. Raises UsageError for what is no age."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no age: write a number and one of {', '.join(_UNITS)}, such as 30d")
    return float(match[1]) * _UNITS[match[2]]


def _tell(moved: ArchiveCounts, what: str, as_json: bool) -> None:
    if as_json:
        common.print_json(asdict(moved))
        return
    for table, count in moved.rows.items():
        common.out.print(f"  {table}: {count}", highlight=False)
    known = f", {moved.known} were there already" if moved.known else ""
    common.out.print(f"{sum(moved.rows.values())} rows {what}, {moved.files} files{known}", highlight=False)


@contextmanager
def _progress() -> Iterator[Told]:
    """A bar on standard error for each kind of work, as soon as there is some."""
    bars: dict[str, TaskID] = {}
    with Progress(console=common.err, transient=True) as shown:

        def told(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = shown.add_task(what)
            shown.update(bars[what], completed=done, total=max(total, done))

        yield told
