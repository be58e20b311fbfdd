"""`polar sql`: one read-only statement on the database."""

from __future__ import annotations

import csv
import io
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import load_settings, with_store
from polar_proxy.cli.output import make_table, out, print_json, print_note
from polar_proxy.terminal import escape_controls

if TYPE_CHECKING:
    from polar_proxy.reading.sql import QueryResult
    from polar_proxy.store import Store

_FORMATS = ("table", "csv", "json")


def sql(
    statement: Annotated[str, typer.Argument(help="One SELECT; docs/guide/data.md lists views and functions.")],
    form: Annotated[str, typer.Option("--format", help="table, csv or json (a list of objects).")] = "table",
    limit: Annotated[int, typer.Option(min=1, help="Print at most N rows.")] = 1000,
    timeout: Annotated[float, typer.Option(min=0.1, help="Stop the query after N seconds.")] = 30.0,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Run one read-only SQL statement on the database, with functions that unpack texts and tokens.

    The views `v_messages`, `v_answers` and `v_tokens` exist only in this command, and only on SQLite.
    """
    form = "json" if as_json else form
    options.require_choice("format", form, _FORMATS)

    async def run(store: Store) -> QueryResult:
        from polar_proxy.reading.sql import run_query

        return await run_query(store, statement, limit=limit, seconds=timeout)

    found = with_store(load_settings(db), run)
    rows = [[_readable(value) for value in row] for row in found.rows]
    if form == "json":
        print_json([dict(zip(found.columns, row, strict=True)) for row in rows])
    elif form == "csv":
        _print_csv(found.columns, rows)
    else:
        _print_rows(found.columns, rows)
    if found.more:
        print_note(f"only the first {limit} rows are shown: raise --limit for more")


def _print_rows(columns: list[str], rows: list[list[Any]]) -> None:
    """Print a table; if it is wider than the terminal, print each row by itself with a line for each column."""
    numbers = [name for at, name in enumerate(columns) if _is_number_column(rows, at)]
    table = make_table(columns, rows, right=numbers)
    if table.needed <= out.width:
        out.print(table)
        return
    for number, row in enumerate(rows, 1):
        out.print(make_table((f"row {number}", ""), zip(columns, row, strict=True), wrap=("",)))


def _readable(value: Any) -> Any:
    """Return binary cells in hexadecimal, other values as they are."""
    return value.hex() if isinstance(value, bytes) else value


def _is_number_column(rows: list[list[Any]], at: int) -> bool:
    return any(row[at] is not None for row in rows) and all(isinstance(row[at], int | float | None) for row in rows)


def _print_csv(columns: list[str], rows: list[list[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *rows])
    sys.stdout.write(escape_controls(text.getvalue()))
