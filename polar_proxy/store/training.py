"""Training runs as their trainers tell of them: the lines of each run's metrics.jsonl, for whoever looks elsewhere.

The file in the run's folder is the original. A trainer that begins gives all lines that it stands by, so that those of
steps which a kill took back are gone here as well; from then on it adds what it writes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, insert, select, update

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.base import Repository
from polar_proxy.types import Json

_r = schema.training_runs.c
_l = schema.training_lines.c
_APART = ("kind", "step", "at")


class MissingLinesError(StoreError):
    """Lines were given of which some before them are not there. `lines`: how many are."""

    def __init__(self, run_id: str, lines: int, first: int) -> None:
        super().__init__(f"The training run {run_id} has {lines} lines here: line {first} cannot follow")
        self.lines = lines


@dataclass(frozen=True, slots=True)
class TrainingRunRow:
    run_id: str
    name: str
    config: Json
    """Its settings, as `GrpoConfig` has them."""
    created_at: float
    updated_at: float | None
    """When its last line was written."""
    step: int
    """Steps done."""
    lines: int


class TrainingRepository(Repository):
    async def put_run(self, run_id: str, name: str, config: Json, lines: Sequence[Json]) -> None:
        """Make the run known, or take it up: these are all its lines. Each has `kind`, `step` and `at`."""
        row = {"run_id": run_id, "name": name, "config": config, "created_at": time.time()}
        async with self._database.writing() as connection:
            await connection.execute(self._database.insert_new(schema.training_runs), row)
            values = {"name": name, "config": config}
            await connection.execute(update(schema.training_runs).where(_r.run_id == run_id).values(values))
            await connection.execute(delete(schema.training_lines).where(_l.run_id == run_id))
            if lines:
                await connection.execute(insert(schema.training_lines), _rows(run_id, 0, lines))

    async def add_lines(self, run_id: str, first: int, lines: Sequence[Json]) -> None:
        """Lines `first`, `first + 1`, ... of a run; what is there already stays as it is. Raises StoreError where the
        run is not known, MissingLinesError where lines before these are not there."""
        async with self._database.writing() as connection:
            known = await connection.scalar(select(_r.run_id).where(_r.run_id == run_id).with_for_update())
            if known is None:
                raise StoreError(f"There is no training run {run_id}")
            here = await connection.scalar(select(func.count()).where(_l.run_id == run_id)) or 0
            if here < first:
                raise MissingLinesError(run_id, here, first)
            if lines:
                new = self._database.insert_new(schema.training_lines)
                await connection.execute(new, _rows(run_id, first, lines))

    async def runs(self, run_id: str | None = None) -> list[TrainingRunRow]:
        """Newest first; or this one, if it is known."""
        told = (
            select(
                _l.run_id,
                func.max(_l.at).label("updated_at"),
                func.max(_l.step).label("step"),
                func.count().label("lines"),
            )
            .group_by(_l.run_id)
            .subquery()
        )
        query = select(schema.training_runs, told.c.updated_at, told.c.step, told.c.lines).outerjoin(
            told, told.c.run_id == _r.run_id
        )
        if run_id is not None:
            query = query.where(_r.run_id == run_id)
        async with self._database.reading() as connection:
            rows = (await connection.execute(query.order_by(_r.created_at.desc(), _r.run_id.desc()))).all()
        return [
            TrainingRunRow(
                row.run_id, row.name, row.config, row.created_at, row.updated_at, row.step or 0, row.lines or 0
            )
            for row in rows
        ]

    async def lines(self, run_id: str) -> list[Json]:
        """All of a run, in the order in which they were written."""
        query = select(_l.kind, _l.step, _l.at, _l.data).where(_l.run_id == run_id).order_by(_l.position)
        async with self._database.reading() as connection:
            rows = (await connection.execute(query)).all()
        return [{"kind": row.kind, "step": row.step, "at": row.at, **row.data} for row in rows]


def _rows(run_id: str, first: int, lines: Sequence[Json]) -> list[Json]:
    return [
        {
            "run_id": run_id,
            "position": position,
            **{name: line[name] for name in _APART},
            "data": {name: value for name, value in line.items() if name not in _APART},
        }
        for position, line in enumerate(lines, start=first)
    ]
