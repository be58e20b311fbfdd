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

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.errors import UsageError

if TYPE_CHECKING:
    from polar_proxy.export import ExportReport
    from polar_proxy.store import Store

_OF_TRAINERS = ("trl", "verl", "slime", "nemo-rl", "tinker")
"""Records of other trainers (`training/bridges`), made of the rows of tokens-jsonl."""
_PAGE = 500


def export(
    form: Annotated[
        str,
        typer.Option(
            "--format", help=f"jsonl, chat-jsonl, tokens-jsonl; for other trainers: {', '.join(_OF_TRAINERS)}."
        ),
    ] = "jsonl",
    where: Annotated[
        str | None, typer.Option(help="Conditions on rollouts, such as 'reward>=1 and status=done'.")
    ] = None,
    session: Annotated[list[str] | None, typer.Option(help="Just this session (may be repeated).")] = None,
    builder: Annotated[str, typer.Option(help="merged, per_call, tree or rescored.")] = "merged",
    all_grades: Annotated[bool, typer.Option(help="Also traces that are not graded fit for training.")] = False,
    advantage: Annotated[
        str, typer.Option(help="For trl and tinker: how rewards become advantages: grpo, dr_grpo, rloo, mc_grpo, raft.")
    ] = "grpo",
    file: Annotated[str, typer.Option("--out", help="The file to write; - is standard output.")] = "-",
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write recorded runs as JSON lines. What was left out is counted on standard error.

    With --json the counts come as one JSON document on standard output (--out must then be a file).
    """
    from polar_proxy.export import export as write_rows

    if as_json and file == "-":
        raise UsageError("--json reports on standard output, so --out must be a file.")
    settings = common.load_settings(db)
    chosen = ExportOptions(where, tuple(session or ()), builder, all_grades)

    async def work() -> ExportReport:
        async with common.reader(settings) as store:
            with _target(file) as target:
                if form in _OF_TRAINERS:
                    return await _records(store, form, advantage, target, chosen)
                return await write_rows(store, form, target.write, **asdict(chosen))

    report = common.run_async(work())
    if as_json:
        common.print_json({"out": file, "format": form, **report.to_json()})
        return
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(report.left_out.items())) or "nothing"
    common.err.print(
        f"{report.rows} rows from {report.rollouts} rollouts and {report.sessions} other sessions; left out: {left}",
        highlight=False,
    )


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What is exported, as `export.export` takes it."""

    where: str | None
    session_ids: tuple[str, ...]
    builder: str
    all_grades: bool


async def _records(store: Store, form: str, advantage: str, target: BinaryIO, chosen: ExportOptions) -> ExportReport:
    from polar_proxy.export import export as write_rows
    from polar_proxy.export.formats import RecordConverter, with_advantages
    from polar_proxy.training.advantages import ADVANTAGES

    if advantage not in ADVANTAGES:
        raise UsageError(f"There is no advantage {advantage!r}: choose {', '.join(ADVANTAGES)}.")
    if chosen.builder == "tree":
        raise UsageError("The records of other trainers hold whole sequences: choose --builder merged or per_call.")
    rewards = await _rewards(store)
    records = RecordConverter(form)
    report = await write_rows(
        store,
        "tokens-jsonl",
        target.write,
        convert=lambda rows: records(with_advantages(rows, advantage, rewards)),
        **asdict(chosen),
    )
    report.left_out.update(records.left_out)
    return report


async def _rewards(store: Store) -> dict[str, dict[str, float | None]]:
    """Of every rollout of every group, whatever is exported of it: a baseline knows all of its group."""
    found: dict[str, dict[str, float | None]] = {}
    before: str | None = None
    while page := await store.rollouts.find(limit=_PAGE, before=before):
        for row in page:
            found.setdefault(row.group_id, {})[row.rollout_id] = row.reward
        before = page[0].rollout_id
    return found


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
