"""`polar export`: datasets from the store."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.errors import UsageError


def export(
    form: Annotated[str, typer.Option("--format", help="jsonl, chat-jsonl or tokens-jsonl.")] = "jsonl",
    where: Annotated[
        str | None, typer.Option(help="Conditions on rollouts, such as 'reward>=1 and status=done'.")
    ] = None,
    session: Annotated[list[str] | None, typer.Option(help="Just this session (may be repeated).")] = None,
    builder: Annotated[str, typer.Option(help="merged, per_call, tree or rescored.")] = "merged",
    all_grades: Annotated[bool, typer.Option(help="Also traces that are not graded fit for training.")] = False,
    file: Annotated[str, typer.Option("--out", help="The file to write; - is standard output.")] = "-",
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write recorded runs as JSON lines. What was left out is counted on standard error.

    With --json the counts come as one JSON document on standard output (--out must then be a file).
    """
    from polar_proxy.export import Report
    from polar_proxy.export import export as write_rows

    if as_json and file == "-":
        raise UsageError("--json reports on standard output, so --out must be a file.")
    settings = common.load_settings(db)

    async def work() -> Report:
        async with common.reader(settings) as store:
            with _target(file) as target:
                return await write_rows(
                    store,
                    form,
                    target.write,
                    where=where,
                    session_ids=session or (),
                    builder=builder,
                    all_grades=all_grades,
                )

    report = common.run_async(work())
    if as_json:
        common.print_json({"out": file, "format": form, **report.to_json()})
        return
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(report.left_out.items())) or "nothing"
    common.err.print(
        f"{report.rows} rows from {report.rollouts} rollouts and {report.sessions} other sessions; left out: {left}",
        highlight=False,
    )


@contextlib.contextmanager
def _target(file: str) -> Iterator[BinaryIO]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if file == "-":
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the reader (`| head`) has enough; Python's own flush at exit must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        return
    path = Path(file).resolve()
    if not file or path.is_dir():
        raise UsageError(f"Cannot write {file!r}: --out takes the name of a file.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():  # /dev/null, a named pipe: written to, never replaced
            with path.open("wb") as target:
                yield target
            return
        with partial.open("wb") as target:
            yield target
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"Cannot write {file}: {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)
