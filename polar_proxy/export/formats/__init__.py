"""Trainer formats: convert rows of `tokens-jsonl` to the records of other trainers. Each trainer has one module. Pure.

Ids, mask and log-probabilities of a record are exactly those recorded. A row that does not fit a format is refused with
RowError, never changed to fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from polar_proxy.export.formats import nemo_rl, slime, tinker, trl, verl
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


TRAINER_FORMATS: dict[str, Callable[[list[TrainingRow], IdNumbers], list[Json]]] = {
    "trl": lambda rows, numbers: [trl.record(row, numbers) for row in rows],
    "verl": lambda rows, numbers: [verl.agent_loop_output(row) for row in rows],
    "slime": lambda rows, numbers: [slime.sample(row, numbers) for row in rows],
    "nemo-rl": lambda rows, numbers: [nemo_rl.datum_spec(rows, numbers.traces[rows[0].trace_id])],
    "tinker": lambda rows, numbers: [tinker.datum(row) for row in rows],
}
"""Converters by their name in `polar export --format`. Each makes records from the rows of one rollout, or raises
RowError."""


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
