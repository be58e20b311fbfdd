"""The progress of `polar run`, `polar watch` and training: a live table on a terminal, else one line per event."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from polar_proxy.cli.output import err, format_number, format_seconds, make_table, print_note, styled
from polar_proxy.terminal import one_line

if TYPE_CHECKING:
    from polar_proxy.api_models import Event, Rollout, RolloutDetail
    from polar_proxy.types import CallRecord

END_COLOURS = {"done": "green", "failed": "red", "timed_out": "yellow", "cancelled": "yellow"}
_NOT_ACTIVE = {*END_COLOURS, "queued"}
_MAX_LIVE_ROWS = 24
_NEWEST_ENDS = 8
"""Maximum number of ended rollouts in the view. Rollouts that ended earlier are dropped from it."""


@contextlib.contextmanager
def live_view(view: Callable[[], RenderableType], shown: bool) -> Iterator[None]:
    """If `shown`, show what `view` returns, four times a second, until the block ends."""
    if not shown:
        yield
        return
    with Live(get_renderable=view, console=err, refresh_per_second=4, transient=True) as live:
        live.refresh()
        yield


def stage_text(stage: str) -> Text:
    return Text(stage, END_COLOURS.get(stage, "dim" if stage == "queued" else "cyan"))


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
    """Time of the monotonic clock at which the rollout ended; None before that."""

    @property
    def seconds(self) -> str:
        return f"{(self.until or time.monotonic()) - self.since:.0f}"


class RolloutProgressView:
    """The rollouts of this process: a live table on a terminal, else one line for each stage of a rollout.

    The table shows all rollouts if they fit into it, otherwise only active ones.

    The view is the rollout service's ProgressReporter and an observer of the gateway's calls.
    """

    def __init__(self, *, quiet: bool, prints: bool = True) -> None:
        """`quiet`: show no live table. `prints`: without a live table, print a line for each stage."""
        self.is_live = err.is_terminal and not quiet
        self._prints = prints and not self.is_live
        self._lines: dict[str, RolloutProgressLine] = {}
        self._rollout_of: dict[str, str] = {}
        """Rollout id by session id."""
        self._preparing = ""
        self._preparing_since = time.monotonic()

    def show(self) -> contextlib.AbstractContextManager[object]:
        return live_view(self.table, self.is_live)

    @property
    def rollout_ids(self) -> list[str]:
        return list(self._lines)

    def forget_ended(self) -> None:
        """Drop the rollouts that have ended, because a new step of training begins."""
        ended = [name for name, line in self._lines.items() if line.until is not None]
        for name in ended:
            del self._lines[name]

    def note(self, text: str) -> None:
        """Print a line. Until the first rollout exists, the live view also shows the newest line and its age."""
        print_note(text)
        self._preparing, self._preparing_since = text, time.monotonic()

    def stage(self, rollout_id: str, status: str, detail: str = "", reward: float | None = None) -> None:
        line = self._lines.get(rollout_id)
        if line is None:
            line = self._lines[rollout_id] = RolloutProgressLine(detail or rollout_id, len(self._lines) + 1)
        elif status == "queued" and detail:  # this event names the task, and came after a worker's first event
            line.task = detail
            return
        elif line.status == "queued":
            line.since = time.monotonic()
        line.status, line.reward = status, reward
        end = ""
        if status in END_COLOURS:
            line.until = time.monotonic()
            end = f", reward {format_number(reward)} ({line.calls} calls, {line.tokens} tokens) {detail}".rstrip()
        if self._prints and status != "queued":
            err.print(one_line(f"{line.task} {rollout_id}: {status}{end}"))

    def session(self, rollout_id: str, session_id: str) -> None:
        self._rollout_of[session_id] = rollout_id

    def call(self, record: CallRecord) -> None:
        """Count a recorded model call."""
        line = self._lines.get(self._rollout_of.get(record.session_id, ""))
        if line is None:
            return
        line.calls += 1
        line.tokens += sum(len(choice.token_ids) for choice in record.choices)
        if record.choices:
            from polar_proxy.records.story import last_command

            line.command = last_command(record.choices[0].message) or line.command

    def table(self) -> RenderableType:
        if not self._lines and self._preparing:
            return Text(one_line(f"{self._preparing}: {time.monotonic() - self._preparing_since:.0f} s"), "dim")
        lines = list(self._lines.values())
        active = [line for line in lines if line.status not in _NOT_ACTIVE]
        rows = (
            (
                one.number,
                one.task,
                stage_text(one.status),
                one.calls,
                one.tokens,
                format_number(one.reward),
                "-" if one.status == "queued" else one.seconds,
                Text(one_line(one.command), no_wrap=True, overflow="ellipsis"),
            )
            for one in (lines if len(lines) <= _MAX_LIVE_ROWS else active[:_MAX_LIVE_ROWS])
        )
        numbers = ("calls", "tokens", "reward", "s")
        columns = ("", "task", "stage", *numbers, "last command")
        table = make_table(columns, rows, right=("", *numbers), wrap=("last command",))
        finished = sum(line.status in END_COLOURS for line in lines)
        queued = sum(line.status == "queued" for line in lines)
        table.caption = f"{finished} finished, {len(active)} active, {queued} queued"
        return table


@dataclass(slots=True)
class WatchedRollout:
    """A rollout of a watched job. `since`: when its stage began. `started`: when the attempt began. Both in seconds
    since the epoch."""

    stage: str
    task: str
    since: float
    started: float | None = None
    ended: float | None = None
    reward: float | None = None


class JobProgressView:
    """The progress of `polar watch`: a live view on a terminal, else a line for each event, with the event's time."""

    def __init__(self, rollouts: Sequence[Rollout], *, quiet: bool) -> None:
        self._quiet = quiet
        self._is_live = err.is_terminal and not quiet
        self._began = time.time()
        self._rollouts = {one.rollout_id: WatchedRollout("queued", one.task_id, one.created_at) for one in rollouts}
        self._newest: deque[str] = deque(maxlen=_NEWEST_ENDS)

    def show(self) -> contextlib.AbstractContextManager[object]:
        return live_view(self._view, self._is_live)

    def has_ended(self, event: Event) -> bool:
        """Return whether the event is the end of a rollout. `update` then needs the rollout, for its reward and
        stages."""
        return event.event == "stage" and event.data["to"] in END_COLOURS

    def update(self, event: Event, ended: RolloutDetail | None = None) -> None:
        """Show an event. `ended`: the rollout, if the event is its end."""
        data = event.data
        at = float(data.get("at") or time.time())
        if event.event == "stage":
            self._update_rollout(data["rollout_id"], data["to"], at, ended)
        if self._is_live or self._quiet:
            return
        match event.event:
            case "stage":
                cause = f" ({data['cause']})" if data.get("cause") else ""
                line = f"{data['rollout_id']}: {data['to']}{cause}{'' if ended is None else _end_of(ended)}"
            case "group":
                line = f"{data['group_id']}: {data.get('status')}"
            case "job":
                line = f"{data['job_id']}: {data.get('status')}"
            case _:
                return
        err.print(one_line(f"{time.strftime('%H:%M:%S', time.localtime(at))} {line}"), soft_wrap=True)

    def _update_rollout(self, rollout_id: str, stage: str, at: float, ended: RolloutDetail | None) -> None:
        one = self._rollouts.setdefault(rollout_id, WatchedRollout("queued", "-", at))
        one.stage, one.since = stage, at
        if stage == "queued":  # another attempt follows
            one.started = None
        elif one.started is None:
            one.started = at
        if stage in END_COLOURS:
            one.ended, one.reward = at, None if ended is None else ended.reward
            self._newest.append(rollout_id)

    def _view(self) -> RenderableType:
        now = time.time()
        active = [name for name, one in self._rollouts.items() if one.stage not in _NOT_ACTIVE]
        rows = []
        for name in [*active[:_MAX_LIVE_ROWS], *reversed(self._newest)]:
            one = self._rollouts[name]
            stop = one.ended or now
            in_stage = "" if one.ended else f"{now - one.since:.0f}"
            total = "-" if one.started is None else f"{stop - one.started:.0f}"
            rows.append((name, one.task, stage_text(one.stage), in_stage, total, format_number(one.reward)))
        table = make_table(("rollout", "task", "stage", "s", "total", "reward"), rows, right=("s", "total", "reward"))
        return Group(table, self._summary(len(active), now))

    def _summary(self, active: int, now: float) -> Text:
        ends = Counter(one.stage for one in self._rollouts.values() if one.stage in END_COLOURS)
        counts = [f"[{colour}]{ends[name]} {name}[/]" for name, colour in END_COLOURS.items() if ends[name]]
        left = len(self._rollouts) - ends.total()
        rewards = [one.reward for one in self._rollouts.values() if one.reward is not None]
        text = ", ".join([*counts, f"{active} active", f"{left - active} queued"])
        if rewards:
            text += f"; mean reward {sum(rewards) / len(rewards):.2f}"
        seen = sum(one.ended is not None and one.ended >= self._began for one in self._rollouts.values())
        if left and seen:
            text += f"; about {format_seconds((now - self._began) / seen * left)} left"
        return styled(text)


def _end_of(rollout: RolloutDetail) -> str:
    """Return the reward of a rollout that has ended, its number of calls, and the seconds of each stage."""
    stages = ", ".join(
        f"{stage.stage} {stage.ended_at - stage.started_at:.1f} s"
        for stage in rollout.stages
        if stage.attempt == rollout.attempt and stage.ended_at is not None
    )
    return f", reward {format_number(rollout.reward)}, {rollout.calls} calls ({stages})"
