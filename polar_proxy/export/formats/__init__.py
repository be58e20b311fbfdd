"""Polar's rows in the records of other trainers: one file a trainer, pure functions from a row to a record.

A bridge adds nothing and leaves nothing out: ids, mask and log-probabilities are those that were recorded, and what a
record cannot hold is refused with BridgeError, never bent. docs/bridges.md says what each trainer does with its record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from polar_proxy.export.formats import nemo_rl, slime, tinker, trl, verl
from polar_proxy.export.formats.training_rows import (
    IdNumbers,
    TrainingRow,
    UnsupportedRowError,
    group_advantages,
    groups_of,
    read_jsonl,
    read_row,
    rows_of_group,
    with_advantages,
)
from polar_proxy.types import Json

__all__ = [
    "TRAINER_FORMATS",
    "RecordConverter",
    "TrainingRow",
    "UnsupportedRowError",
    "group_advantages",
    "groups_of",
    "read_jsonl",
    "read_row",
    "rows_of_group",
    "with_advantages",
]

RowConverter = Callable[[list[TrainingRow]], list[Json]]
"""The rows of one rollout -> records. Raises BridgeError."""


def _trl() -> RowConverter:
    groups = IdNumbers()
    return lambda rows: trl.record(rows, groups)


def _verl() -> RowConverter:
    return lambda rows: [verl.agent_loop_output(row) for row in rows]


def _slime() -> RowConverter:
    samples = slime.Samples()
    return lambda rows: [samples.sample(row) for row in rows]


def _nemo_rl() -> RowConverter:
    numbers = IdNumbers()
    return lambda rows: [nemo_rl.datum_spec(rows, numbers[rows[0].trace_id])]


def _tinker() -> RowConverter:
    return lambda rows: [tinker.datum(row) for row in rows]


TRAINER_FORMATS: dict[str, Callable[[], RowConverter]] = {
    "trl": _trl,
    "verl": _verl,
    "slime": _slime,
    "nemo-rl": _nemo_rl,
    "tinker": _tinker,
}
"""Names of `polar export --format`; each call begins a data set of its own."""


class RecordConverter:
    """Rows of one rollout after another into records of one format; what is refused is counted by reason."""

    def __init__(self, form: str) -> None:
        self._convert = TRAINER_FORMATS[form]()
        self.left_out: Counter[str] = Counter()

    def __call__(self, rows: Sequence[Json]) -> list[Json]:
        """All of a rollout or nothing: half of its sequences would weigh as a whole one."""
        try:
            return self._convert([read_row(row) for row in rows]) if rows else []
        except UnsupportedRowError as error:
            self.left_out[error.reason] += len(rows)
            return []
