"""What a person sees while rollouts run: one line a rollout, with its stage, calls, tokens and last command."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import orjson
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from polar_proxy.types import CallRecord, Json

_FINAL = {"done": "green", "failed": "red", "timed_out": "yellow", "cancelled": "yellow"}
_SHOWN = 24


@dataclass(slots=True)
class RolloutProgressLine:
    task: str
    status: str = "queued"
    detail: str = ""
    calls: int = 0
    tokens: int = 0
    command: str = ""
    since: float = field(default_factory=time.monotonic)
    seconds: float = 0.0


class RolloutProgressView:
    """A rollout listener and a call observer that draws a table, or prints a line a stage where nobody watches."""

    def __init__(self, console: Console, *, interactive: bool) -> None:
        self._console = console
        self._interactive = interactive and console.is_terminal
        self._lines: dict[str, RolloutProgressLine] = {}
        self._sessions: dict[str, str] = {}

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        if not self._interactive:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True):
            yield

    def note(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/]", highlight=False)

    def stage(self, rollout_id: str, status: str, detail: str = "") -> None:
        line = self._lines.get(rollout_id)
        if line is None:
            line = self._lines[rollout_id] = RolloutProgressLine(task=detail or rollout_id)
        elif line.status == "queued":
            line.since = time.monotonic()
        line.status = status
        line.seconds = time.monotonic() - line.since
        if status in _FINAL:
            line.detail = detail
        if not self._interactive and status != "queued":
            said = f" ({line.calls} calls, {line.tokens} tokens) {detail}" if status in _FINAL else ""
            self._console.print(f"{line.task} {rollout_id}: {status}{said}", highlight=False, markup=False)

    def session(self, rollout_id: str, session_id: str) -> None:
        self._sessions[session_id] = rollout_id

    def output(self, rollout_id: str, data: bytes) -> None:
        """The agent's own output is kept as an artifact; the table shows its commands instead."""

    def call(self, record: CallRecord) -> None:
        rollout_id = self._sessions.get(record.session_id)
        if rollout_id is None:
            return
        line = self._lines[rollout_id]
        line.calls += 1
        line.tokens += sum(len(choice.token_ids) for choice in record.choices)
        if record.choices:
            line.command = last_command(record.choices[0].message) or line.command

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("task", "stage", "calls", "tokens", "s", "last command"):
            table.add_column(name, justify="right" if name in ("calls", "tokens", "s") else "left", no_wrap=True)
        active = [line for line in self._lines.values() if line.status not in _FINAL and line.status != "queued"]
        for line in active[:_SHOWN]:
            numbers = (str(line.calls), str(line.tokens), f"{time.monotonic() - line.since:.0f}")
            table.add_row(escape(line.task), f"[cyan]{line.status}[/]", *numbers, escape(line.command))
        finished = sum(line.status in _FINAL for line in self._lines.values())
        queued = sum(line.status == "queued" for line in self._lines.values())
        table.caption = f"{finished} finished, {len(active)} active, {queued} queued"
        return table


def last_command(message: Json) -> str:
    """The command of the last tool call of an answer, else its first line of text, in one line."""
    calls = message.get("tool_calls") or []
    if calls:
        arguments = calls[-1]["function"]["arguments"]
        try:
            value = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            value = arguments
        if isinstance(value, dict):
            value = value.get("command") or value.get("cmd") or arguments
        return " ".join(str(value).split())[:120]
    return " ".join(str(message.get("content") or "").split())[:120]
