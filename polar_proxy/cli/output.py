"""Output of the commands: JSON documents, tables and progress bars. Larger output is in `views`."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
import typer
from pydantic import BaseModel
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Span, Text

from polar_proxy.terminal import escape_controls, escape_json_controls, message_lines, one_line

if TYPE_CHECKING:
    from polar_proxy.conformance.preflight import PreflightCheck


class SafeConsole(Console):
    """A console that shows control characters in text as escapes such as `\\x1b`, and reads no markup in strings.

    Only `styled` adds styles, so that `[link=...]` in a text from outside is printed as it is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    @property
    def size(self) -> ConsoleDimensions:
        """Return the terminal's size. Output to a file or a pipe has no width limit, so that nothing is cut there."""
        size = super().size
        return size if self.is_terminal else ConsoleDimensions(_UNLIMITED, size.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
        """Print objects. Lines that are wider than the terminal wrap there instead of being cut."""
        super().print(*objects, crop=crop, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)


def styled(template: str, *values: object) -> Text:
    """Return a text with the markup of `template`. Each `{}` in it becomes a value, literally and in one line."""
    text = Text.from_markup(template, emoji=False)
    holes = [found.start() for found in re.finditer(r"\{\}", text.plain)]
    parts = text.divide([edge for at in holes for edge in (at, at + 2)])
    for part, value in zip(parts[1::2], values, strict=True):
        part.plain = one_line(value)
        part.spans = [Span(0, len(part), span.style) for span in part.spans]
    return Text().join(parts)


out = SafeConsole()
err = SafeConsole(stderr=True)

_CHECK_COLOURS = {"ok": "green", "note": "cyan", "missing": "yellow", "failed": "red"}
_UNLIMITED = 1_000_000
"""Width, in columns, of output to a file or a pipe, so that nothing is cut there."""
_LEAST_WRAPPED = 8
"""Width to which a column that wraps may shrink in a narrow terminal."""


def print_result(
    result: object, shown: str | Text | Table | Callable[[], object], as_json: bool, *, good: bool = True
) -> None:
    """End a command: with `as_json` print `result` as one JSON document, else `shown`. Exit code: 0 if `good`, else 1.

    `shown` is text, a table, or a function that prints.
    """
    if as_json:
        print_json(result)
    elif callable(shown):
        shown()
    else:
        out.print(shown, soft_wrap=not isinstance(shown, Table))
    if not good:
        raise typer.Exit(1)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output. It may contain dataclasses and pydantic models."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    document = orjson.dumps(value, default=_to_json, option=options).decode()
    sys.stdout.write(escape_json_controls(document) + "\n")
    sys.stdout.flush()


def _to_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value)


def print_note(text: str) -> None:
    """Print a line for people on standard error."""
    err.print(Text(message_lines(text), "dim"), soft_wrap=True)


def print_refused_task(text: str) -> None:
    err.print(styled("[yellow]refused[/] {}", text), soft_wrap=True)


def print_checks(checks: Iterable[PreflightCheck]) -> None:
    """Print the checks of `polar doctor` or `polar harness check`, each problem with its remedy."""
    for check in checks:
        colour = _CHECK_COLOURS[check.state]
        out.print(styled(f"[{colour}]{check.state:<7}[/] {{}}: {{}}", check.name, check.detail), soft_wrap=True)
        if check.fix and check.state not in ("ok", "note"):
            out.print(styled("          -> {}", check.fix), soft_wrap=True)


class WholeTable(Table):
    """A table that is at least `needed` characters wide, even in a narrower terminal. Without this minimum, rich would
    drop the narrowest columns to make the table fit."""

    needed = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return super().__rich_console__(console, options.update_width(max(options.max_width, self.needed)))


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    wrap: Collection[str] = (),
    optional: Collection[str] = (),
) -> WholeTable:
    """Return a table without borders. None is shown as `-`. Cells other than rich `Text` are shown in one line.

    Columns in `right` are aligned to the right. In a narrow terminal, columns in `wrap` are wrapped; all other
    columns keep their full width. Columns in `optional` are left out if no row has a value.
    """
    table = WholeTable(box=None, padding=(0, 1), header_style="dim")
    cells = [
        [cell if isinstance(cell, Text) else Text(one_line("-" if cell is None else cell)) for cell in row]
        for row in rows
    ]
    shown = [
        at for at, name in enumerate(columns) if name not in optional or any(row[at].plain != "-" for row in cells)
    ]
    for at in shown:
        name = columns[at]
        width = max([cell_len(name), *(cell_len(row[at].plain) for row in cells)])
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in wrap,
            min_width=None if name in wrap else width,
            overflow="fold",
        )
        table.needed += 2 + (min(width, _LEAST_WRAPPED) if name in wrap else width)
    for row in cells:
        table.add_row(*(row[at] for at in shown))
    return table


def format_time(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def format_seconds(seconds: float | None) -> str:
    """Return a duration such as `4.2 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_price(price: float | None) -> str:
    return "-" if price is None else f"{price:.4f}"


def format_number(value: float | None, form: str = "g") -> str:
    return "-" if value is None else f"{value:{form}}"


def format_counts(counts: Mapping[str, int]) -> str:
    """Return text such as `2 done, 1 failed`, or `-` for no counts."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "-"


# Progress


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """Yield `update(kind of work, done, total, note="")`; each kind of work gets a bar at its first update."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    bars: dict[str, TaskID] = {}
    name, end = (TextColumn(field, markup=False) for field in ("{task.description}", "{task.fields[note]}"))
    columns = (name, BarColumn(), MofNCompleteColumn(), end)
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal) as progress:

        def update(kind: str, done: int, total: int, note: str = "") -> None:
            if kind not in bars:
                bars[kind] = progress.add_task(one_line(kind), note="")
            progress.update(bars[kind], completed=done, total=max(total, done), note=one_line(note))

        yield update


@contextlib.contextmanager
def spinner(text: str, *, quiet: bool) -> Iterator[None]:
    """Show that the work in this block may take minutes: by a spinner on a terminal, else by one line."""
    if quiet or not err.is_terminal:
        print_note(f"{text} (once; a minute or two)")
        yield
        return
    with err.status(one_line(text)):
        yield
