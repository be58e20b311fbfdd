"""`polar db`: the schema and size of the database, removal of old data, and archives."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from polar_proxy.cli import options
from polar_proxy.cli.common import database_url, load_settings, run_async, with_store
from polar_proxy.cli.output import print_result, progress_bars
from polar_proxy.errors import UsageError

if TYPE_CHECKING:
    from polar_proxy.store.maintenance.archive import ArchiveCounts

app = typer.Typer(help="Inspect, check, prune and archive the database.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@app.command("path")
def print_path(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Print which database is used."""
    from polar_proxy.store import display_url, normalise_url

    url = display_url(normalise_url(database_url(load_settings(db))))
    print_result({"db": url}, escape(url), as_json)


@app.command("upgrade")
def upgrade_schema(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Create the database, or upgrade it to this version's schema."""
    from polar_proxy.store import display_url, normalise_url, upgrade

    url = database_url(load_settings(db))
    revision = run_async(upgrade(url))
    found = {"db": display_url(normalise_url(url)), "revision": revision}
    print_result(found, f"schema revision {revision}", as_json)


@app.command("stats")
def print_stats(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Count rows, bytes and tokens."""
    stats = with_store(load_settings(db), lambda store: store.maintenance.stats())
    lines = []
    for name, value in stats.items():
        if isinstance(value, dict):
            lines += [f"[bold]{escape(name)}[/]", *(f"  {key}: {number}" for key, number in value.items())]
        else:
            lines.append(f"{name}: {value}")
    print_result(stats, "\n".join(lines), as_json)


@app.command("vacuum")
def vacuum(
    full: Annotated[bool, typer.Option("--full", help="Rewrite the whole file. Writers wait meanwhile.")] = False,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Remove rows that nothing refers to, and free their space. Gateways may keep writing."""
    with progress_bars() as update:
        done = with_store(
            load_settings(db), lambda store: store.maintenance.vacuum(full=full, progress=update), create=True
        )
    lines = [
        f"removed {done.nodes} nodes, {done.settings} settings, {done.engines} engines",
        f"{done.bytes_before} bytes before, {done.bytes_after} now",
    ]
    if done.free_bytes and not full:
        lines.append(f"{done.free_bytes} bytes are free within the file; `polar db vacuum --full` releases them")
    print_result(done, "\n".join(lines), as_json)


@app.command("prune")
def prune(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Such as 30d, 12h or 2w; 0s: everything that has ended.")
    ],
    where: options.Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Remove rollouts and sessions that ended long ago, with everything that belongs to them."""
    before = time.time() - parse_age(older_than)
    with progress_bars() as update:
        done = with_store(
            load_settings(db),
            lambda store: store.maintenance.prune(before, where=where, dry_run=dry_run, progress=update),
            create=True,
        )
    what = f"{len(done.rollouts)} rollouts and {len(done.sessions)} sessions with {done.calls} calls"
    text = f"would remove {what}" if dry_run else f"removed {what}, {done.files} files"
    if done.calls and not dry_run:
        text += "\n`polar db vacuum` frees their space"
    print_result({**asdict(done), "dry_run": dry_run}, text, as_json)


@app.command("verify")
def verify(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Check all stored hashes, cells and counters. The exit code is 1 if something is wrong."""
    with progress_bars() as update:
        faults = with_store(load_settings(db), lambda store: store.maintenance.verify(update))
    lines = [f"{fault.what}: {fault.problem}" for fault in faults]
    lines.append(f"{len(faults)} faults" if faults else "no faults found")
    print_result({"faults": faults}, escape("\n".join(lines)), as_json, good=not faults)


@app.command("export")
def export_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write.")],
    where: options.Where = None,
    session: options.Sessions = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the selected data, by default everything, to one archive for `polar db import`. Keys are left out."""
    counts = with_store(
        load_settings(db),
        lambda store: store.archive.export_archive(file, where=where, sessions=session or (), overwrite=overwrite),
    )
    _print_counts(counts, "written", as_json)


@app.command("import")
def import_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive of `polar db export`.")],
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Import an archive. Data that is already there stays; if it differs from the archive, nothing is imported."""
    counts = with_store(load_settings(db), lambda store: store.archive.import_archive(file), create=True)
    _print_counts(counts, "new", as_json)


def parse_age(text: str) -> float:
    """Return an age such as `30d` in seconds. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an age: write a number and one of {', '.join(_UNITS)}, such as 30d.")
    return float(match[1]) * _UNITS[match[2]]


def _print_counts(counts: ArchiveCounts, what: str, as_json: bool) -> None:
    lines = [f"  {table}: {count}" for table, count in counts.rows.items()]
    known = f", {counts.known} were already there" if counts.known else ""
    lines.append(f"{sum(counts.rows.values())} rows {what}, {counts.files} files{known}")
    print_result(counts, "\n".join(lines), as_json)
