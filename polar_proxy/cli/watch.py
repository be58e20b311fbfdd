"""`polar watch` and `polar events`: what happens to a job, as it happens."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.live import Live
from rich.table import Table

from polar_proxy.cli import common, connect
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.cli.connect import UrlOption
from polar_proxy.cli.jobs import JobArgument, job_json

if TYPE_CHECKING:
    from polar_proxy.api_models import Event, Job, JobDetail
    from polar_proxy.client import AsyncClient

_FINAL = {"done": "green", "failed": "red", "timed_out": "yellow", "cancelled": "yellow"}
_SHOWN = 24


def watch(job: JobArgument, url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Follow a job until it has ended. Exit code 0: it is done, whatever the rewards; 1: it was cancelled.

    A server that is started again meanwhile is waited for. Ctrl-C stops watching, not the job.
    """
    settings = connect.load_settings(url, db)

    async def follow(client: AsyncClient) -> JobDetail:
        found = await client.job(job)
        view = JobProgressView(found)
        # From the beginning: what was before is drawn at once, and nothing falls between two questions.
        with view.shown(quiet=as_json):
            async for event in client.events(job):
                if not as_json:
                    view.happened(event)
        return await client.job(job)

    ended = connect.call(settings, follow, patient=True)
    if as_json:
        common.print_json({**job_json(ended), "groups": [group.model_dump() for group in ended.group_list]})
    else:
        stands = ", ".join(f"{count} {name}" for name, count in sorted(ended.rollouts.items()))
        common.out.print(f"{ended.job_id} is {ended.status}: {stands}", highlight=False, markup=False)
    if ended.status != "done":
        raise typer.Exit(1)


def events(
    job: Annotated[str | None, typer.Argument(help="Of this job, until it has ended. Default: all, for ever.")] = None,
    after: Annotated[str | None, typer.Option(help="Go on behind this event, by its id.")] = None,
    url: UrlOption = None,
    db: DbOption = None,
) -> None:
    """Print what happens, one JSON object a line."""
    settings = connect.load_settings(url, db)

    async def follow(client: AsyncClient) -> None:
        async for event in client.events(job, after=after):
            sys.stdout.write(orjson.dumps(event.model_dump()).decode() + "\n")
            sys.stdout.flush()

    connect.call(settings, follow, patient=True)


class JobProgressView:
    """The rollouts of a job and where each of them stands: a table where somebody watches, else a line an event."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rollouts: dict[str, str] = {}
        self._since: dict[str, float] = {}
        self._console = common.err
        self._live = False

    @contextlib.contextmanager
    def shown(self, *, quiet: bool) -> Iterator[None]:
        self._live = self._console.is_terminal and not quiet
        if not self._live:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True):
            yield

    def happened(self, event: Event) -> None:
        data = event.data
        if event.event == "stage":
            self._rollouts[data["rollout_id"]] = data["to"]
            self._since[data["rollout_id"]] = time.monotonic()
        if self._live:
            return
        match event.event:
            case "stage":
                why = f" ({data['cause']})" if data.get("cause") else ""
                line = f"{data['rollout_id']}: {data['to']}{why}"
            case "group":
                line = f"{data['group_id']}: {data.get('status')}"
            case "job":
                line = f"{data['job_id']}: {data.get('status')}"
            case _:
                return
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("rollout", "stage", "s"):
            table.add_column(name, no_wrap=True)
        now = time.monotonic()
        active = {one: to for one, to in self._rollouts.items() if to not in _FINAL and to != "queued"}
        for rollout_id, stage in list(active.items())[:_SHOWN]:
            table.add_row(rollout_id, f"[cyan]{stage}[/]", f"{now - self._since[rollout_id]:.0f}")
        ends = Counter(to for to in self._rollouts.values() if to in _FINAL)
        told = [f"[{colour}]{ends[name]} {name}[/]" for name, colour in _FINAL.items() if ends[name]]
        queued = sum(self._job.rollouts.values()) - len(active) - ends.total()
        table.caption = ", ".join([*told, f"{len(active)} active", f"{queued} queued"])
        return table
