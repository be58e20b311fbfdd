"""Training runs: a copy of each run's metrics.jsonl that other processes can read.

The file in the run's folder is the original. When a trainer starts, it replaces the copy by all lines of the file.
So if a crash undid some steps, their lines disappear from the copy as well. Afterwards the trainer adds to the copy
each line that it writes to the file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Text, cast, delete, func, insert, select, update

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.types import Json

_r = schema.training_runs.c
_l = schema.training_lines.c
_OWN_COLUMNS = ("kind", "step", "at")
"""Fields of a line of metrics.jsonl that have their own columns; the others are in the column `data`."""


class MissingLinesError(StoreError):
    """Lines of a metrics.jsonl cannot be added, because lines before them are missing. `lines`: how many are stored."""

    def __init__(self, run_id: str, lines: int, first: int) -> None:
        super().__init__(
            f"The training run {run_id} has {lines} stored lines, so line {first} cannot be added: lines are missing"
        )
        self.lines = lines


@dataclass(frozen=True, slots=True)
class TrainingRunRow:
    run_id: str
    name: str
    config: Json
    """The settings, as `GrpoConfig` has them."""
    created_at: float
    updated_at: float | None
    """The time of the newest line of the run's metrics.jsonl; None if there are no lines."""
    step: int
    """Number of completed steps."""
    lines: int


_of_run = select(schema.training_lines).where(_l.run_id == _r.run_id).correlate(schema.training_runs)
_select_runs = select(
    *row_columns(
        TrainingRunRow,
        schema.training_runs,
        updated_at=_of_run.with_only_columns(_l.at).order_by(_l.position.desc()).limit(1).scalar_subquery(),
        step=func.coalesce(_of_run.with_only_columns(func.max(_l.step)).scalar_subquery(), 0),
        lines=func.coalesce(_of_run.with_only_columns(func.max(_l.position) + 1).scalar_subquery(), 0),
    )
)
"""Query for the rows of training runs. The database looks up `updated_at`, `step` and `lines` in an index, so a run
with many lines is no slower."""


class TrainingRepository(Repository):
    """Training runs and their metrics."""

    async def put_run(self, run_id: str, name: str, config: Json, lines: Sequence[Json]) -> None:
        """Insert or update a run and replace all its lines. Each line has `kind`, `step` and `at`."""
        row = {"run_id": run_id, "name": name, "config": config, "created_at": time.time()}

        def write(connection: Connection) -> None:
            connection.execute(self._database.insert_new(schema.training_runs), row)
            values = {"name": name, "config": config}
            connection.execute(update(schema.training_runs).where(_r.run_id == run_id).values(values))
            connection.execute(delete(schema.training_lines).where(_l.run_id == run_id))
            if lines:
                connection.execute(insert(schema.training_lines), _line_rows(run_id, 0, lines))

        await self._database.write(write)

    async def add_lines(self, run_id: str, first: int, lines: Sequence[Json]) -> None:
        """Add the lines `first`, `first + 1`, ... of a run. Stored lines stay as they are.

        Raises StoreError for an unknown run, MissingLinesError if lines before `first` are missing.
        """

        def write(connection: Connection) -> None:
            known = connection.scalar(select(_r.run_id).where(_r.run_id == run_id).with_for_update())
            if known is None:
                raise StoreError(f"There is no training run {run_id}")
            stored = connection.scalar(select(func.count()).where(_l.run_id == run_id)) or 0
            if stored < first:
                raise MissingLinesError(run_id, stored, first)
            if lines:
                new = self._database.insert_new(schema.training_lines)
                connection.execute(new, _line_rows(run_id, first, lines))

        await self._database.write(write)

    async def runs(self, run_id: str | None = None) -> list[TrainingRunRow]:
        """Return all runs, newest first, or the run with this id."""
        query = _select_runs if run_id is None else _select_runs.where(_r.run_id == run_id)
        return await self._rows(TrainingRunRow, query.order_by(_r.created_at.desc(), _r.run_id.desc()))

    async def step_of_group(self, run_id: str, group_id: str) -> int | None:
        """Return the first step whose line names the group in its `groups`; None if no line does."""
        naming = cast(_l.data, Text).contains(group_id, autoescape=True)
        query = select(_l.step, _l.data).where(_l.run_id == run_id, naming).order_by(_l.position)
        for row in await self._database.read(lambda connection: connection.execute(query).all()):
            groups = row.data.get("groups")  # a trainer of another kind may write any value there
            if isinstance(groups, list) and group_id in groups:
                return int(row.step)
        return None

    async def lines(self, run_id: str) -> list[Json]:
        """Return all lines of a run's metrics.jsonl, in the order in which they were written."""
        query = select(_l.kind, _l.step, _l.at, _l.data).where(_l.run_id == run_id).order_by(_l.position)

        def read(connection: Connection) -> list[Json]:
            rows = connection.execute(query)
            return [{"kind": row.kind, "step": row.step, "at": row.at, **row.data} for row in rows]

        return await self._database.read(read)


def _line_rows(run_id: str, first: int, lines: Sequence[Json]) -> list[Json]:
    return [
        {
            "run_id": run_id,
            "position": position,
            **{name: line[name] for name in _OWN_COLUMNS},
            "data": {name: value for name, value in line.items() if name not in _OWN_COLUMNS},
        }
        for position, line in enumerate(lines, start=first)
    ]
