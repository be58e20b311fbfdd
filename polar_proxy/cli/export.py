"""`polar export`: datasets from the store."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from polar_proxy.cli.common import DbOption, JsonOption, SessionsOption, WhereOption, load_settings, with_store
from polar_proxy.cli.output import err, format_counts, print_json
from polar_proxy.errors import UsageError

if TYPE_CHECKING:
    from polar_proxy.export import ExportReport
    from polar_proxy.store import Store

_TRAINER_FORMATS = ("trl", "verl", "slime", "nemo-rl", "tinker")
"""Formats of other trainers (`export/formats`), converted from the rows of tokens-jsonl."""
_PAGE = 500


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The selection and format of an export; the keyword arguments of `export.export`."""

    where: str | None
    session_ids: tuple[str, ...]
    builder: str
    all_grades: bool


def export(
    form: Annotated[
        str,
        typer.Option(
            "--format", help=f"jsonl, chat-jsonl, tokens-jsonl; for other trainers: {', '.join(_TRAINER_FORMATS)}."
        ),
    ] = "jsonl",
    where: WhereOption = None,
    session: SessionsOption = None,
    builder: Annotated[
        str, typer.Option(help="Export the traces of this builder: merged, per_call, tree or rescored.")
    ] = "merged",
    all_grades: Annotated[bool, typer.Option(help="Also export traces that are graded unfit for training.")] = False,
    advantage: Annotated[
        str, typer.Option(help="For trl and tinker, the advantage: grpo, dr_grpo, rloo, mc_grpo or raft.")
    ] = "grpo",
    file: Annotated[str, typer.Option("--out", help="File to write; - is standard output.")] = "-",
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write recorded runs as JSON lines, and print counts of what was left out to standard error.

    --json prints these counts as one JSON document on standard output; --out must then be a file.
    """
    if as_json and file == "-":
        raise UsageError("--json reports on standard output, so --out must be a file.")
    options = ExportOptions(where, tuple(session or ()), builder, all_grades)

    async def work(store: Store) -> ExportReport:
        from polar_proxy.export import export as write_rows

        with open_output(file) as target:
            if form in _TRAINER_FORMATS:
                return await _export_records(store, form, advantage, target, options)
            return await write_rows(store, form, target.write, **asdict(options))

    report = with_store(load_settings(db), work)
    if as_json:
        print_json({"out": file, "format": form, **report.to_json()})
        return
    left_out = format_counts(report.left_out) if report.left_out else "nothing"
    err.print(
        f"{report.rows} rows from {report.rollouts} rollouts and {report.sessions} other sessions; left out: {left_out}"
    )


async def _export_records(
    store: Store, form: str, advantage: str, target: BinaryIO, options: ExportOptions
) -> ExportReport:
    """Write the records of another trainer."""
    from polar_proxy.export import export as write_rows
    from polar_proxy.export.formats import RecordConverter, with_advantages
    from polar_proxy.training.advantages import ADVANTAGES

    if advantage not in ADVANTAGES:
        raise UsageError(f"There is no advantage {advantage!r}: choose {', '.join(ADVANTAGES)}.")
    if options.builder == "tree":
        raise UsageError("The records of other trainers hold whole sequences: choose --builder merged or per_call.")
    rewards = await _rewards_by_group(store)
    converter = RecordConverter(form)
    report = await write_rows(
        store,
        "tokens-jsonl",
        target.write,
        convert=lambda rows: converter(with_advantages(rows, advantage, rewards)),
        **asdict(options),
    )
    report.left_out.update(converter.left_out)
    return report


async def _rewards_by_group(store: Store) -> dict[str, dict[str, float | None]]:
    """Return the rewards of all rollouts of all groups: a baseline needs its whole group, even if only some rollouts
    are exported."""
    rewards: dict[str, dict[str, float | None]] = {}
    before: str | None = None
    while page := await store.rollouts.find(limit=_PAGE, before=before):
        for row in page:
            rewards.setdefault(row.group_id, {})[row.rollout_id] = row.reward
        before = page[0].rollout_id
    return rewards


@contextlib.contextmanager
def open_output(file: str) -> Iterator[BinaryIO]:
    """Yield standard output, or a file that gets its name only when it is complete."""
    if file == "-":
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the reader (`| head`) ended; Python's own flush at exit must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        return
    path = Path(file).resolve()
    if not file or path.is_dir():
        raise UsageError(f"Cannot write {file!r}: --out is the name of a file.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():  # /dev/null or a named pipe: write to it, never replace it
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
