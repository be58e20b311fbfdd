"""Trainer formats: convert rows of `tokens-jsonl` to the records of other trainers. Each trainer has one module. Pure.

Ids, mask and log-probabilities of a record are exactly those recorded. A row that does not fit a format is refused with
RowError, never changed to fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from polar_proxy.export.formats.training_rows import (
    IdNumbers,
    TrainingRow,
    advantages_by_rollout,
    groups_of,
    read_training_row,
    read_training_rows,
    with_advantages,
)
from polar_proxy.traces.rows import RowError, read_jsonl
from polar_proxy.types import Json

__all__ = [
    "TRAINER_FORMATS",
    "RecordConverter",
    "RowError",
    "TrainingRow",
    "advantages_by_rollout",
    "groups_of",
    "read_jsonl",
    "read_training_row",
    "with_advantages",
]


def _trl(rows: list[TrainingRow], numbers: IdNumbers) -> list[Json]:
    from polar_proxy.export.formats import trl

    return [trl.record(row, numbers) for row in rows]


def _verl(rows: list[TrainingRow], numbers: IdNumbers) -> list[Json]:
    from polar_proxy.export.formats import verl

    return [verl.agent_loop_output(row) for row in rows]


def _slime(rows: list[TrainingRow], numbers: IdNumbers) -> list[Json]:
    from polar_proxy.export.formats import slime

    return [slime.sample(row, numbers) for row in rows]


def _nemo_rl(rows: list[TrainingRow], numbers: IdNumbers) -> list[Json]:
    from polar_proxy.export.formats import nemo_rl

    return [nemo_rl.datum_spec(rows, numbers.traces[rows[0].trace_id])]


def _tinker(rows: list[TrainingRow], numbers: IdNumbers) -> list[Json]:
    from polar_proxy.export.formats import tinker

    return [tinker.datum(row) for row in rows]


TRAINER_FORMATS: dict[str, Callable[[list[TrainingRow], IdNumbers], list[Json]]] = {
    "trl": _trl,
    "verl": _verl,
    "slime": _slime,
    "nemo-rl": _nemo_rl,
    "tinker": _tinker,
}
"""Converters by their name in `polar export --format`. Each makes records from the rows of one rollout, or raises
RowError. A format's module is imported at its first use."""


class RecordConverter:
    """Makes records of one format from the rows of one rollout after another, and counts refused rows by reason."""

    def __init__(self, form: str) -> None:
        self._convert, self._numbers = TRAINER_FORMATS[form], IdNumbers()
        self.left_out: Counter[str] = Counter()

    def __call__(self, rows: Sequence[Json]) -> list[Json]:
        """Convert the usable rows of a rollout, and count the others. A format may also refuse the whole rollout."""
        usable = read_training_rows(rows, self.left_out)
        try:
            return self._convert(usable, self._numbers) if usable else []
        except RowError as error:
            self.left_out[error.reason] += len(usable)
            return []
