"""`polar db`: the schema and size of the database, removal of old data, and archives."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from polar_proxy.cli.common import (
    DbOption,
    JsonOption,
    SessionsOption,
    WhereOption,
    database_url,
    load_settings,
    run_async,
    with_store,
)
from polar_proxy.cli.output import out, print_json, progress_bars
from polar_proxy.errors import UsageError

if TYPE_CHECKING:
    from polar_proxy.store.maintenance.archive import ArchiveCounts

app = typer.Typer(help="Inspect, check, prune and archive the database.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@app.command("path")
def print_path(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Print which database is used."""
    from polar_proxy.store import display_url, normalise_url

    url = display_url(normalise_url(database_url(load_settings(db))))
    if as_json:
        print_json({"db": url})
    else:
        typer.echo(url)


@app.command("upgrade")
def upgrade_schema(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Create the database, or upgrade it to this version's schema."""
    from polar_proxy.store import display_url, normalise_url, upgrade

    url = database_url(load_settings(db))
    revision = run_async(upgrade(url))
    if as_json:
        print_json({"db": display_url(normalise_url(url)), "revision": revision})
    else:
        typer.echo(f"schema revision {revision}")


@app.command("stats")
def print_stats(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Count rows, bytes and tokens."""
    stats = with_store(load_settings(db), lambda store: store.maintenance.stats())
    if as_json:
        print_json(stats)
        return
    for name, value in stats.items():
        if isinstance(value, dict):
            out.print(f"[bold]{escape(name)}[/]")
            for key, number in value.items():
                out.print(f"  {key}: {number}")
        else:
            out.print(f"{name}: {value}")


@app.command("vacuum")
def vacuum(
    full: Annotated[bool, typer.Option("--full", help="Rewrite the whole file. Writers wait meanwhile.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove rows that nothing refers to, and free their space. Gateways may keep writing."""
    with progress_bars() as update:
        done = with_store(
            load_settings(db), lambda store: store.maintenance.vacuum(full=full, progress=update), create=True
        )
    if as_json:
        print_json(asdict(done))
        return
    out.print(f"removed {done.nodes} nodes, {done.settings} settings, {done.engines} engines")
    out.print(f"{done.bytes_before} bytes before, {done.bytes_after} now")
    if done.free_bytes and not full:
        out.print(f"{done.free_bytes} bytes are free within the file; `polar db vacuum --full` releases them")


@app.command("prune")
def prune(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Such as 30d, 12h or 2w; 0s: everything that has ended.")
    ],
    where: WhereOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove rollouts and sessions that ended long ago, with everything that belongs to them."""
    before = time.time() - parse_age(older_than)
    with progress_bars() as update:
        done = with_store(
            load_settings(db),
            lambda store: store.maintenance.prune(before, where=where, dry_run=dry_run, progress=update),
            create=True,
        )
    if as_json:
        print_json({**asdict(done), "dry_run": dry_run})
        return
    what = f"{len(done.rollouts)} rollouts and {len(done.sessions)} sessions with {done.calls} calls"
    out.print(f"would remove {what}" if dry_run else f"removed {what}, {done.files} files")
    if done.calls and not dry_run:
        out.print("`polar db vacuum` frees their space")


@app.command("verify")
def verify(db: DbOption = None, as_json: JsonOption = False) -> None:
    """Check all stored hashes, cells and counters. The exit code is 1 if something is wrong."""
    with progress_bars() as update:
        faults = with_store(load_settings(db), lambda store: store.maintenance.verify(update))
    if as_json:
        print_json({"faults": [asdict(fault) for fault in faults]})
    else:
        for fault in faults:
            out.print(f"{escape(fault.what)}: {escape(fault.problem)}", soft_wrap=True)
        out.print(f"{len(faults)} faults" if faults else "no faults found")
    if faults:
        raise typer.Exit(1)


@app.command("export")
def export_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write.")],
    where: WhereOption = None,
    session: SessionsOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the selected data, by default everything, to one archive for `polar db import`. Keys are left out."""
    counts = with_store(
        load_settings(db),
        lambda store: store.maintenance.export_archive(file, where=where, sessions=session or (), overwrite=overwrite),
    )
    _print_counts(counts, "written", as_json)


@app.command("import")
def import_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive of `polar db export`.")],
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import an archive. Data that is already there stays; if it differs from the archive, nothing is imported."""
    counts = with_store(load_settings(db), lambda store: store.maintenance.import_archive(file), create=True)
    _print_counts(counts, "new", as_json)


def parse_age(text: str) -> float:
    """Return an age such as `30d` in seconds. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an age: write a number and one of {', '.join(_UNITS)}, such as 30d.")
    return float(match[1]) * _UNITS[match[2]]


def _print_counts(counts: ArchiveCounts, what: str, as_json: bool) -> None:
    if as_json:
        print_json(asdict(counts))
        return
    for table, count in counts.rows.items():
        out.print(f"  {table}: {count}")
    known = f", {counts.known} were already there" if counts.known else ""
    out.print(f"{sum(counts.rows.values())} rows {what}, {counts.files} files{known}")
