"""Output of the commands: JSON documents, tables, progress bars and live views."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import typer
from pydantic import BaseModel
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Span, Text

from polar_proxy.terminal import escape_controls, escape_json_controls, message_lines, one_line

if TYPE_CHECKING:
    from polar_proxy.api_models import Event, Job
    from polar_proxy.conformance.preflight import PreflightCheck
    from polar_proxy.types import CallRecord


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

_END_COLOURS = {"done": "green", "failed": "red", "timed_out": "yellow", "cancelled": "yellow"}
_CHECK_COLOURS = {"ok": "green", "note": "cyan", "missing": "yellow", "failed": "red"}
_MAX_LIVE_ROWS = 24
_UNLIMITED = 1_000_000
"""Width, in columns, of output to a file or a pipe, so that nothing is cut there."""


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


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Collection[str] = (), wrap: Collection[str] = ()
) -> Table:
    """Return a table without borders. None is shown as `-`. Cells other than rich `Text` are shown in one line.

    Columns in `right` are aligned to the right; those in `wrap` may wrap. The others are never cut, however narrow the
    terminal is.
    """
    table = Table(box=None, padding=(0, 1), header_style="dim")
    cells = [
        [cell if isinstance(cell, Text) else Text(one_line("-" if cell is None else cell)) for cell in row]
        for row in rows
    ]
    for at, name in enumerate(columns):
        width = max([cell_len(name), *(cell_len(row[at].plain) for row in cells)])
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in wrap,
            min_width=None if name in wrap else width,
            overflow="fold",
        )
    for row in cells:
        table.add_row(*row)
    return table


def format_time(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


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


@contextlib.contextmanager
def _live(table: Callable[[], Table], shown: bool) -> Iterator[Live | None]:
    """Show the table from now on, four times a second, until the block ends."""
    if not shown:
        yield None
        return
    with Live(get_renderable=table, console=err, refresh_per_second=4, transient=True) as live:
        live.refresh()
        yield live


@dataclass(slots=True)
class RolloutProgressLine:
    """The state of one rollout in `RolloutProgressView`."""

    task: str
    number: int
    status: str = "queued"
    calls: int = 0
    tokens: int = 0
    reward: float | None = None
    command: str = ""
    since: float = field(default_factory=time.monotonic)
    until: float | None = None
    """When it ended; None while it has not."""

    @property
    def seconds(self) -> str:
        return f"{(self.until or time.monotonic()) - self.since:.0f}"


class RolloutProgressView:
    """The progress of `polar run` and `polar train`: a live table on a terminal, else one line for each stage of a
    rollout.

    The table shows all rollouts if they fit into it, otherwise only active ones, below the `headline` if there is one.

    It is the rollout service's ProgressReporter and an observer of the gateway's calls.
    """

    def __init__(self, *, quiet: bool, headline: str = "") -> None:
        self.headline = headline
        self._is_live = err.is_terminal and not quiet
        self._lines: dict[str, RolloutProgressLine] = {}
        self._rollout_of: dict[str, str] = {}
        """Rollout id by session id."""

    def show(self) -> contextlib.AbstractContextManager[object]:
        return _live(self._table, self._is_live)

    @property
    def rollout_ids(self) -> list[str]:
        return list(self._lines)

    def stage(self, rollout_id: str, status: str, detail: str = "", reward: float | None = None) -> None:
        line = self._lines.get(rollout_id)
        if line is None:
            line = self._lines[rollout_id] = RolloutProgressLine(detail or rollout_id, len(self._lines) + 1)
        elif status == "queued" and detail:  # a worker was quicker than the announcement, which names the task
            line.task = detail
            return
        elif line.status == "queued":
            line.since = time.monotonic()
        line.status, line.reward = status, reward
        end = ""
        if status in _END_COLOURS:
            line.until = time.monotonic()
            end = f", reward {format_number(reward)} ({line.calls} calls, {line.tokens} tokens) {detail}".rstrip()
        if not self._is_live and status != "queued":
            err.print(one_line(f"{line.task} {rollout_id}: {status}{end}"))

    def session(self, rollout_id: str, session_id: str) -> None:
        self._rollout_of[session_id] = rollout_id

    def call(self, record: CallRecord) -> None:
        """Count a recorded model call."""
        rollout_id = self._rollout_of.get(record.session_id)
        if rollout_id is None:
            return
        line = self._lines[rollout_id]
        line.calls += 1
        line.tokens += sum(len(choice.token_ids) for choice in record.choices)
        if record.choices:
            from polar_proxy.records import last_command

            line.command = last_command(record.choices[0].message) or line.command

    def _table(self) -> Table:
        lines = list(self._lines.values())
        active = [line for line in lines if line.status not in _END_COLOURS and line.status != "queued"]
        rows = (
            (
                one.number,
                one.task,
                Text(one.status, _END_COLOURS.get(one.status, "dim" if one.status == "queued" else "cyan")),
                one.calls,
                one.tokens,
                format_number(one.reward),
                "-" if one.status == "queued" else one.seconds,
                one.command,
            )
            for one in (lines if len(lines) <= _MAX_LIVE_ROWS else active[:_MAX_LIVE_ROWS])
        )
        numbers = ("calls", "tokens", "reward", "s")
        table = make_table(("", "task", "stage", *numbers, "last command"), rows, right=("", *numbers))
        finished = sum(line.status in _END_COLOURS for line in lines)
        queued = sum(line.status == "queued" for line in lines)
        table.caption = f"{finished} finished, {len(active)} active, {queued} queued"
        table.title = Text(one_line(self.headline)) if self.headline else None
        return table


class JobProgressView:
    """The progress of `polar watch`: a live table on a terminal, else one line for each event."""

    def __init__(self, job: Job, *, quiet: bool) -> None:
        self._job = job
        self._quiet = quiet
        self._is_live = err.is_terminal and not quiet
        self._stages: dict[str, str] = {}
        self._since: dict[str, float] = {}

    def show(self) -> contextlib.AbstractContextManager[object]:
        return _live(self._table, self._is_live)

    def update(self, event: Event) -> None:
        data = event.data
        if event.event == "stage":
            self._stages[data["rollout_id"]] = data["to"]
            self._since[data["rollout_id"]] = time.monotonic()
        if self._is_live or self._quiet:
            return
        match event.event:
            case "stage":
                cause = f" ({data['cause']})" if data.get("cause") else ""
                line = f"{data['rollout_id']}: {data['to']}{cause}"
            case "group":
                line = f"{data['group_id']}: {data.get('status')}"
            case "job":
                line = f"{data['job_id']}: {data.get('status')}"
            case _:
                return
        err.print(one_line(line), soft_wrap=True)

    def _table(self) -> Table:
        active = {one: to for one, to in self._stages.items() if to not in _END_COLOURS and to != "queued"}
        rows = (
            (rollout_id, Text(stage, "cyan"), _seconds_since(self._since[rollout_id]))
            for rollout_id, stage in list(active.items())[:_MAX_LIVE_ROWS]
        )
        table = make_table(("rollout", "stage", "s"), rows)
        ends = Counter(to for to in self._stages.values() if to in _END_COLOURS)
        counts = [f"[{colour}]{ends[name]} {name}[/]" for name, colour in _END_COLOURS.items() if ends[name]]
        queued = sum(self._job.rollouts.values()) - len(active) - ends.total()
        table.caption = styled(", ".join([*counts, f"{len(active)} active", f"{queued} queued"]))
        return table


def _seconds_since(start: float) -> str:
    return f"{time.monotonic() - start:.0f}"
